"""The layout step: no transposition that can be avoided, and every axis where it belongs."""

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from onnx import NodeProto
from tests.toolkit.small_models import Array, model_of, node, random_weight
from tests.toolkit.tflite_models import checked, converted

NHWC = {"x": [2, 7, 5, 6]}
NCHW = {"x": [2, 6, 7, 5]}
POINTWISE = {"w": random_weight(np.random.default_rng(0), 6, 6, 1, 1)}
TO_NCHW = node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2])


def back(name: str) -> NodeProto:
    return node("Transpose", [name], ["y"], perm=[0, 2, 3, 1])


def test_a_model_of_images_as_tensorflow_holds_them_has_no_transposition() -> None:
    nodes = [TO_NCHW, node("Conv", ["t", "w"], ["c"]), node("Relu", ["c"], ["r"]), back("r")]
    assert converted(nodes, POINTWISE, NHWC) == {"CONV_2D": 1}


def test_an_image_as_onnx_holds_it_is_transposed_once_at_each_end() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Conv", ["c", "w"], ["y"])]
    assert converted(nodes, POINTWISE, NCHW) == {"CONV_2D": 2, "TRANSPOSE": 2}


MIDDLES: dict[str, tuple[list[NodeProto], dict[str, Array]]] = {
    "element-wise": ([node("Sigmoid", ["c"], ["m"])], {}),
    "constant a channel": ([node("Mul", ["c", "k"], ["m"])], {"k": np.ones((6, 1, 1), np.float32)}),
    "constant a row": ([node("Mul", ["c", "k"], ["m"])], {"k": np.arange(7, dtype=np.float32)[:, None]}),
    "gate": (
        [
            node("GlobalAveragePool", ["c"], ["g"]),
            node("Conv", ["g", "w"], ["h"]),
            node("Mul", ["c", "h"], ["m"]),
        ],
        {},
    ),
    "mean": ([node("ReduceMean", ["c"], ["g"], axes=[2, 3]), node("Add", ["c", "g"], ["m"])], {}),
    "halves": (
        [
            node("Split", ["c"], ["p", "q"], axis=1),
            node("Tanh", ["p"], ["s"]),
            node("Concat", ["q", "s"], ["m"], axis=1),
        ],
        {},
    ),
    "slice": (
        [node("Slice", ["c", "a", "b", "i"], ["m"])],
        {k: np.array([v]) for k, v in (("a", 1), ("b", 3), ("i", 3))},
    ),
    "padding": ([node("Pad", ["c", "p"], ["m"])], {"p": np.array([0, 0, 1, 2, 0, 0, 3, 0])}),
    "softmax": ([node("Softmax", ["c"], ["m"], axis=1)], {}),
    "resize": ([node("Resize", ["c", "", "s"], ["m"])], {"s": np.array([1, 1, 2, 2], np.float32)}),
    "there and back": (
        [
            node("Transpose", ["c"], ["n"], perm=[0, 2, 3, 1]),
            node("LayerNormalization", ["n", "k"], ["l"]),
            node("Transpose", ["l"], ["m"], perm=[0, 3, 1, 2]),
        ],
        {"k": np.ones(6, np.float32)},
    ),
    "channel shuffle": (
        [
            node("Reshape", ["c", "apart"], ["a"]),
            node("Transpose", ["a"], ["s"], perm=[0, 2, 1, 3, 4]),
            node("Reshape", ["s", "whole"], ["m"]),
        ],
        {"apart": np.array([2, 3, 2, 7, 5]), "whole": np.array([2, 6, 7, 5])},
    ),
    "two paths": (
        [
            node("Conv", ["c", "w"], ["p"]),
            node("Relu", ["c"], ["q"]),
            node("Add", ["p", "q"], ["s"]),
            node("Sub", ["s", "c"], ["m"]),
        ],
        {},
    ),
}


@cases("middle", MIDDLES)
def test_nothing_between_convolutions_is_transposed(middle: str) -> None:
    nodes, constants = MIDDLES[middle]
    channels = 6
    ends = [
        node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        node("Conv", ["t", "w"], ["c"]),
        *nodes,
        node("Conv", ["m", "w"], ["d"]),
        back("d"),
    ]
    if middle == "mean":
        constants = {}
        nodes = [node("ReduceMean", ["c"], ["g"], axes=[2, 3], keepdims=1), node("Add", ["c", "g"], ["m"])]
        ends[2:-2] = nodes
    found = converted(ends, POINTWISE | constants, {"x": [2, 7, 5, channels]})
    # A shuffle moves channels; that is its own transposition.
    assert found["TRANSPOSE"] == (1 if middle == "channel shuffle" else 0)


