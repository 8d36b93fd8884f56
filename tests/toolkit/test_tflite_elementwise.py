"""Functions of elements, arithmetic and reductions as TFLite, against onnxruntime."""

from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from tests.toolkit.small_models import Array, model_of, node, random_weight
from tests.toolkit.tflite_models import checked, converted

from edgekit_runtime.sessions.litert.session import LiteRtSession
from edgekit_toolkit.tflite.convert import convert

X = {"x": [2, 3, 7, 5]}


@cases(
    ("operator", "attributes"),
    [
        ("Relu", {}),
        ("Sigmoid", {}),
        ("Tanh", {}),
        ("HardSwish", {}),
        ("HardSigmoid", {}),
        ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}),
        ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
        ("LeakyRelu", {"alpha": 0.3}),
        ("Elu", {}),
        ("Elu", {"alpha": 0.7}),
        ("Selu", {}),
        ("Celu", {"alpha": 2.0}),
        ("Softplus", {}),
        ("Softsign", {}),
        ("Mish", {}),
        ("Erf", {}),
        ("Abs", {}),
        ("Ceil", {}),
        ("Cos", {}),
        ("Exp", {}),
        ("Floor", {}),
        ("Neg", {}),
        ("Round", {}),
        ("Sign", {}),
        ("Sin", {}),
        ("Reciprocal", {}),
    ],
)
def test_a_function_computes_the_same(operator: str, attributes: dict[str, Any]) -> None:
    converted([node(operator, ["x"], ["y"], **attributes)], {}, X, opset=18)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_computes_the_same(approximate: str) -> None:
    converted([node("Gelu", ["x"], ["y"], approximate=approximate)], {}, X, opset=20, ir=9)


@pytest.mark.parametrize("operator", ["Log", "Sqrt"])
def test_a_function_of_positive_numbers_computes_the_same(operator: str) -> None:
    nodes = [node("Exp", ["x"], ["e"]), node(operator, ["e"], ["y"])]
    converted(nodes, {}, X)


def test_functions_of_large_values_stay_finite() -> None:
    model = model_of(
        [node("Softplus", ["x"], ["a"]), node("Mish", ["x"], ["y"])], {}, X, ("a", "y"), opset=18
    )
    checked(model, feeds=[{"x": np.linspace(-200, 200, 210, dtype=np.float32).reshape(2, 3, 7, 5)}])


@pytest.mark.parametrize("order", ["scale last", "half first", "half on x"])
def test_a_written_out_gelu_becomes_one_operator(order: str) -> None:
    start = [
        node("Div", ["x", "root"], ["s"]),
        node("Erf", ["s"], ["e"]),
        node("Add", ["e", "one"], ["p"]),
    ]
    ends = {
        "scale last": [node("Mul", ["x", "p"], ["m"]), node("Mul", ["m", "half"], ["y"])],
        "half first": [node("Mul", ["p", "half"], ["m"]), node("Mul", ["m", "x"], ["y"])],
        "half on x": [node("Mul", ["x", "half"], ["h"]), node("Mul", ["h", "p"], ["y"])],
    }
    weights = {
        name: np.array(value, np.float32) for name, value in (("root", 2**0.5), ("one", 1), ("half", 0.5))
    }
    assert converted(start + ends[order], weights, X) == {"GELU": 1}


def test_a_gelu_whose_inside_is_read_elsewhere_stays_written_out() -> None:
    nodes = [
        node("Div", ["x", "root"], ["s"]),
        node("Erf", ["s"], ["e"]),
        node("Add", ["e", "one"], ["p"]),
        node("Mul", ["x", "p"], ["m"]),
        node("Mul", ["m", "half"], ["y"]),
    ]
    weights = {
        name: np.array(value, np.float32) for name, value in (("root", 2**0.5), ("one", 1), ("half", 0.5))
    }
    assert "GELU" not in checked(model_of(nodes, weights, X, ("y", "p")))


