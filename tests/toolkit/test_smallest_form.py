"""A model that no form brings under the limit on size is refused before any form is made."""

from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from tests.toolkit.package_run import listing, model_of, package, saved, tensor

from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.smallest_form import find_least_bytes, find_pruned_bytes
from edgekit_toolkit.targets.loader import load_target


def test_model_that_no_form_makes_small_enough_is_refused_before_the_search(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((512, 8, 3, 3)).astype(np.float32)
    conv = helper.make_node("Conv", ["x", "w"], ["y"])
    model = model_of([conv], [tensor("x", [1, 8, 8, 8])], [tensor("y", [1, 512, 6, 6])], {"w": weight})
    path, out = saved(model, tmp_path / "net.onnx"), tmp_path / "out"
    refused = package(path, out, "--budget", "size=30kB", "--json")
    assert refused.code == 5
    assert refused.error["binding"] == ["size"]
    assert "no form of the model keeps size=0.03MB" in refused.error["message"]
    assert "at least 36,864 bytes, so nothing was searched" in refused.error["message"]
    assert listing(out) == {}


def test_bytes_that_pruning_saves_are_bounded_by_the_share_of_the_work() -> None:
    draw = np.random.default_rng(0)
    weights = {
        name: draw.standard_normal(shape).astype(np.float32)
        for name, shape in {"w": (32, 32, 3, 3), "v": (32, 32, 3, 3), "u": (32, 32, 3, 3)}.items()
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "u"], ["y"], pads=[1, 1, 1, 1]),
    ]
    model = model_of(nodes, [tensor("x", [1, 32, 8, 8])], [tensor("y", [1, 32, 8, 8])], weights)
    assert 0.4 * 27_648 < find_pruned_bytes(OnnxModel(model), {}) <= 0.51 * 27_648


@pytest.mark.parametrize("backend", ["ort", "litert"])
def test_smallest_form_of_a_model_is_near_the_bound_and_not_below(backend: str) -> None:
    if backend == "litert":
        pytest.importorskip("ai_edge_litert")
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = model_of([product], [tensor("x", [1, 256])], [tensor("y", [1, 256])], {"w": weight})
    feeds = [{"x": np.ones((1, 256), np.float32)}]
    quantizer = find_support(backend).maker.open_quantizer(
        OnnxModel(model), load_target("x86-64"), threads=1, dims={}, feeds=feeds
    )
    forms = [quantizer.build(Form(kind)) for kind in quantizer.labels]
    sizes = [form.size_bytes for form in forms if form is not None]
    assert find_least_bytes(quantizer) <= min(sizes) <= 1.5 * find_least_bytes(quantizer)