def test_a_transposition_that_several_read_is_written_once() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Conv", ["x", "w"], ["d"]),
        node("Add", ["c", "d"], ["s"]),
        node("MaxPool", ["x"], ["p"], kernel_shape=[1, 1]),
        node("Add", ["s", "p"], ["y"]),
    ]
    assert converted(nodes, POINTWISE, NCHW)["TRANSPOSE"] == 2


def test_inverse_transpositions_of_the_model_leave_nothing() -> None:
    nodes = [
        node("Transpose", ["x"], ["a"], perm=[2, 0, 3, 1]),
        node("Sigmoid", ["a"], ["b"]),
        node("Transpose", ["b"], ["y"], perm=[1, 3, 0, 2]),
    ]
    assert converted(nodes, {}, NCHW) == {"LOGISTIC": 1}


def test_a_weight_that_is_read_in_two_forms_is_right_in_both() -> None:
    w = random_weight(np.random.default_rng(0), 6, 6, 1, 1)
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Reshape", ["w", "s"], ["r"]),
        node("Mul", ["c", "r"], ["m"]),
        node("Add", ["m", "w"], ["y"]),
    ]
    converted(nodes, {"w": w, "s": np.array([1, 6, 6, 1])}, {"x": [6, 6, 6, 5]})


def test_an_output_that_is_read_inside_is_given_as_onnx_holds_it() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["r"]), node("Conv", ["r", "w"], ["y"])]
    checked(model_of(nodes, POINTWISE, NCHW, ("c", "y", "r")))


def test_free_signals_between_convolutions_stay_images_of_one_row() -> None:
    rng = np.random.default_rng(1)
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1]),
        node("Sigmoid", ["a"], ["s"]),
        node("Mul", ["a", "s"], ["m"]),
        node("Conv", ["m", "w"], ["b"], pads=[1, 1]),
        node("AveragePool", ["b"], ["p"], kernel_shape=[19]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "g"], ["y"]),
    ]
    weights = {"w": random_weight(rng, 6, 6, 3), "g": random_weight(rng, 6, 4)}
    found = converted(nodes, weights, {"x": [2, 6, 19]})
    assert found["TRANSPOSE"] == 1
    assert found["RESHAPE"] <= 2


@cases("seed", range(20))
def test_random_graphs_compute_the_same(seed: int) -> None:
    checked(_random_model(np.random.default_rng(seed)))


def _random_model(rng: np.random.Generator) -> onnx.ModelProto:
    """Twelve random operators on images [2, 6, 5, 5], each of any earlier results."""
    values, nodes = ["x"], []
    order = np.array([0, 2, 3, 1])
    for place in range(12):
        name, first, second = f"v{place}", rng.choice(values), rng.choice(values)
        choice = rng.integers(7)
        if choice == 0:
            nodes.append(node("Conv", [first, "w"], [name]))
        elif choice == 1:
            nodes.append(node("Add", [first, second], [name]))
        elif choice == 2:
            nodes.append(node("Concat", [first, second], [f"{name}c"], axis=1))
            nodes.append(node("Slice", [f"{name}c", "three", "nine", "one"], [name]))
        elif choice == 3:
            middle = [f"{name}{letter}" for letter in "abc"]
            nodes.append(node("Transpose", [first], [middle[0]], perm=order.tolist()))
            nodes.append(node("Mul", [middle[0], "k"], [middle[1]]))
            nodes.append(node("Transpose", [middle[1]], [name], perm=[0, 3, 1, 2]))
        elif choice == 4:
            nodes.append(node("ReduceMean", [first], [f"{name}m"], axes=[int(rng.integers(1, 4))]))
            nodes.append(node("Sub", [second, f"{name}m"], [name]))
        elif choice == 5:
            nodes.append(node("Transpose", [first], [name], perm=[0, 1, 3, 2]))
        else:
            nodes.append(node("Tanh", [first], [name]))
        values.append(name)
    outputs = tuple(dict.fromkeys([values[-1], str(rng.choice(values[1:]))]))
    weights = {
        "w": random_weight(rng, 6, 6, 1, 1),
        "k": random_weight(rng, 6),
        "three": np.array([3]),
        "nine": np.array([9]),
        "one": np.array([1]),
    }
    return model_of(nodes, weights, {"x": [2, 6, 5, 5]}, outputs)
