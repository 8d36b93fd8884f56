"""Shapes, parts, indices, padding and resizing as TFLite, against onnxruntime."""

from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from tests.toolkit.small_models import Array, node, random_weight
from tests.toolkit.tflite_models import checked, converted

X = {"x": [2, 6, 7, 5]}
POINTWISE = {"w": random_weight(np.random.default_rng(0), 6, 6, 1, 1)}


def behind_conv(*nodes: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes behind a convolution that makes `c`, so that what they read is held channels last."""
    return [node("Conv", ["x", "w"], ["c"]), *nodes]


def integers(**values: list[int]) -> dict[str, Array]:
    return {name: np.array(value, np.int64) for name, value in values.items()}


@cases(
    "target",
    [
        [2, 210],
        [2, 6, 35],
        [12, 35],
        [2, 2, 3, 7, 5],
        [2, 6, 7, 5, 1],
        [420],
        [2, 1, 6, 35],
        [3, 4, 35],
        [0, -1],
    ],
)
def test_a_reshape_computes_the_same(target: list[int]) -> None:
    converted(behind_conv(node("Reshape", ["c", "s"], ["y"])), POINTWISE | integers(s=target), X)


@pytest.mark.parametrize("axis", [0, 1, 2, 4])
def test_flattening_computes_the_same(axis: int) -> None:
    converted(behind_conv(node("Flatten", ["c"], ["y"], axis=axis)), POINTWISE, X)


@pytest.mark.parametrize("order", [[0, 2, 3, 1], [0, 1, 3, 2], [3, 2, 1, 0], [1, 0, 2, 3], None])
def test_a_transpose_computes_the_same(order: list[int] | None) -> None:
    attributes = {} if order is None else {"perm": order}
    converted(behind_conv(node("Transpose", ["c"], ["y"], **attributes)), POINTWISE, X)


def test_axes_of_one_come_and_go_without_a_change() -> None:
    nodes = [
        node("ReduceMean", ["x"], ["m"], axes=[2, 3]),
        node("Squeeze", ["m", "two"], ["s"]),
        node("Unsqueeze", ["s", "ends"], ["u"]),
        node("Add", ["u", "k"], ["y"]),
    ]
    weights = integers(two=[2, 3], ends=[0, 3]) | {"k": np.ones((6, 2), np.float32)}
    converted(nodes, weights, X)


@pytest.mark.parametrize("target", [[2, 6, 7, 5], [4, 2, 6, 7, 5], [1], [2, 6, 7, 1]])
def test_an_expand_computes_the_same(target: list[int]) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("ReduceMax", ["c"], ["m"], axes=[3]),
        node("Expand", ["m", "s"], ["y"]),
    ]
    converted(nodes, POINTWISE | integers(s=target), X)


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ([1], [4], [1], [1]),
        ([0, 2], [2, 100], [-1, 2], [1, 1]),
        ([0, 1], [5, 6], [3, 1], [2, 3]),
        ([-1], [-100], [1], [-1]),
        ([-1, 6], [0, 1], [1, 2], [-2, -1]),
    ],
)
def test_a_slice_computes_the_same(
    starts: list[int], ends: list[int], axes: list[int], steps: list[int]
) -> None:
    inputs = ["c", "starts", "ends", "axes", "steps"]
    weights = integers(starts=starts, ends=ends, axes=axes, steps=steps)
    converted(behind_conv(node("Slice", inputs, ["y"])), POINTWISE | weights, X)


@pytest.mark.parametrize(("axis", "parts"), [(1, [1, 2, 3]), (1, [3, 3]), (-1, [4, 1]), (2, [2, 2, 3])])
def test_a_split_computes_the_same(axis: int, parts: list[int]) -> None:
    names = [f"p{place}" for place in range(len(parts))]
    nodes = behind_conv(
        node("Split", ["c", "s"], names, axis=axis), node("Concat", names[::-1], ["y"], axis=axis)
    )
    converted(nodes, POINTWISE | integers(s=parts), X)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_a_concatenation_computes_the_same(axis: int) -> None:
    nodes = behind_conv(node("Concat", ["c", "x", "k"], ["y"], axis=axis))
    k = np.ones([3 if place == axis % 4 else size for place, size in enumerate(X["x"])], np.float32)
    assert converted(nodes, POINTWISE | {"k": k}, X)["TRANSPOSE"] == 2


@pytest.mark.parametrize("repeats", [[1, 2, 1, 3], [2, 1, 1, 1]])
def test_tiles_compute_the_same(repeats: list[int]) -> None:
    converted(behind_conv(node("Tile", ["c", "r"], ["y"])), POINTWISE | integers(r=repeats), X)


@pytest.mark.parametrize("attributes", [{}, {"exclusive": 1}, {"reverse": 1}])
def test_running_sums_compute_the_same(attributes: dict[str, Any]) -> None:
    nodes = behind_conv(node("CumSum", ["c", "a"], ["y"], **attributes))
    converted(nodes, POINTWISE | {"a": np.array(1, np.int64)}, X)


@pytest.mark.parametrize(("upper", "k"), [(1, 0), (0, 1), (1, -2)])
def test_triangles_compute_the_same(upper: int, k: int) -> None:
    nodes = behind_conv(node("Trilu", ["c", "k"], ["y"], upper=upper))
    converted(nodes, POINTWISE | {"k": np.array(k, np.int64)}, X)


@cases("axis", [0, 1, -1])
@cases("indices", [1, -1, [0, -1, 1, 1], [[0, 1], [-1, 0], [1, 1]]])
def test_elements_by_index_are_the_same(axis: int, indices: Any) -> None:
    nodes = behind_conv(node("Gather", ["c", "i"], ["y"], axis=axis))
    converted(nodes, POINTWISE | {"i": np.array(indices, np.int64)}, X)


def test_rows_of_a_table_by_an_input_are_the_same() -> None:
    table = random_weight(np.random.default_rng(0), 9, 4)
    places = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT64, [2, 3])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3, 4])
    stored = [onnx.numpy_helper.from_array(table, "t")]
    graph = onnx.helper.make_graph([node("Gather", ["t", "x"], ["y"])], "rows", [places], [result], stored)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    checked(model, feeds=[{"x": np.array([[0, 8, -1], [-9, 3, 3]], np.int64)}])


def test_elements_by_several_indices_are_the_same() -> None:
    nodes = behind_conv(node("GatherND", ["c", "i"], ["y"]))
    converted(nodes, POINTWISE | {"i": np.array([[0, 5], [1, -1], [-2, 2]], np.int64)}, X)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_channels_become_space_as_in_onnx(mode: str) -> None:
    converted([node("DepthToSpace", ["x"], ["y"], blocksize=2, mode=mode)], {}, {"x": [2, 12, 3, 5]})


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_filters_before_space_are_put_in_order(mode: str) -> None:
    rng = np.random.default_rng(0)
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("DepthToSpace", ["c"], ["y"], blocksize=2, mode=mode),
    ]
    weights = {"w": random_weight(rng, 12, 6, 1, 1), "b": random_weight(rng, 12)}
    assert converted(nodes, weights, X)["GATHER"] == 0


def test_space_becomes_channels_as_in_onnx() -> None:
    converted([node("SpaceToDepth", ["x"], ["y"], blocksize=2)], {}, {"x": [2, 3, 4, 6]})


@cases("mode", ["constant", "reflect", "edge"])
@cases("pads", [[0, 1, 2, 0, 0, 0, 1, 3], [0, 0, -1, 2, 0, 0, 2, -2]])
def test_padding_computes_the_same(mode: str, pads: list[int]) -> None:
    nodes = behind_conv(node("Pad", ["c", "p"], ["y"], mode=mode))
    converted(nodes, POINTWISE | integers(p=pads), X)


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_padding_of_some_axes_with_a_value_computes_the_same(value: float) -> None:
    nodes = behind_conv(node("Pad", ["c", "p", "v", "a"], ["y"]))
    weights = POINTWISE | integers(p=[1, 2, 0, 3], a=[-1, 1]) | {"v": np.array(value, np.float32)}
    converted(nodes, weights, X, opset=18)


SCALES: list[list[float]] = [[1, 1, 2, 2], [1, 1, 3, 2], [1, 1, 0.5, 1.5], [1, 1, 1, 2.5]]
PLACES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]


@cases("scales", SCALES)
@cases("places", PLACES)
@cases("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_resizing_to_the_nearest_computes_the_same(scales: list[float], places: str, rounding: str) -> None:
    attributes = {"coordinate_transformation_mode": places, "nearest_mode": rounding}
    nodes = behind_conv(node("Resize", ["c", "", "s"], ["y"], mode="nearest", **attributes))
    converted(nodes, POINTWISE | {"s": np.array(scales, np.float32)}, X)


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil"])
def test_resizing_to_places_half_way_between_elements_computes_the_same(rounding: str) -> None:
    attributes = {"coordinate_transformation_mode": "align_corners", "nearest_mode": rounding}
    nodes = [node("Resize", ["x", "", "", "s"], ["y"], mode="nearest", **attributes)]
    converted(nodes, integers(s=[1, 2, 15, 7]), {"x": [1, 2, 2, 4]})


@cases("sizes", [[2, 6, 14, 10], [2, 6, 5, 11]])
@cases("places", PLACES)
def test_linear_resizing_computes_the_same(sizes: list[int], places: str) -> None:
    nodes = behind_conv(
        node("Resize", ["c", "", "", "s"], ["y"], mode="linear", coordinate_transformation_mode=places)
    )
    converted(nodes, POINTWISE | integers(s=sizes), X)


def test_resizing_of_signals_computes_the_same() -> None:
    nodes = [node("Resize", ["x", "", "s"], ["y"], mode="nearest")]
    converted(nodes, {"s": np.array([1, 1, 3], np.float32)}, {"x": [2, 6, 7]})


@cases("axis", [0, 1, 2, -1])
@cases("operator", ["Softmax", "LogSoftmax"])
def test_softmax_along_any_axis_computes_the_same(operator: str, axis: int) -> None:
    converted(behind_conv(node(operator, ["c"], ["y"], axis=axis)), POINTWISE, X)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [1, -1])
def test_the_largest_elements_and_their_places_are_the_same(axis: int, largest: int) -> None:
    nodes = behind_conv(
        node("TopK", ["c", "k"], ["v", "i"], axis=axis, largest=largest),
        node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT),
        node("Add", ["v", "f"], ["y"]),
    )
    converted(nodes, POINTWISE | integers(k=[3]), X)


def test_a_part_of_a_split_without_elements_is_left_out() -> None:
    nodes = [
        node("Split", ["x", "sizes"], ["rest", "none"], axis=1),
        node("Concat", ["none", "rest"], ["y"], axis=1),
    ]
    converted(nodes, {"sizes": np.array([3, 0])}, {"x": [2, 3, 4, 5]})
