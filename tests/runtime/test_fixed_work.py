"""Whether values of inputs can change how long a run takes, for graphs of each kind."""

import contextlib
import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from tests.service.endless_parts import make_loop_model, make_while_model
from tests.toolkit.cases import cases

from edgekit_runtime.package.fixed_work import (
    has_endless_loop,
    has_fixed_work_onnx,
    has_free_sizes,
    read_graph,
)
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


@cases(("operator", "source"), [*itertools.product(SIZED, SOURCES)])
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
    by_value = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Cast", ["largest"], ["is_large"], to=kinds.BOOL),
    ]
    by_size = [
        helper.make_node("Size", ["x"], ["size"]),
        helper.make_node("Cast", ["size"], ["is_large"], to=kinds.BOOL),
    ]
    opsets = [helper.make_opsetid("own", 1), helper.make_opsetid("", 18)]
    own = helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("Abs", ["a"], ["b"])], opsets[1:])
    called = helper.make_node("F", ["x"], ["y"], domain="own")
    assert not has_fixed_work_onnx(make_model([*by_value, chosen]))
    assert has_fixed_work_onnx(make_model([*by_size, chosen]))
    sized_within = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["z"])],
        "sized within",
        [],
        [helper.make_tensor_value_info("z", kinds.INT64, None)],
    )
    either = helper.make_node("If", ["is_large"], ["y"], then_branch=branch, else_branch=sized_within)
    assert not has_fixed_work_onnx(make_model([*by_size, either]))
    assert not has_fixed_work_onnx(make_model([called], functions=[own], opset_imports=opsets))
    assert not has_fixed_work_onnx(make_loop_model())


@cases("seed", range(20))
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


def make_trips(trips: str, goes_on: str) -> bytes:
    """y = x after a loop that runs `trips` times, as long as the tensor `goes_on` of its body is true."""
    value = helper.make_tensor_value_info
    inputs = [value("i", kinds.INT64, []), value("before", kinds.BOOL, []), value("z", kinds.FLOAT, ["N"])]
    nodes = [
        helper.make_node("Identity", ["before"], ["same"]),
        helper.make_node("Not", ["before"], ["computed"]),
    ]
    outputs = [value(goes_on, kinds.BOOL, []), value("z", kinds.FLOAT, ["N"])]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    return make_model(
        [
            helper.make_node("Size", ["x"], ["size"]),
            helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
            helper.make_node("Cast", ["total"], ["asked"], to=kinds.INT64),
            helper.make_node("Loop", [trips, "", "x"], ["y"], body=body),
        ]
    )


@pytest.mark.parametrize(
    ("trips", "goes_on", "is_endless"),
    [
        ("size", "same", False),
        ("zero", "before", False),
        ("asked", "same", True),
        ("zero", "computed", True),  # the number may be the largest that there is
        ("", "computed", True),
    ],
)
def test_loop_whose_rounds_a_client_sets_has_no_end(trips: str, goes_on: str, is_endless: bool) -> None:
    assert has_endless_loop(read_graph(make_trips(trips, goes_on))) is is_endless


def test_sizes_in_functions_of_a_model_are_found() -> None:
    opsets = [helper.make_opsetid("own", 1), helper.make_opsetid("", 18)]
    node = helper.make_node("ConstantOfShape", ["a"], ["b"])
    own = helper.make_function("own", "F", ["a"], ["b"], [node], opsets[1:])
    called = helper.make_node("F", ["x"], ["y"], domain="own")
    assert has_free_sizes(read_graph(make_model([called], functions=[own], opset_imports=opsets)))


def test_loops_in_other_graphs_of_a_tflite_file_are_found() -> None:
    from ai_edge_litert import schema_py_generated as schema

    whole = make_while_model()
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(whole, 0))
    first, *others = model.subgraphs
    entry = schema.SubGraphT()
    entry.tensors, entry.inputs, entry.outputs, entry.operators = first.tensors, [], [], []
    model.subgraphs = [entry, *others, first]
    import flatbuffers

    builder = flatbuffers.Builder(0)
    builder.Finish(model.Pack(builder), b"TFL3")
    graph = read_graph(bytes(builder.Output()))
    assert "WHILE" not in [operation.name for operation in graph.operations]
    assert has_endless_loop(graph)


def test_output_without_a_name_hands_no_values_on() -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["", "part"], axis=0, num_outputs=2),
        helper.make_node("Resize", ["part", "", "two"], ["y"]),
    ]
    assert not has_free_sizes(read_graph(make_model(nodes)))
