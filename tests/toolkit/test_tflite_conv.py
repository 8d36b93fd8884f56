"""Convolutions and pooling as TFLite, against onnxruntime. All sizes differ, so that a wrong axis shows."""

from typing import Any

import numpy as np
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from tests.toolkit.small_models import Array, node, random_weight
from tests.toolkit.tflite_models import converted

X = {"x": [2, 6, 11, 8]}


def weights(*shape: int, bias: bool = True, outputs: int | None = None) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    found = {"w": random_weight(rng, *shape)}
    if bias:
        found["b"] = random_weight(rng, outputs or shape[0])
    return found


@cases(
    "attributes",
    [
        {},
        {"strides": [2, 3]},
        {"pads": [1, 2, 0, 3]},
        {"pads": [1, 1, 1, 1]},
        {"pads": [1, 1, 1, 1], "strides": [2, 2]},
        {"pads": [2, 1, 2, 1], "dilations": [2, 1]},
        {"dilations": [2, 3]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 1]},
        {"auto_pad": "VALID", "strides": [1, 2]},
        # The last padding is never reached by a window.
        {"pads": [0, 0, 1, 1], "strides": [4, 3]},
    ],
)
def test_a_convolution_computes_the_same(attributes: dict[str, Any]) -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["y"], **attributes)]
    assert converted(nodes, weights(4, 6, 3, 3 if "dilations" not in attributes else 2), X)["CONV_2D"] == 1


@pytest.mark.parametrize("kernel", [(1, 1), (3, 2), (1, 5), (11, 8)])
def test_kernels_of_any_size_compute_the_same(kernel: tuple[int, int]) -> None:
    converted([node("Conv", ["x", "w"], ["y"])], weights(5, 6, *kernel, bias=False), X)


@pytest.mark.parametrize("groups", [2, 3])
def test_a_grouped_convolution_computes_the_same(groups: int) -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["y"], group=groups, pads=[1, 1, 1, 1])]
    converted(nodes, weights(12, 6 // groups, 3, 3), X)


@cases("multiplier", [1, 3])
@cases("attributes", [{}, {"strides": [2, 1], "pads": [1, 0, 1, 1]}, {"dilations": [2, 2]}])
def test_a_depthwise_convolution_computes_the_same(multiplier: int, attributes: dict[str, Any]) -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["y"], group=6, **attributes)]
    assert converted(nodes, weights(6 * multiplier, 1, 3, 2), X)["DEPTHWISE_CONV_2D"] == 1


@pytest.mark.parametrize(
    "attributes", [{}, {"pads": [2, 1]}, {"strides": [2], "pads": [1, 1]}, {"dilations": [3]}, {"group": 6}]
)
def test_a_convolution_of_signals_computes_the_same(attributes: dict[str, Any]) -> None:
    inputs = 1 if "group" in attributes else 6
    nodes = [node("Conv", ["x", "w", "b"], ["y"], **attributes)]
    converted(nodes, weights(12, inputs, 3), {"x": [2, 6, 19]})


def test_a_chain_over_signals_is_transposed_once_at_each_end() -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"], pads=[1, 1]),
        node("Relu", ["a"], ["r"]),
        node("Conv", ["r", "w", "b"], ["c"], pads=[1, 1]),
        node("Add", ["c", "r"], ["y"]),
    ]
    found = converted(nodes, weights(6, 6, 3), {"x": [2, 6, 19]})
    assert found["TRANSPOSE"] == 2
    assert found["RELU"] == 0


def test_a_convolution_over_three_axes_computes_the_same() -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["y"], strides=[1, 2, 1], pads=[1, 1, 0, 1, 1, 0])]
    converted(nodes, weights(5, 4, 2, 3, 3), {"x": [2, 4, 6, 7, 5]})


def test_weights_that_are_computed_are_transposed_in_the_graph() -> None:
    nodes = [node("Conv", ["x", "v"], ["y"])]
    converted(nodes, {}, {"x": [2, 6, 11, 8], "v": [4, 6, 3, 2]})


