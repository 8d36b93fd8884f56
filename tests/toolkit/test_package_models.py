"""`edgekit package` on every tiny model, target and engine, and on models that are not the usual kind."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import (
    mlp,
    model_of,
    package,
    read_only,
    samples,
    saved,
    stored,
    tensor,
    tiny,
)

from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_toolkit.targets.loader import list_targets

pytestmark = pytest.mark.usefixtures("home")


TINY_MODELS = ("mnist5k_dscnn", "digits_cnn", "italy_power_mlp", "japanese_vowels_tcn")
# Every target, and every model with each engine: with LiteRT in test_package_litert.py. All pairs are in
# benchmarks/combinations.py. The long run has those of which others have the model and the kind of target.
TARGETS_OF_ENGINES = (
    ("rpi-zero-2w", "rpi4", "rpi5", "x86-64"),
    ("jetson-agx-orin", *("jetson-orin-nano",) * 3),
)
COMBINATIONS = [pair for targets in TARGETS_OF_ENGINES for pair in zip(TINY_MODELS, targets, strict=True)]
COMBINATIONS += [("italy_power_mlp", "android-arm64"), ("mnist5k_dscnn", "x86-64-avx2")]
SHORT = {
    ("mnist5k_dscnn", "rpi-zero-2w"),
    ("digits_cnn", "rpi4"),
    ("italy_power_mlp", "jetson-orin-nano"),
    ("italy_power_mlp", "android-arm64"),
    ("japanese_vowels_tcn", "x86-64"),
    ("mnist5k_dscnn", "x86-64-avx2"),
}


def test_every_target_is_among_the_combinations() -> None:
    assert {target for _, target in COMBINATIONS} == {target.name for target in list_targets()}


@pytest.mark.parametrize(
    ("model", "target"),
    [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in COMBINATIONS],
)
def test_tiny_model_is_packaged_for_a_target(model: str, target: str, tmp_path: Path) -> None:
    source, data = tiny(model, evaluation_samples=1000 if model == "italy_power_mlp" else 200)
    assert package(source, tmp_path, *data, "--search-seconds", 0.1, target=target).code == 0
    with read_only(tmp_path) as opened:
        assert opened.manifest.target == target
        score: Any = opened.manifest.figures["score"]
        assert 100 * (score["source_value"] - score["value"]) <= 1
        session = open_session(opened)
        assert run_selftest(session, opened).passed
        session.close()


def unusual_models() -> dict[str, Any]:
    node, weight = helper.make_node, np.random.default_rng(3).standard_normal((8, 4)).astype(np.float32)
    x, y = tensor("x", ["N", 8]), tensor("y", ["N", 4])
    product = node("MatMul", ["x", "w"], ["h"])

    def branch(operator: str) -> Any:
        return helper.make_graph([node(operator, ["h"], ["out"])], operator, [], [tensor("out", ["N", 4])])

    def typed(dtype: int) -> Any:
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        return model_of(
            [product, node("Relu", ["h"], ["y"])],
            [tensor("x", ["N", 8], dtype)],
            [tensor("y", ["N", 4], dtype)],
            {"w": weight.astype(kind)},
        )

    table = np.random.default_rng(4).standard_normal((100, 8)).astype(np.float32)
    return {
        "dynamic batch": mlp("N"),
        "fixed batch": mlp(4),
        "several inputs and outputs": model_of(
            [node("MatMul", ["x", "w"], ["p"]), node("MatMul", ["z", "w"], ["q"]),
             node("Add", ["p", "q"], ["s"]), node("Sub", ["p", "q"], ["d"])],
            [x, tensor("z", ["N", 8])], [tensor("s", ["N", 4]), tensor("d", ["N", 4])], {"w": weight},
        ),
        "integer inputs": model_of(
            [node("Gather", ["table", "ids"], ["v"]), node("ReduceMean", ["v"], ["x"], axes=[1], keepdims=0),
             node("MatMul", ["x", "w"], ["y"])],
            [tensor("ids", ["N", "L"], TensorProto.INT64)], [y], {"table": table, "w": weight},
        ),
        "a scalar input": model_of(
            [node("Mul", ["x", "k"], ["xk"]), node("MatMul", ["xk", "w"], ["y"])], [tensor("k", []), x], [y],
            {"w": weight},
        ),
        "no batch": model_of(
            [node("MatMul", ["x", "w"], ["y"])], [tensor("x", [8])], [tensor("y", [4])], {"w": weight}
        ),
        "no weights": model_of(
            [node("Relu", ["x"], ["r"]), node("Add", ["r", "x"], ["y"])], [x], [tensor("y", ["N", 8])]
        ),
        "only a Gemm": model_of([node("Gemm", ["x", "w"], ["y"])], [x], [y], {"w": weight}),
        "control flow": model_of(
            [product, node("ReduceSum", ["x"], ["s"], keepdims=0), node("Greater", ["s", "zero"], ["c"]),
             node("If", ["c"], ["y"], then_branch=branch("Relu"), else_branch=branch("Tanh"))],
            [x], [y], {"w": weight, "zero": np.float32(0)},
        ),
        "float16": typed(TensorProto.FLOAT16),
        "float64": typed(TensorProto.DOUBLE),
        "boolean output": model_of(
            [node("Greater", ["x", "zero"], ["y"])], [x], [tensor("y", ["N", 8], TensorProto.BOOL)],
            {"zero": np.float32(0)},
        ),
    }  # fmt: skip


@cases("what", unusual_models())
def test_an_unusual_model_is_packaged(what: str, tmp_path: Path) -> None:
    model = saved(unusual_models()[what], tmp_path / "net.onnx")
    sizes = ("--dim", "L=6") if what == "integer inputs" else ()
    outcome = package(model, tmp_path / "out", *sizes, target="rpi4")
    assert (outcome.code, outcome.stderr) == (0, "")
    with read_only(tmp_path / "out") as opened:
        session = open_session(opened)
        assert run_selftest(session, opened).passed
        session.close()


@pytest.mark.parametrize(("batch", "option", "fixed"), [("N", (), "N"), ("N", ("--batch", 4), 4), (4, (), 4)])
def test_the_package_has_the_batch_that_was_asked_for(
    batch: int | str, option: tuple[object, ...], fixed: int | str, tmp_path: Path
) -> None:
    model = saved(mlp(batch), tmp_path / "net.onnx")
    data = ("--eval", stored(tmp_path / "e.npz", samples(16, 1)))
    assert package(model, tmp_path / "out", *data, *option).code == 0
    with read_only(tmp_path / "out") as opened:
        assert opened.manifest.inputs[0].shape == (fixed, 8)
        score: Any = opened.manifest.figures["score"]
    assert score["samples"] == 8


QUANTIZERS = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}


def quantized() -> onnx.ModelProto:
    """Like `mlp`, with int8 codes before and after its only product."""
    node = helper.make_node
    codes = np.random.default_rng(5).integers(-127, 128, (8, 4)).astype(np.int8)
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
        node("MatMul", ["xd", "wd"], ["h"]),
        node("QuantizeLinear", ["h", "ys", "xz"], ["yq"]),
        node("DequantizeLinear", ["yq", "ys", "xz"], ["y"]),
    ]
    scales = {name: np.float32(scale) for name, scale in (("xs", 0.03), ("ws", 0.01), ("ys", 0.1))}
    weights = {"w": codes, "wz": np.int8(0), "xz": np.uint8(128), **scales}
    return model_of(nodes, [tensor("x", ["N", 8])], [tensor("y", ["N", 4])], weights)


@pytest.mark.skipif(not find_spec("tensorrt_rtx_bindings"), reason="TensorRT is not installed")
def test_a_quantized_model_that_tensorrt_refuses_is_refused(tmp_path: Path) -> None:
    model = saved(quantized(), tmp_path / "net.onnx")  # with zero points
    outcome = package(model, tmp_path / "out", target="jetson")
    assert outcome.code == 5
    assert "TensorRT refuses C0" in outcome.stderr
    assert not list((tmp_path / "out").glob("*.edgepkg"))


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    model = saved(quantized(), tmp_path / "net.onnx")
    outcome = package(model, tmp_path / "out", "--json", target="x86-64")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert any("already quantized" in text for text in outcome.json["warnings"])
    with read_only(tmp_path / "out") as opened:
        packaged = onnx.load_model_from_string(bytes(opened.read("model.onnx")))
    kinds = [
        [node.op_type for node in graph.node if node.op_type in QUANTIZERS]
        for graph in (packaged.graph, quantized().graph)
    ]
    assert kinds[0] == kinds[1]
    assert not [one["label"] for one in outcome.json["candidates"] if one["label"].startswith("int8 per")]


def test_output_that_stays_empty_is_named_in_a_warning_that_says_what_to_give(tmp_path: Path) -> None:
    weights = np.random.default_rng(3).standard_normal((8, 4)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Greater", ["x", "limit"], ["large"]),
        helper.make_node("NonZero", ["large"], ["places"]),
    ]
    constants = {"w": weights, "limit": np.array(1e30, np.float32)}
    outputs = [tensor("y", [1, 4]), tensor("places", [2, "found"], TensorProto.INT64)]
    model = saved(model_of(nodes, [tensor("x", [1, 8])], outputs, constants), tmp_path / "model.onnx")
    outcome = package(model, tmp_path / "out", "--json")
    (warning,) = (text for text in outcome.json["warnings"] if "no values" in text)
    assert "output 'places' has no values on any sample" in warning
    assert "--calibration" in warning
