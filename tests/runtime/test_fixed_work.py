"""Whether values of inputs can change how long a run takes, for graphs of each kind."""

import contextlib
import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from tests.service.endless_parts import make_loop_model, make_while_model

from edgekit_runtime.package.fixed_work import has_fixed_work_onnx, has_free_sizes, read_graph
from edgekit_runtime.package.model_encodings import DAMAGED

helper, kinds = onnx.helper, onnx.TensorProto

# Operator -> its inputs, with `size` where a size is stated, and attributes.
SIZED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "Range": (["zero", "size", "step"], {}),
    "ConstantOfShape": (["size1"], {}),
    "Expand": (["x", "size1"], {}),
    "Tile": (["x", "size1"], {}),
    "Resize": (["x", "", "", "size1"], {}),
    "Pad": (["x", "size2"], {}),
    "OneHot": (["codes", "size", "values"], {}),
    "CenterCropPad": (["x", "size1"], {}),
    "TopK": (["x", "size1"], {}),
    "Slice": (["x", "zero1", "size1"], {}),
    "SplitToSequence": (["x", "size"], {}),
    "HannWindow": (["size"], {}),
    "DFT": (["wave", "size"], {}),
    "RoiAlign": (["image", "regions", "zero1"], {}),
    "Reshape": (["x", "size1"], {}),
    "Unsqueeze": (["x", "size1"], {}),
    "ReduceSum": (["x", "size1"], {}),
    "NobodyKnowsThis": (["x", "size1"], {"domain": "some.where"}),
}
BOUNDED = {"TopK", "Slice", "SplitToSequence", "Reshape", "Unsqueeze", "ReduceSum", "NobodyKnowsThis"}
SOURCES = {
    "constant": [helper.make_node("Identity", ["stored"], ["count"])],
    "shape": [helper.make_node("Shape", ["x"], ["count"])],
    "value": [
        helper.make_node("Cast", ["x"], ["all"], to=kinds.INT64),
        helper.make_node("Gather", ["all", "zero1"], ["count"]),
    ],
}


def make_model(nodes: list[Any], **fields: Any) -> bytes:
    stored = {
        "stored": np.array([3]),
        "zero": np.array(0),
        "step": np.array(1),
        "zero1": np.array([0]),
        "codes": np.array([0, 1]),
        "values": np.zeros(2, np.float32),
        "wave": np.zeros((1, 4, 1), np.float32),
        "image": np.zeros((1, 1, 4, 4), np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", kinds.FLOAT, ["N"])],
        [helper.make_tensor_value_info("y", kinds.UNDEFINED, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    data: bytes = helper.make_model(graph, **fields).SerializeToString()
    return data


@pytest.mark.parametrize(("operator", "source"), [*itertools.product(SIZED, SOURCES)])
def test_size_from_a_value_of_an_input_makes_the_work_vary_and_no_other_size_does(
    operator: str, source: str
) -> None:
    inputs, attributes = SIZED[operator]
    nodes = [
        *SOURCES[source],
        helper.make_node("Squeeze", ["count"], ["size"]),
        helper.make_node("Abs", ["count"], ["size1"]),
        helper.make_node("Concat", ["zero1", "count"], ["size2"], axis=0),
        helper.make_node("Cast", ["size2"], ["regions"], to=kinds.FLOAT),
        helper.make_node(operator, inputs, ["y"], **attributes),
    ]
    model = make_model(nodes)
    assert has_fixed_work_onnx(model) == (source != "value")
    assert has_free_sizes(read_graph(model)) == (source == "value" and operator not in BOUNDED)


@pytest.mark.parametrize("operator", ["Add", "MatMul", "Concat", "QLinearAdd", "Where"])
def test_operators_whose_inputs_are_data_have_fixed_work(operator: str) -> None:
    assert has_fixed_work_onnx(make_model([helper.make_node(operator, ["x", "x", "x"], ["y"])]))


@pytest.mark.parametrize("operator", ["NonZero", "Unique"])
def test_rows_that_depend_on_values_make_the_work_vary(operator: str) -> None:
    assert not has_fixed_work_onnx(make_model([helper.make_node(operator, ["x"], ["y"])]))
    assert has_fixed_work_onnx(make_model([helper.make_node(operator, ["stored"], ["y"])]))


def test_graphs_with_a_body_and_functions_have_no_fixed_work() -> None:
    branch = helper.make_graph(
        [helper.make_node("Abs", ["x"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", kinds.FLOAT, None)],
    )
    chosen = helper.make_node("If", ["is_large"], ["y"], then_branch=branch, else_branch=branch)
    opsets = [helper.make_opsetid("own", 1), helper.make_opsetid("", 18)]
    own = helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("Abs", ["a"], ["b"])], opsets[1:])
    called = helper.make_node("F", ["x"], ["y"], domain="own")
    assert not has_fixed_work_onnx(make_model([chosen]))
    assert not has_fixed_work_onnx(make_model([called], functions=[own], opset_imports=opsets))
    assert not has_fixed_work_onnx(make_loop_model())


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_are_refused_or_read(seed: int) -> None:
    values = np.random.default_rng(seed)
    for whole in (make_loop_model(), make_while_model()):
        damaged = bytearray(whole[: values.integers(1, len(whole))])
        damaged[values.integers(0, len(damaged))] ^= 1 << int(values.integers(0, 8))
        assert isinstance(has_fixed_work_onnx(bytes(damaged)), bool)
        with contextlib.suppress(*DAMAGED):
            list(read_graph(bytes(damaged)).follow_values())


def test_numbers_without_an_end_are_refused_at_once() -> None:
    endless = b"\x80" * (1 << 22)  # read as one number, it would take minutes
    assert not has_fixed_work_onnx(endless)


def test_bodies_nested_too_deeply_are_refused() -> None:
    node = helper.make_node("Abs", ["x"], ["z"])
    for _ in range(30):
        body = helper.make_graph([node], "body", [], [])
        node = helper.make_node("If", ["x"], ["z"], then_branch=body)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_graph(make_model([node]))


def test_graphs_of_either_format_are_read() -> None:
    assert "WHILE" in [operation.name for operation in read_graph(make_while_model()).operations]
    assert "Loop" in [operation.name for operation in read_graph(make_loop_model()).operations]
