"""Models of which no self-test could prove anything are refused by name; masks of -inf are legal."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import model_of, package, read_only, saved, tensor

from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_toolkit.onnx_graph.traversal import RANDOM_OPERATORS, random_nodes

pytestmark = pytest.mark.usefixtures("home")

WEIGHTS = {"w": np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)}
NODE = helper.make_node
MATMUL = NODE("MatMul", ["x", "w"], ["m"])
LIKE = NODE("RandomNormalLike", ["m"], ["noise"])
ADD = NODE("Add", ["m", "noise"], ["y"])


def with_noise(*made: onnx.NodeProto, **weights: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """y = x @ w + noise."""
    nodes = [MATMUL, *made, ADD]
    return model_of(nodes, [tensor("x", [1, 8])], [tensor("y", [1, 8])], {**WEIGHTS, **weights})


RANDOM = {
    "RandomNormalLike": with_noise(LIKE),
    "RandomUniformLike": with_noise(NODE("RandomUniformLike", ["m"], ["noise"])),
    "RandomNormal": with_noise(NODE("RandomNormal", [], ["noise"], shape=[1, 8])),
    "RandomUniform": with_noise(NODE("RandomUniform", [], ["noise"], shape=[1, 8], seed=1.0)),
    "Bernoulli": with_noise(NODE("Sigmoid", ["m"], ["p"]), NODE("Bernoulli", ["p"], ["noise"])),
    "Multinomial": with_noise(
        NODE("Multinomial", ["m"], ["drawn"], sample_size=8),
        NODE("Cast", ["drawn"], ["noise"], to=TensorProto.FLOAT),
    ),
    "Dropout": with_noise(
        NODE("Dropout", ["m", "ratio", "training"], ["noise"]),
        ratio=np.array(0.5, np.float32),
        training=np.array(True),
    ),
}


@cases("operator", RANDOM)
def test_a_random_operator_is_refused_by_name(operator: str, tmp_path: Path) -> None:
    made = package(saved(RANDOM[operator], tmp_path / "model.onnx"), tmp_path / "out")
    assert made.code == 3, made.stderr
    assert f"{operator} '" in made.stderr
    assert "gives other values in each run" in made.stderr


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [tensor("y_inner", [1, 8])])


def test_a_random_operator_in_a_branch_is_refused(tmp_path: Path) -> None:
    noisy = branch("a", LIKE, NODE("Add", ["m", "noise"], ["y_inner"]))
    calm = branch("b", NODE("Identity", ["m"], ["y_inner"]))
    nodes = [MATMUL, NODE("If", ["flag"], ["y"], then_branch=noisy, else_branch=calm)]
    inputs = [tensor("x", [1, 8]), tensor("flag", [], TensorProto.BOOL)]
    model = model_of(nodes, inputs, [tensor("y", [1, 8])], WEIGHTS)
    made = package(saved(model, tmp_path / "model.onnx"), tmp_path / "out")
    assert (made.code, "RandomNormalLike 'noise'" in made.stderr) == (3, True)


def test_a_random_operator_in_a_function_is_refused(tmp_path: Path) -> None:
    opset = [helper.make_opsetid("", 17)]
    body = [NODE("RandomNormalLike", ["a"], ["n"]), NODE("Add", ["a", "n"], ["b"])]
    model = model_of(
        [MATMUL, NODE("Noisy", ["m"], ["y"], domain="own")],
        [tensor("x", [1, 8])],
        [tensor("y", [1, 8])],
        WEIGHTS,
    )
    model.functions.append(helper.make_function("own", "Noisy", ["a"], ["b"], body, opset))
    model.opset_import.append(helper.make_opsetid("own", 1))
    made = package(saved(model, tmp_path / "model.onnx"), tmp_path / "out")
    assert (made.code, "RandomNormalLike" in made.stderr) == (3, True)


@pytest.mark.parametrize("inputs", [["m"], ["m", "ratio"], ["m", "ratio", "training"]])
def test_a_dropout_for_inference_is_no_random_operator(inputs: list[str]) -> None:
    dropout = NODE("Dropout", inputs, ["noise"])
    ratio, training = np.array(0.5, np.float32), np.array(False)
    assert random_nodes(with_noise(dropout, ratio=ratio, training=training)) == []


def test_a_dropout_whose_mode_is_an_input_is_random() -> None:
    model = with_noise(NODE("Dropout", ["m", "", "training"], ["noise"]))
    model.graph.input.append(tensor("training", [], TensorProto.BOOL))
    assert [node.op_type for node in random_nodes(model)] == ["Dropout"]


def test_every_operator_that_onnx_calls_random_is_known() -> None:
    schemas = onnx.defs.get_all_schemas_with_history()
    random = onnx.defs.OpSchema.NodeDeterminism.NonDeterministic
    named = {schema.name for schema in schemas if schema.node_determinism == random}
    # As random as their bodies or their mode; AffineGrid computes a grid.
    assert named - {"AffineGrid", "Dropout", "If", "Loop", "Scan", "SequenceMap"} == RANDOM_OPERATORS


@pytest.mark.parametrize(("operator", "kind"), [("Exp", "infinite in every value"), ("Sqrt", "NaN")])
def test_outputs_that_are_never_numbers_are_refused_by_name(operator: str, kind: str, tmp_path: Path) -> None:
    offset = np.full(8, 1e4 if operator == "Exp" else -1e4, np.float32)
    model = with_noise(NODE("Add", ["x", "offset"], ["noise"]), offset=offset)
    model.graph.node[-1].output[0] = "sum"
    model.graph.node.append(NODE(operator, ["sum"], ["y"]))
    made = package(saved(model, tmp_path / "model.onnx"), tmp_path / "out")
    assert (made.code, f"output 'y' is {kind}" in made.stderr) == (4, True), made.stderr


def attention(low: float) -> onnx.ModelProto:
    """Attention with a causal mask of `low`, which is added to the scores."""
    draw = np.random.default_rng(1)
    mask = np.triu(np.full((8, 8), low, np.float32), 1)
    mask[np.tril_indices(8)] = 0
    weights = {"q": draw.standard_normal((16, 16)), "k": draw.standard_normal((16, 16))}
    nodes = [
        NODE("MatMul", ["x", "q"], ["queries"]),
        NODE("MatMul", ["x", "k"], ["keys"]),
        NODE("Transpose", ["keys"], ["turned"], perm=[0, 2, 1]),
        NODE("MatMul", ["queries", "turned"], ["scores"]),
        NODE("Add", ["scores", "mask"], ["masked"]),
        NODE("Softmax", ["masked"], ["shares"]),
        NODE("MatMul", ["shares", "x"], ["y"]),
    ]
    stored = {name: (0.25 * value).astype(np.float32) for name, value in weights.items()}
    return model_of(nodes, [tensor("x", [1, 8, 16])], [tensor("y", [1, 8, 16])], {**stored, "mask": mask})


@pytest.mark.parametrize("backend", ["ort", "litert"])
def test_a_mask_of_minus_infinity_stays_in_float_beside_int8_layers(backend: str, tmp_path: Path) -> None:
    if backend == "litert":
        pytest.importorskip("ai_edge_litert")
    x = np.random.default_rng(2).standard_normal((24, 8, 16)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    model = saved(attention(-np.inf), tmp_path / "model.onnx")
    options = ("--backend", backend, "--calibration", tmp_path / "x.npz", "--budget", "drop=100%")
    made = package(model, tmp_path / "out", *options, "--json", target="rpi5")
    assert made.code == 0, made.stderr
    candidates = made.json["candidates"]
    assert any(one["label"].startswith("int8 per-") for one in candidates), [
        one["label"] for one in candidates
    ]
    with read_only(tmp_path / "out") as opened:
        assert run_selftest(open_session(opened), opened).passed