@cases(
    "attributes",
    [
        {},
        {"strides": [2, 2]},
        {"strides": [2, 3], "pads": [1, 0, 2, 1]},
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
        {"strides": [3, 2], "output_padding": [2, 1]},
        {"dilations": [2, 2], "strides": [2, 1]},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 3], "auto_pad": "SAME_LOWER"},
        {"strides": [2, 2], "output_shape": [23, 17]},
    ],
)
@cases("groups", [1, 2])
def test_a_transposed_convolution_computes_the_same(attributes: dict[str, Any], groups: int) -> None:
    nodes = [node("ConvTranspose", ["x", "w", "b"], ["y"], group=groups, **attributes)]
    converted(nodes, weights(6, 4, 3, 3, outputs=4 * groups), X)


@pytest.mark.parametrize("attributes", [{}, {"strides": [2], "pads": [1, 0]}])
def test_a_transposed_convolution_of_signals_computes_the_same(attributes: dict[str, Any]) -> None:
    nodes = [node("ConvTranspose", ["x", "w", "b"], ["y"], **attributes)]
    converted(nodes, weights(6, 4, 3, outputs=4), {"x": [2, 6, 9]})


POOLS = [
    {},
    {"strides": [2, 2]},
    {"strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"strides": [2, 2], "pads": [0, 1, 1, 1]},
    {"strides": [2, 3], "ceil_mode": 1},
    {"strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [3, 2]},
]


@cases("attributes", POOLS)
@cases("offset", [0, -5])
def test_the_largest_of_each_window_is_the_same(attributes: dict[str, Any], offset: float) -> None:
    nodes = [
        node("Add", ["x", "offset"], ["a"]),
        node("MaxPool", ["a"], ["y"], kernel_shape=[3, 2], **attributes),
    ]
    converted(nodes, {"offset": np.array(offset, np.float32)}, X)


@cases("attributes", POOLS)
@cases("counts_padding", [0, 1])
def test_the_average_of_each_window_is_the_same(attributes: dict[str, Any], counts_padding: int) -> None:
    nodes = [
        node("AveragePool", ["x"], ["y"], kernel_shape=[3, 2], count_include_pad=counts_padding, **attributes)
    ]
    converted(nodes, {}, X)


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("attributes", [{}, {"strides": [3], "pads": [1, 2]}])
def test_pooling_of_signals_is_the_same(kind: str, attributes: dict[str, Any]) -> None:
    converted([node(kind, ["x"], ["y"], kernel_shape=[4], **attributes)], {}, {"x": [2, 6, 19]})


@pytest.mark.parametrize("kind", ["GlobalAveragePool", "GlobalMaxPool"])
@pytest.mark.parametrize("shape", [[2, 6, 11], [2, 6, 11, 8]])
def test_pooling_of_everything_is_the_same(kind: str, shape: list[int]) -> None:
    converted([node(kind, ["x"], ["y"])], {}, {"x": shape})


@cases(
    ("before", "attributes", "padding"),
    [
        ("Relu", {"pads": [1, 1, 1, 1], "strides": [2, 2]}, "PAD"),
        ("Tanh", {"pads": [1, 1, 1, 1], "strides": [2, 2]}, "MIRROR_PAD"),
        ("Tanh", {"pads": [2, 2, 2, 2]}, "PADV2"),
        ("Relu", {"pads": [2, 2, 2, 2]}, "PAD"),
    ],
)
@cases("offset", [0, -5])
def test_the_padding_before_maxima_has_a_range_where_it_can(
    before: str, attributes: dict[str, Any], padding: str, offset: float
) -> None:
    nodes = [
        node("Add", ["x", "offset"], ["a"]),
        node(before, ["a"], ["b"]),
        node("MaxPool", ["b"], ["y"], kernel_shape=[3, 3], **attributes),
    ]
    found = converted(nodes, {"offset": np.array(offset, np.float32)}, X)
    assert found[padding] == 1
