"""Sizes of free dimensions: from the user or the samples, a batch of 1 that is shown, and nothing guessed."""

import base64
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import check_refused, isolated_home, model_of, package, saved, stored, tensor

from edgekit_runtime.errors import ModelError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.costs.tflite_operators import tflite_costs
from edgekit_toolkit.importers.sizes import Size, settle_sizes
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.onnx_graph.specs import batch_dims
from edgekit_toolkit.tflite.convert import convert
from edgekit_toolkit.tflite.flatbuffer import parsed


def picture(*, leading: int | str = "N") -> onnx.ModelProto:
    """y [N, 4] of a picture x [N, 3, H, W] of any size."""
    weights = {"w": np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("GlobalMaxPool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    inputs, outputs = [tensor("x", [leading, 3, "H", "W"])], [tensor("y", [leading, 4])]
    return model_of(nodes, inputs, outputs, weights)


def test_height_and_width_that_nothing_tells_are_asked_for(tmp_path: Path):
    model = saved(picture(), tmp_path / "model.onnx")
    with isolated_home(tmp_path / "home"):
        check_refused(
            lambda *options: package(model, tmp_path / "out", *options, target="rpi5"),
            3,
            r"depend on the sizes of the free dimensions H, W.*--dim H=224 --dim W=224",
        )


def test_sizes_that_are_given_are_shown_beside_the_figures(tmp_path: Path):
    model = saved(picture(), tmp_path / "model.onnx")
    options = ("--dim", "H=20", "--dim", "W=30", "--budget", "latency=1s")
    with isolated_home(tmp_path / "home"):
        told = package(model, tmp_path / "told", *options, target="rpi5")
        report = package(model, tmp_path / "out", *options, "--json", target="rpi5").json
    wanted = "N=1 (assumed), H=20 (given), W=30 (given)"
    assert f"Latency, memory and energy are for {wanted}" in " ".join(told.stdout.split())
    (page,) = (tmp_path / "out").glob("*.report.html")
    # In the tiles of latency, memory and energy.
    assert page.read_text(encoding="utf-8").count(f"for {wanted}") == 3
    sizes = [
        {"name": "N", "size": 1, "from": "assumed"},
        {"name": "H", "size": 20, "from": "given"},
        {"name": "W", "size": 30, "from": "given"},
    ]
    assert report["sizes"] == sizes
    (evidence,) = (tmp_path / "out").glob("*.evidence.json")
    payload = base64.b64decode(json.loads(evidence.read_bytes())["payload"])
    assert json.dumps(sizes[1], separators=(",", ":"), sort_keys=True).encode() in payload


def cache() -> onnx.ModelProto:
    """y [1, P + 1, 4] of a cache [1, P, 4], which is empty before the first step, and x [1, 1, 4]."""
    nodes = [
        helper.make_node("Concat", ["past", "x"], ["all"], axis=1),
        helper.make_node("Tanh", ["all"], ["y"]),
    ]
    inputs = [tensor("past", [1, "P", 4]), tensor("x", [1, 1, 4])]
    return model_of(nodes, inputs, [tensor("y", [1, "Q", 4])], {})


def test_cache_is_packaged_empty_by_an_option(tmp_path: Path):
    model = saved(cache(), tmp_path / "model.onnx")
    with isolated_home(tmp_path / "home"):
        report = package(model, tmp_path / "out", "--dim", "P=0", "--json", target="rpi5").json
    assert report["sizes"] == [{"name": "P", "size": 0, "from": "given"}]


def test_empty_cache_is_refused_for_litert_by_its_name_with_the_ways_out(tmp_path: Path):
    model = saved(cache(), tmp_path / "model.onnx")
    with isolated_home(tmp_path / "home"):
        check_refused(
            lambda *more: package(
                *(model, tmp_path / "out", "--dim", "P=0", "--backend", "litert", *more), target="rpi5"
            ),
            3,
            r"input 'past' \[1, 0, 4\] has a dimension of size 0.*--backend ort.*at least 1",
        )


def test_batch_of_zero_is_refused_with_the_free_dimensions(tmp_path: Path):
    model = saved(picture(), tmp_path / "model.onnx")
    options = ("--dim", "N=0", "--dim", "H=20", "--dim", "W=30")
    with isolated_home(tmp_path / "home"):
        check_refused(
            lambda *more: package(model, tmp_path / "out", *options, *more, target="rpi5"),
            3,
            r"--dim N=0: expected a free dimension and a size of at least 1; free dimensions are N, H, W",
        )


def test_samples_tell_the_sizes_and_latency_is_modelled_for_them(tmp_path: Path):
    model = saved(picture(), tmp_path / "model.onnx")
    latencies = {}
    with isolated_home(tmp_path / "home"):
        for size in (16, 64):
            x = np.random.default_rng(1).standard_normal((8, 3, size, size)).astype(np.float32)
            data = stored(tmp_path / f"{size}.npz", {"x": x})
            out = tmp_path / f"out{size}"
            report = package(model, out, "--calibration", data, "--json", target="rpi5").json
            assert [one["from"] for one in report["sizes"]] == ["assumed", "samples", "samples"]
            latencies[size] = report["candidates"][0]["figures"]["latency"]["value"]
    assert latencies[64] > 2 * latencies[16]


def test_sizes_that_are_given_and_not_those_of_the_samples_are_told_apart(tmp_path: Path):
    """Modelled for the one, measured with the other; LiteRT takes one size only."""
    model = saved(picture(), tmp_path / "model.onnx")
    x = np.random.default_rng(1).standard_normal((8, 3, 16, 16)).astype(np.float32)
    data = stored(tmp_path / "16.npz", {"x": x})
    options = ("--calibration", data, "--dim", "H=32", "--dim", "W=16")
    with isolated_home(tmp_path / "home"):
        report = package(model, tmp_path / "out", *options, "--json", "--backend", "ort", target="rpi5").json
        check_refused(
            lambda *more: package(
                model, tmp_path / "other", *options, "--backend", "litert", *more, target="rpi5"
            ),
            3,
            r"for LiteRT sizes are fixed, here to H=32, and a sample has H=16; give samples of one size",
        )
    assert any(
        "is for H=32; latency and memory measured on this machine are those of the first sample, which has"
        " H=16" in note
        for note in report["warnings"]
    )


def test_model_without_free_dimensions_shows_no_sizes(tmp_path: Path):
    model = picture(leading=1)
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim[2:], (9, 9), strict=True):
        dim.dim_value = size
    with isolated_home(tmp_path / "home"):
        told = package(saved(model, tmp_path / "model.onnx"), tmp_path / "out", target="rpi5")
    assert told.code == 0
    assert "are for" not in told.stdout


@cases(
    ("shape", "batch"),
    [
        (("T", "N", 8), ("N",)),
        (("seq_len", 8), ()),
        (("H", "W", 3), ()),
        (("x_0", "x_1"), ("x_0",)),
        (("images", 3, "height", "width"), ("images",)),
    ],
)
def test_batch_is_told_by_its_name_or_its_place(shape, batch):
    assert batch_dims([TensorSpec("x", "float32", shape)]) == batch


def test_free_size_of_a_tflite_comes_from_samples_or_is_asked_for():
    inputs = [TensorSpec("x", "float32", ("x_0", "x_1", 3))]
    with pytest.raises(ModelError, match=r"the free dimension x_1, which nothing tells: give samples"):
        settle_sizes(TfliteModel(b""), inputs, {}, None, {})
    found = settle_sizes(TfliteModel(b""), inputs, {}, {"x": np.zeros((1, 40, 3), np.float32)}, {})
    assert found == {"x_0": Size(1, "assumed"), "x_1": Size(40, "samples")}


def test_tflite_that_is_used_with_other_sizes_than_stored_is_not_counted():
    weights = {"w": np.ones((8, 4), np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    lite = parsed(convert(model_of(nodes, [tensor("x", [1, 8])], [tensor("y", [1, 4])], weights), {}))
    graph = lite.subgraphs[0]
    graph.tensors[graph.inputs[0]].shapeSignature = [-1, 8]
    assert sum(cost.macs for cost in tflite_costs(lite, {"x_0": 1})) == 32
    with pytest.raises(ModelError, match=r"counted for the sizes that it has as stored, \[1\]"):
        tflite_costs(lite, {"x_0": 5})
