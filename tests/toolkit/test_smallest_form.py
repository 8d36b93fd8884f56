"""A model that no form brings under the limit on size is refused before any form is made."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.toolkit.package_run import listing, model_of, package, saved, tensor
from tests.toolkit.small_models import random_weight

from edgekit_toolkit.compress.pruning import PRUNED_SHARES, prune
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.sensitivity import Fidelity
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


def conv_network() -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    weights = {name: random_weight(draw, 32, 32, 3, 3) for name in ("w", "v", "u")}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "u"], ["y"], pads=[1, 1, 1, 1]),
    ]
    return model_of(nodes, [tensor("x", [1, 32, 8, 8])], [tensor("y", [1, 32, 8, 8])], weights)


def product_network() -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    weights = {
        "w": random_weight(draw, 24, 64),
        "b": random_weight(draw, 24),
        "v": random_weight(draw, 4, 24),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["a"], transB=1),
        helper.make_node("Relu", ["a"], ["c"]),
        helper.make_node("Gemm", ["c", "v"], ["y"], transB=1),
    ]
    return model_of(nodes, [tensor("x", [1, 64])], [tensor("y", [1, 4])], weights)


@pytest.mark.parametrize("network", [conv_network, product_network])
@pytest.mark.parametrize("multiple", [8, 16])
def test_pruning_saves_no_more_bytes_than_the_bound(
    network: Callable[[], onnx.ModelProto], multiple: int
) -> None:
    model = onnx.shape_inference.infer_shapes(network())
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    draw = np.random.default_rng(1)
    samples = [{"x": draw.standard_normal(shape).astype(np.float32)} for _ in range(60)]
    fidelity = Fidelity(OnnxModel(model), samples[:4], threads=1, softmax_axes=[None])
    pruned = prune(
        model,
        samples,
        shares=PRUNED_SHARES,
        multiple=multiple,
        threads=1,
        measure_noise=lambda variant: fidelity.noise(OnnxModel(variant)),
    )
    saved = count_weights(model) - count_weights(pruned[-1].model)
    bound = find_pruned_bytes(OnnxModel(model), {}, multiple=multiple)
    assert 0 < saved <= bound < count_weights(model)


def count_weights(model: onnx.ModelProto) -> int:
    return sum(math.prod(tensor.dims) for tensor in model.graph.initializer)


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