@cases("limits", [(0, 6), (0, None), (-1, 1), (-0.3, 0.8), (None, 0.4), (0.2, None), (None, None)])
def test_a_clip_computes_the_same(limits: tuple[float | None, float | None]) -> None:
    given = {
        name: np.array(value, np.float32)
        for name, value in zip("lh", limits, strict=True)
        if value is not None
    }
    inputs = ["x", *(name if name in given else "" for name in "lh")]
    converted([node("Clip", inputs, ["y"])], given, X)


@pytest.mark.parametrize("slopes", [(1,), (3, 1, 1), (1, 1, 5), (7, 5)])
def test_prelu_with_slopes_of_any_shape_computes_the_same(slopes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    nodes = [node("Conv", ["x", "w"], ["c"]), node("PRelu", ["c", "s"], ["y"])]
    weights = {"w": random_weight(rng, 3, 3, 1, 1), "s": random_weight(rng, *slopes)}
    converted(nodes, weights, X)


SHAPES = [(2, 3, 7, 5), (3, 1, 1), (5,), (), (1, 3, 1, 5), (2, 1, 7, 1)]


@cases("operator", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"])
@cases("shape", SHAPES)
@cases("swapped", [False, True])
def test_arithmetic_with_a_constant_behind_a_convolution_computes_the_same(
    operator: str, shape: tuple[int, ...], swapped: bool
) -> None:
    rng = np.random.default_rng(2)
    inputs = ["k", "a"] if swapped else ["a", "k"]
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Exp", ["c"], ["a"]),  # a power of negative numbers is not a number
        node(operator, inputs, ["y"]),
    ]
    weights = {"w": random_weight(rng, 3, 3, 1, 1), "k": np.exp(random_weight(rng, *shape))}
    assert converted(nodes, weights, X)["TRANSPOSE"] == 2


@cases("shape", SHAPES)
def test_arithmetic_of_two_inputs_is_broadcast_as_in_onnx(shape: tuple[int, ...]) -> None:
    converted([node("Sub", ["x", "k"], ["y"])], {}, {**X, "k": list(shape)})


@cases("exponent", [1.0, 2.0, 3.0, 0.5, -1.0, 1.7])
def test_a_power_computes_the_same(exponent: float) -> None:
    nodes = [node("Exp", ["x"], ["e"]), node("Pow", ["e", "p"], ["y"])]
    converted(nodes, {"p": np.array(exponent, np.float32)}, X)


def test_a_power_with_a_whole_exponent_computes_the_same() -> None:
    converted([node("Pow", ["x", "p"], ["y"])], {"p": np.array(4, np.int64)}, X)


@cases("operator", ["Sum", "Mean", "Max", "Min"])
@cases("count", [1, 2, 3])
def test_operators_of_many_tensors_compute_the_same(operator: str, count: int) -> None:
    names = ["x", "k", "m"][:count]
    shapes = {"x": [2, 3, 7, 5], "k": [3, 1, 5], "m": [2, 1, 1, 1]}
    converted([node(operator, names, ["y"])], {}, {name: shapes[name] for name in names})


@pytest.mark.parametrize("operator", ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"])
def test_comparisons_and_choices_compute_the_same(operator: str) -> None:
    nodes = [
        node("Round", ["x"], ["r"]),
        node("Round", ["k"], ["q"]),
        node(operator, ["r", "q"], ["c"]),
        node("Where", ["c", "x", "k"], ["y"]),
    ]
    converted(nodes, {}, {**X, "k": [3, 1, 5]})


@pytest.mark.parametrize("operator", ["And", "Or", "Xor"])
def test_logic_computes_the_same(operator: str) -> None:
    nodes = [
        node("Greater", ["x", "zero"], ["a"]),
        node("Less", ["k", "zero"], ["b"]),
        node(operator, ["a", "b"], ["c"]),
        node("Not", ["c"], ["n"]),
        node("Cast", ["n"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    converted(nodes, {"zero": np.array(0, np.float32)}, {**X, "k": [3, 1, 5]})


@pytest.mark.parametrize("target", ["INT32", "INT64", "INT8", "UINT8", "BOOL"])
def test_casts_there_and_back_compute_the_same(target: str) -> None:
    nodes = [
        node("Abs", ["x"], ["a"]),
        node("Cast", ["a"], ["c"], to=getattr(onnx.TensorProto, target)),
        node("Cast", ["c"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    converted(nodes, {}, X)


@cases("operator", ["Add", "Sub", "Mul", "Max", "Min", "Mod"])
@cases("dtype", [np.int32, np.int64])
def test_arithmetic_of_integers_computes_the_same(operator: str, dtype: type) -> None:
    model = model_of(
        [node(operator, ["x", "k"], ["y"])],
        {"k": np.array([[3], [-4], [5]], dtype)},
        {"x": [2, 3, 7]},
        dtype=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)),
    )
    x = np.random.default_rng(4).integers(-90, 90, (2, 3, 7)).astype(dtype)
    checked(model, feeds=[{"x": x}])


REDUCTIONS = [
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd"),
    *("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp"),
]


@cases("operator", REDUCTIONS)
@cases("axes", [None, [1], [-1], [2, 3], [0, 2]])
@cases("keepdims", [0, 1])
def test_reductions_behind_a_convolution_compute_the_same(
    operator: str, axes: list[int] | None, keepdims: int
) -> None:
    weights: dict[str, Array] = {"w": random_weight(np.random.default_rng(0), 3, 3, 1, 1)}
    inputs = ["c"]
    if axes is not None:
        weights["axes"] = np.array(axes, np.int64)
        inputs.append("axes")
    nodes = [node("Conv", ["x", "w"], ["c"]), node(operator, inputs, ["y"], keepdims=keepdims)]
    converted(nodes, weights, {"x": [2, 3, 4, 5]}, opset=18)


@pytest.mark.parametrize("noop", [0, 1])
def test_a_reduction_over_no_axes_computes_the_same(noop: int) -> None:
    weights = {"axes": np.array([], np.int64)}
    converted(
        [node("ReduceSum", ["x", "axes"], ["y"], noop_with_empty_axes=noop)],
        weights,
        {"x": [2, 3, 4]},
        opset=18,
    )


def test_a_logarithm_of_a_sum_computes_the_same() -> None:
    nodes = [node("Exp", ["x"], ["e"]), node("ReduceLogSum", ["e"], ["y"], axes=[1])]
    converted(nodes, {}, X)


@cases("axis", [0, 1, -1])
@cases("keepdims", [0, 1])
@cases("operator", ["ArgMax", "ArgMin"])
def test_places_of_extremes_are_the_same(operator: str, axis: int, keepdims: int) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node(operator, ["c"], ["places"], axis=axis, keepdims=keepdims),
        node("Cast", ["places"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    converted(nodes, {"w": random_weight(np.random.default_rng(0), 4, 3, 1, 1)}, X)


@pytest.mark.parametrize("keepdims", [0, 1])
def test_means_of_many_elements_are_exact(keepdims: int) -> None:
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        node("ReduceMean", ["t"], ["y"], axes=[2, 3], keepdims=keepdims),
    ]
    model = model_of(nodes, {}, {"x": [1, 160, 200, 3]})
    # Nearly equal elements, as behind a sigmoid: added up one by one, their rounding errors add up as well.
    x = np.random.default_rng(0).uniform(0.9996, 0.9999, (1, 160, 200, 3)).astype(np.float32)
    got = LiteRtSession(convert(model, {})).run({"x": x})["y"]
    exact = x.astype(np.float64).mean((1, 2)).reshape(got.shape)
    np.testing.assert_allclose(got, exact, rtol=2e-6)  # 1.5e-4 where one sum adds them all


def test_swish_computes_the_same() -> None:
    converted([node("Swish", ["x"], ["y"], alpha=1.5)], {}, X, opset=24, ir=11)


def test_what_is_not_a_number_is_found() -> None:
    nodes = [
        node("Log", ["x"], ["l"]),  # of negative numbers
        node("IsNaN", ["l"], ["n"]),
        node("Cast", ["n"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    converted(nodes, {}, X)
