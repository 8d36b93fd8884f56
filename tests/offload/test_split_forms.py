"""Cuts of unusual but valid graphs: local functions, old forms, other dtypes, inputs that are outputs."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.offload.onnx_models import model_of

from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.split import SplitModels, split_model, whole_upload
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

OPTIONS = OrtOptions(threads=1, optimise=False, weights="model.onnx")
Values = dict[str, NDArray[np.generic]]


def check(content: bytes, nodes: Sequence[int], feeds: Values, coding: Coding | None = None) -> SplitModels:
    """Cut, and hold head and tail against the whole model to the last bit."""
    split = split_model(content, nodes, coding or Coding())
    expected = OrtSession(content, OrtOptions(threads=1, optimise=False)).run(feeds)
    made = dict(feeds)
    if split.head is not None:
        head = OrtSession(split.head.content, OPTIONS, content)
        made = head.run({spec.name: feeds[spec.name] for spec in split.head.inputs})
    tail = OrtSession(split.tail.content, OPTIONS, content)
    answers = {**made, **tail.run({spec.name: made[spec.name] for spec in split.sent})}
    for name, value in expected.items():
        np.testing.assert_array_equal(answers[name], value)
    return split


def x_of(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def function_model() -> bytes:
    """Two calls of a local function, which calls another one."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    twice = helper.make_function(
        "own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], opsets
    )
    calls = [helper.make_node("Twice", ["a"], ["b"], domain="own"), helper.make_node("Neg", ["b"], ["c"])]
    outer = helper.make_function("own", "Outer", ["a"], ["c"], calls, opsets)
    graph = helper.make_graph(
        [
            helper.make_node("Outer", ["x"], ["m"], domain="own"),
            helper.make_node("Relu", ["m"], ["r"]),
            helper.make_node("Twice", ["r"], ["y"], domain="own"),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
    )
    model = helper.make_model(graph, opset_imports=opsets, functions=[twice, outer], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("end", [0, 1, 2])
def test_model_with_local_functions_is_cut_between_calls(end: int) -> None:
    check(function_model(), range(end), {"x": x_of(3, 4)})


def test_part_holds_only_functions_that_it_calls() -> None:
    split = split_model(function_model(), [0, 1])
    assert split.head is not None
    names = [
        sorted(one.name for one in onnx.load_from_string(part.content).functions)
        for part in (split.head, split.tail)
    ]
    assert names == [["Outer", "Twice"], ["Twice"]]


@pytest.mark.parametrize("size", [4, 400])
def test_weights_that_are_graph_inputs_too_stay_weights(size: int) -> None:
    model = onnx.load_from_string(
        model_of(
            [("Mul", ["x", "w"], ["m"]), ("Add", ["m", "w"], ["y"])],
            {"x": ("N", size), "w": (size,)},
            ["y"],
            weights={"w": x_of(size)},
        )
    )
    model.ir_version = 3
    content = model.SerializeToString()
    split = check(content, [0], {"x": x_of(2, size)})
    assert split.head is not None
    assert [spec.name for spec in split.head.inputs] == ["x"]
    assert [spec.name for spec in split.sent] == ["m"]
    assert split.tail.reads_weights == (size == 400)


@pytest.mark.parametrize("dtype", ["float16", "int64"])
def test_tensors_of_other_dtypes_cross_as_they_are(dtype: str) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    content = model_of(
        [("Cast", ["x"], ["m"]), ("Transpose", ["m"], ["a"]), ("Cast", ["a"], ["y"])],
        {"x": ("N", 80)},
        ["y"],
        attributes={0: {"to": kind}, 1: {"perm": [0, 1]}, 2: {"to": TensorProto.FLOAT}},
    )
    split = check(content, [0], {"x": x_of(2, 80) * 9}, Coding("int8"))
    assert [(spec.name, spec.dtype, spec.shape) for spec in split.sent] == [("m", dtype, ("N", 80))]


def pass_through_model() -> bytes:
    """x is an output itself."""
    model = onnx.load_from_string(
        model_of([("Neg", ["x"], ["m"]), ("Abs", ["m"], ["y"])], {"x": ("N", 4)}, ["y"])
    )
    model.graph.output.add().CopyFrom(model.graph.input[0])
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("nodes", [[], [0]])
def test_output_that_is_an_input_is_given_once(nodes: list[int]) -> None:
    split = check(pass_through_model(), nodes, {"x": x_of(2, 4)})
    given = [spec.name for part in (split.head, split.tail) if part is not None for spec in part.outputs]
    assert given.count("x") == 1


def test_coded_upload_gives_an_output_that_is_an_input_unchanged() -> None:
    split = whole_upload(pass_through_model(), Coding("int8"))
    assert split.head is not None
    x = x_of(2, 4)
    made = OrtSession(split.head.content, OPTIONS).run({"x": x})
    np.testing.assert_array_equal(made["x"], x)
    assert {spec.name for spec in split.tail.inputs} == {"x.codes", "x.range"}


@pytest.mark.parametrize("end", [0, 1, 2])
def test_empty_optional_inputs_stay_empty(end: int) -> None:
    content = model_of(
        [("Neg", ["x"], ["m"]), ("Clip", ["m", "", "high"], ["c"]), ("Abs", ["c"], ["y"])],
        {"x": ("N", 4)},
        ["y"],
        weights={"high": np.float32(0.5)},
    )
    split = check(content, range(end), {"x": x_of(2, 4)})
    assert "" not in {spec.name for spec in split.sent}


def test_weight_in_typed_fields_stays_in_the_part() -> None:
    values = x_of(400)
    model = onnx.load_from_string(
        model_of([("Neg", ["x"], ["m"]), ("Add", ["m", "w"], ["y"])], {"x": ("N", 400)}, ["y"],
                 weights={"w": values})
    )  # fmt: skip
    typed = helper.make_tensor("w", TensorProto.FLOAT, [400], values.tolist())
    model.graph.initializer[0].CopyFrom(typed)
    split = check(model.SerializeToString(), [0], {"x": x_of(2, 400)})
    # float_data is little-endian as raw_data is, so its bytes are in the file too.
    (tensor,) = onnx.load_from_string(split.tail.content).graph.initializer
    if not split.tail.reads_weights:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), values)
