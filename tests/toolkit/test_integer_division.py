"""Which models are recorded as dividing integers by what their inputs decide."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import mlp, package, read_only, saved
from tests.toolkit.small_tflite import Lite

from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE
from edgekit_toolkit.models.integer_division import onnx_divides_by_inputs, tflite_divides_by_inputs

INT64, FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT


def make_model(
    nodes: Sequence[onnx.NodeProto], kind: int, initializers: Sequence[onnx.TensorProto] = ()
) -> onnx.ModelProto:
    a, b, c = (helper.make_tensor_value_info(name, kind, ["N"]) for name in "abc")
    graph = helper.make_graph(list(nodes), "g", [a, b], [c], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def stored(name: str, values: Sequence[int]) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.array(values, np.int64), name)


@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_division_of_integers_by_an_input_is_recorded(operator: str) -> None:
    assert onnx_divides_by_inputs(make_model([helper.make_node(operator, ["a", "b"], ["c"])], INT64))


@pytest.mark.parametrize(("divisor", "expected"), [([2], False), ([3, -1], True), ([0], True)])
def test_constant_divisor_counts_where_it_can_trap(divisor: list[int], expected: bool) -> None:
    by_initializer = [helper.make_node("Div", ["a", "d"], ["c"])]
    assert onnx_divides_by_inputs(make_model(by_initializer, INT64, [stored("d", divisor)])) is expected
    constant = helper.make_node("Constant", [], ["d"], value=stored("d", divisor))
    assert onnx_divides_by_inputs(make_model([constant, *by_initializer], INT64)) is expected


def test_division_of_floats_is_not_recorded() -> None:
    assert not onnx_divides_by_inputs(make_model([helper.make_node("Div", ["a", "b"], ["c"])], FLOAT))


def test_integers_made_of_float_inputs_are_recorded() -> None:
    nodes = [
        helper.make_node("Cast", ["a"], ["i"], to=INT64),
        helper.make_node("Cast", ["b"], ["j"], to=INT64),
        helper.make_node("Div", ["i", "j"], ["k"]),
        helper.make_node("Cast", ["k"], ["c"], to=FLOAT),
    ]
    assert onnx_divides_by_inputs(make_model(nodes, FLOAT))


def test_division_inside_control_flow_is_recorded() -> None:
    inner = [helper.make_tensor_value_info(name, INT64, ["N"]) for name in ("x", "y")]
    then = helper.make_graph([helper.make_node("Div", ["a", "b"], ["x"])], "then", [], inner[:1])
    other = helper.make_graph([helper.make_node("Add", ["a", "b"], ["y"])], "else", [], inner[1:])
    flag = onnx.numpy_helper.from_array(np.array(True), "flag")
    choose = helper.make_node("If", ["flag"], ["c"], then_branch=then, else_branch=other)
    assert onnx_divides_by_inputs(make_model([choose], INT64, [flag]))


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(INT64, FLOAT, True), (FLOAT, INT64, True), (FLOAT, FLOAT, False)]
)
def test_branches_that_share_names_do_not_hide_a_division(first: int, second: int, expected: bool) -> None:
    """Each branch has tensors p, q and r of its own, of integers or of floats."""

    def branch(name: str, kind: int) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Cast", ["a"], ["p"], to=kind),
            helper.make_node("Cast", ["b"], ["q"], to=kind),
            helper.make_node("Div", ["p", "q"], ["r"]),
            helper.make_node("Cast", ["r"], [name], to=INT64),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, INT64, ["N"])])

    flag = onnx.numpy_helper.from_array(np.array(True), "flag")
    branches = {"then_branch": branch("x", first), "else_branch": branch("y", second)}
    choose = helper.make_node("If", ["flag"], ["c"], **branches)
    assert onnx_divides_by_inputs(make_model([choose], INT64, [flag])) is expected


@cases("operator", ["DIV", "FLOOR_DIV", "FLOOR_MOD"])
@cases(
    ("dtype", "divisor", "expected"),
    [("int32", None, True), ("int32", [2], False), ("int32", [-1], True), ("float32", None, False)],
)
def test_tflite_model_is_judged_alike(operator: str, dtype: str, divisor: Any, expected: bool) -> None:
    lite = Lite()
    for name in "ac":
        lite.tensor(name, [1], dtype)
    lite.tensor("b", [1], dtype, None if divisor is None else np.array(divisor, dtype))
    lite.operator(operator, ["a", "b"], ["c"])
    lite.ends(["a"] if divisor else ["a", "b"], ["c"])
    assert tflite_divides_by_inputs(lite.model) is expected


@pytest.mark.usefixtures("home")
def test_package_says_whether_its_model_divides(tmp_path: Path) -> None:
    made = package(saved(mlp(), tmp_path / "mlp.onnx"), tmp_path / "out")
    assert read_only(tmp_path / "out").manifest.figures[INTEGER_DIVISION_FIGURE] is False, made
