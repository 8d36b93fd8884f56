"""Operators and element types that TFLite does not have, lowered to what it has, against onnxruntime."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from onnx import NodeProto, TensorProto, helper, numpy_helper
from tests.toolkit.small_models import Array, node
from tests.toolkit.tflite_models import checked

DRAW = np.random.default_rng(3)
X = DRAW.normal(size=(2, 3, 5, 4)).astype(np.float32)
UNIT = DRAW.uniform(-0.99, 0.99, (3, 5)).astype(np.float32)
CUBE = DRAW.normal(size=(1, 2, 6, 5, 7)).astype(np.float32)
GRID = DRAW.uniform(-1.4, 1.4, (2, 4, 3, 2)).astype(np.float32)
CODES = DRAW.integers(-128, 127, (2, 3, 6, 5)).astype(np.int8)
IMAGE = DRAW.integers(0, 255, (1, 3, 6, 6)).astype(np.uint8)
FILTERS = DRAW.integers(-127, 127, (4, 3, 3, 3)).astype(np.int8)
EQUATIONS = {
    "bij,bjk->bik": [(2, 3, 4), (2, 4, 5)],
    "bhqd,bhkd->bhqk": [(1, 2, 3, 4), (1, 2, 5, 4)],
    "td,tn,td->tdn": [(4, 3), (4, 2), (4, 3)],
    "ij->ji": [(2, 3)],
    "ijk->j": [(2, 3, 4)],
    "...ij,jk": [(2, 3, 4, 5), (5, 2)],
    "i,j->ij": [(3,), (4,)],
    "bdn,bn->bd": [(2, 3, 4), (2, 4)],
}

Inputs = Mapping[str, Array]
Case = tuple[NodeProto, Inputs, Inputs]


def of(operator: str, inputs: Inputs, weights: Inputs | None = None, **attributes: Any) -> Case:
    """A node with these inputs and constants, in their order."""
    weights = weights or {}
    names = sorted({*inputs, *weights})
    return node(operator, names, ["y"], **attributes), inputs, weights


def scalar(value: float, dtype: Any = np.float32) -> Array:
    return np.array(value, dtype)


CASES: dict[str, Case] = {
    **{name: of(name, {"a": UNIT}) for name in ("Asin", "Acos", "Atan", "Atanh", "Sinh", "Cosh", "Tan")},
    "Asinh of large numbers": of("Asinh", {"a": UNIT * 5000}),
    "Acosh": of("Acosh", {"a": np.abs(UNIT) + 1.1}),
    "LpNormalization p=1": of("LpNormalization", {"a": X}, axis=1, p=1),
    "BitwiseXor": of("BitwiseXor", {"a": CODES.astype(np.int32), "b": CODES[:1].astype(np.int32)}),
    "BitwiseNot": of("BitwiseNot", {"a": IMAGE}),
    "ArgMax last": of("ArgMax", {"a": np.round(X)}, axis=2, select_last_index=1),
    "ArgMin last": of("ArgMin", {"a": np.round(X)}, axis=-1, select_last_index=1, keepdims=0),
    "Hardmax": of("Hardmax", {"a": X}, axis=1),
    "Trilu": of("Trilu", {"a": X, "b": scalar(1, np.int64)}, upper=0),
    "Trilu upper": of("Trilu", {"a": X, "b": scalar(-1, np.int64)}),
    "EyeLike": of("EyeLike", {"a": UNIT}, k=1),
    "OneHot": of(
        "OneHot",
        {"a": np.array([[0, -1, 7], [3, 2, -9]])},
        {"b": scalar(4, np.int64), "c": np.array([0.5, 2], np.float32)},
        axis=1,
    ),
    "GatherElements": of("GatherElements", {"a": X, "b": DRAW.integers(-5, 5, (2, 3, 6, 4))}, axis=2),
    "GatherND computed": of("GatherND", {"a": X, "b": DRAW.integers(-2, 2, (4, 2))}),
    "GatherND batches": of("GatherND", {"a": X, "b": DRAW.integers(0, 3, (2, 4, 1))}, batch_dims=1),
    "ScatterND": of("ScatterND", {"a": X[0, 0], "b": np.array([[4], [-4]]), "c": X[0, 1, :2]}),
    "ScatterND add": of(
        "ScatterND", {"a": X[0, 0], "c": X[0, 1, :2]}, {"b": np.array([[1], [1]])}, reduction="add"
    ),
    "ScatterElements": of(
        "ScatterElements", {"a": UNIT, "b": np.array([[4, 0], [1, -3]]), "c": UNIT[:2, :2]}, axis=1
    ),
    "MaxPool over three axes": of("MaxPool", {"a": CUBE}, kernel_shape=[2, 3, 2], pads=[1, 1, 0, 0, 1, 1]),
    "MaxPool dilated": of("MaxPool", {"a": X}, kernel_shape=[2, 2], dilations=[3, 2], strides=[1, 2]),
    "MaxPool of codes": of("MaxPool", {"a": IMAGE}, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    "AveragePool over three axes": of(
        "AveragePool", {"a": CUBE}, kernel_shape=[3, 2, 2], pads=[1, 0, 1, 1, 1, 0], strides=[2, 1, 2]
    ),
    "AveragePool with padding": of(
        "AveragePool", {"a": CUBE}, kernel_shape=[2, 2, 2], pads=[1, 0, 1, 0, 0, 0], count_include_pad=1
    ),
    "LpPool": of("LpPool", {"a": X}, kernel_shape=[2, 3], strides=[2, 1], p=3),
    **{
        f"GridSample {mode} {padding} {aligned}": of(
            "GridSample", {"a": X, "b": GRID}, mode=mode, padding_mode=padding, align_corners=aligned
        )
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for aligned in (0, 1)
    },
    **{
        f"Einsum {equation}": of(
            "Einsum",
            {
                name: DRAW.normal(size=shape).astype(np.float32)
                for name, shape in zip("abc", shapes, strict=False)
            },
            equation=equation,
        )
        for equation, shapes in EQUATIONS.items()
    },
    "QuantizeLinear": of("QuantizeLinear", {"a": X * 40}, {"b": scalar(0.37), "c": scalar(7, np.uint8)}),
    "QuantizeLinear along an axis": of(
        "QuantizeLinear", {"a": X}, {"b": np.array([0.1, 0.2, 0.3], np.float32)}, axis=1, output_dtype=3
    ),
    "DequantizeLinear": of("DequantizeLinear", {"a": CODES}, {"b": scalar(0.1), "c": scalar(-5, np.int8)}),
    "DynamicQuantizeLinear": (node("DynamicQuantizeLinear", ["a"], ["y", "s", "z"]), {"a": X}, {}),
    "MatMulInteger": of(
        "MatMulInteger", {"a": CODES[0, 0]}, {"b": FILTERS[0, 0].repeat(2, 0)[:5], "c": scalar(4, np.int8)}
    ),
    "ConvInteger": of("ConvInteger", {"a": IMAGE}, {"b": FILTERS, "c": scalar(9, np.uint8)}, pads=[1] * 4),
    "QLinearConv": of(
        "QLinearConv",
        {"a": IMAGE},
        {
            "b": scalar(0.02),
            "c": scalar(120, np.uint8),
            "d": FILTERS,
            "e": np.array([0.01, 0.02, 0.03, 0.015], np.float32),
            "f": np.zeros(4, np.int8),
            "g": scalar(0.9),
            "h": scalar(100, np.uint8),
            "i": np.array([5, -900, 70, 0], np.int32),
        },
    ),
    "QLinearMatMul": of(
        "QLinearMatMul",
        {"a": IMAGE[0, 0]},
        {
            "b": scalar(0.02),
            "c": scalar(120, np.uint8),
            "d": IMAGE[0, 1],
            "e": scalar(0.03),
            "f": scalar(100, np.uint8),
            "g": scalar(0.2),
            "h": scalar(8, np.uint8),
        },
    ),
}


def model(made: Case, opset: int, outputs: Sequence[onnx.ValueInfoProto] = ()) -> onnx.ModelProto:
    maker, inputs, weights = made
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    results = list(outputs) or [onnx.ValueInfoProto(name=name) for name in maker.output]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([maker], "case", values, results, stored)
    result = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(result)


@cases("name", CASES)
def test_a_lowered_operator_computes_the_same(name: str) -> None:
    checked(model(CASES[name], 21), feeds=[CASES[name][1]])


@cases(
    "attributes",
    [
        {"mode": "cubic"},
        {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
        {"mode": "cubic", "coordinate_transformation_mode": "align_corners"},
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic", "antialias": 1},
        {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
    ],
)
@cases("scales", [(1, 1, 0.6, 0.7), (1, 1, 1.7, 2.2)])
def test_resizing_that_no_kernel_does_computes_the_same(
    attributes: dict[str, Any], scales: tuple[float, ...]
) -> None:
    resize = node("Resize", ["x", "", "scales"], ["y"], **attributes)
    made = (resize, {"x": X}, {"scales": np.array(scales, np.float32)})
    checked(model(made, 19), feeds=[{"x": X}])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
@pytest.mark.parametrize("operator", ["Add", "Mul", "Sub", "Div", "Greater"])
def test_arithmetic_of_narrow_integers_wraps_as_in_onnx(operator: str, dtype: type) -> None:
    if operator == "Div" and dtype == np.uint32:
        pytest.skip("TFLite divides int32 at most")
    inputs = {"a": DRAW.integers(1, 120, (3, 5)).astype(dtype), "b": DRAW.integers(1, 120, 5).astype(dtype)}
    checked(model(of(operator, inputs), 18), feeds=[inputs])


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_floating_point_numbers_are_computed_in_float32(dtype: type) -> None:
    inputs = {"a": X.astype(dtype), "b": np.abs(X).astype(dtype) + dtype(1)}
    checked(model(of("Div", inputs), 18), feeds=[inputs])


def test_whole_numbers_are_divided_towards_zero() -> None:
    inputs = {"a": np.array([-7, 7, -7, 7], np.int32), "b": np.array([2, -2, -2, 2], np.int32)}
    checked(model(of("Div", inputs), 18), feeds=[inputs])


def test_both_branches_of_a_condition_are_computed_and_one_is_chosen() -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [node(operator, ["x"], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, UNIT.shape)],
        )
        for name, operator in (("then", "Relu"), ("else", "Neg"))
    }
    choice = node("If", ["c"], ["y"], **branches)
    feeds = [{"c": np.array([is_on]), "x": UNIT} for is_on in (True, False)]
    checked(model((choice, feeds[0], {}), 18), feeds=feeds)


@pytest.mark.parametrize("backwards", [0, 1])
def test_every_step_of_a_scan_is_written_out(backwards: int) -> None:
    step = helper.make_graph(
        [
            node("Mul", ["h", "decay"], ["m"]),
            node("Add", ["m", "v"], ["next"]),
            node("Tanh", ["next"], ["row"]),
        ],
        "step",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5]) for name in "hv"],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5]) for name in ("next", "row")],
        [numpy_helper.from_array(np.linspace(0, 1, 5, dtype=np.float32), "decay")],
    )
    scan = node(
        "Scan",
        ["h0", "xs"],
        ["last", "y"],
        body=step,
        num_scan_inputs=1,
        scan_input_directions=[backwards],
        scan_output_directions=[backwards],
    )
    feeds = {"h0": UNIT[0], "xs": UNIT}
    outputs = [
        helper.make_tensor_value_info("last", TensorProto.FLOAT, [5]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 5]),
    ]
    checked(model((scan, feeds, {}), 18, outputs), feeds=[feeds])


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        (of("ScatterND", {"a": UNIT, "b": np.array([[1]]), "c": UNIT[:1]}, reduction="max"), "'max'"),
        (of("Einsum", {"a": DRAW.normal(size=(3, 3)).astype(np.float32)}, equation="ii->i"), "diagonal"),
        (of("Pow", {"a": CODES.astype(np.int32), "b": UNIT[0, :1]}), "to the power"),
    ],
    ids=["scatter", "einsum", "power"],
)
def test_a_case_that_nothing_covers_is_refused_with_its_reason(operator: Case, words: str) -> None:
    with pytest.raises(Exception, match=words):
        checked(model(operator, 18), feeds=[operator[1]])
