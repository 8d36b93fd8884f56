"""Products, normalisation and recurrent layers as TFLite, against onnxruntime."""

from typing import Any

import numpy as np
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from tests.toolkit.small_models import Array, model_of, node, random_weight
from tests.toolkit.tflite_models import checked, converted

X = {"x": [2, 6, 7, 5]}


def weights(**shapes: tuple[int, ...]) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    return {name: random_weight(rng, *shape) for name, shape in shapes.items()}


@cases(
    ("attributes", "shape"),
    [({}, (5, 4)), ({"transB": 1}, (4, 5)), ({"alpha": 0.5, "beta": 2.0}, (5, 4)), ({"transA": 1}, (3, 4))],
)
@cases("bias", [None, (4,), (1, 4), (1,), (), "full", (3, 1)])
def test_a_general_product_computes_the_same(
    attributes: dict[str, Any], shape: tuple[int, int], bias: Any
) -> None:
    rows = 5 if "transA" in attributes else 3
    found = weights(w=shape)
    if bias is not None:
        found |= weights(b=(rows, 4) if bias == "full" else bias if bias != (3, 1) else (rows, 1))
    inputs = ["x", "w", "b"][: 2 if bias is None else 3]
    converted([node("Gemm", inputs, ["y"], **attributes)], found, {"x": [3, 5]})


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_general_product_of_inputs_computes_the_same(transposed: int) -> None:
    nodes = [node("Gemm", ["x", "k", "b"], ["y"], transB=transposed, alpha=0.3), node("Relu", ["y"], ["z"])]
    k = [4, 5] if transposed else [5, 4]
    model = model_of(nodes, {}, {"x": [3, 5], "k": k, "b": [4]}, ("z",))
    checked(model)


@cases(
    ("left", "right"),
    [
        ([3, 5], (5, 4)),
        ([2, 3, 5], (5, 4)),
        ([2, 6, 3, 5], (5, 4)),
        ([2, 6, 3, 5], (6, 5, 4)),
        ([3, 5], (2, 5, 4)),
        ([5], (5, 4)),
        ([2, 3, 5], (5,)),
    ],
)
@cases("constant", [True, False])
def test_a_product_computes_the_same(left: list[int], right: tuple[int, ...], constant: bool) -> None:
    nodes = [node("MatMul", ["x", "k"], ["y"])]
    if constant:
        converted(nodes, weights(k=right), {"x": left})
    else:
        converted(nodes, {}, {"x": left, "k": list(right)})


@pytest.mark.parametrize("swapped", [False, True])
def test_a_bias_behind_a_product_is_part_of_it(swapped: bool) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["m"]),
        node("Add", ["b", "m"] if swapped else ["m", "b"], ["a"]),
        node("Relu", ["a"], ["y"]),
    ]
    assert converted(nodes, weights(w=(5, 4), b=(4,)), {"x": [2, 3, 5]}) == {"FULLY_CONNECTED": 1}


@pytest.mark.parametrize("kind", ["Gemm", "MatMul"])
def test_weights_follow_the_form_of_what_is_flattened(kind: str) -> None:
    nodes = [
        node("Conv", ["x", "c"], ["a"]),
        node("Flatten", ["a"], ["f"]),
        node(kind, ["f", "w"], ["y"]),
    ]
    found = converted(nodes, weights(c=(6, 6, 2, 3), w=(6 * 6 * 3, 4)), X)
    assert found["TRANSPOSE"] == 1  # of the input


def test_batch_normalization_computes_the_same() -> None:
    found = weights(w=(6, 6, 1, 1), s=(6,), b=(6,), m=(6,), v=(6,))
    found["v"] = np.exp(found["v"])
    nodes = [node("Conv", ["x", "w"], ["c"]), node("BatchNormalization", ["c", "s", "b", "m", "v"], ["y"])]
    converted(nodes, found, X)


@pytest.mark.parametrize("shape", [[2, 6, 7], [2, 6, 7, 5]])
def test_instance_normalization_computes_the_same(shape: list[int]) -> None:
    converted([node("InstanceNormalization", ["x", "s", "b"], ["y"])], weights(s=(6,), b=(6,)), {"x": shape})


@cases("axis", [1, 2, -1])
@cases("biased", [True, False])
def test_layer_normalization_computes_the_same(axis: int, biased: bool) -> None:
    shape = tuple(X["x"][axis:])
    inputs = ["c", "s", "b"][: 3 if biased else 2]
    nodes = [node("Conv", ["x", "w"], ["c"]), node("LayerNormalization", inputs, ["y"], axis=axis)]
    converted(nodes, weights(w=(6, 6, 1, 1), s=shape, b=shape), X)


@pytest.mark.parametrize("axis", [1, -1])
def test_normalization_to_unit_length_computes_the_same(axis: int) -> None:
    converted([node("LpNormalization", ["x"], ["y"], axis=axis, p=2)], {}, X)


def test_local_response_normalization_computes_the_same() -> None:
    converted([node("LRN", ["x"], ["y"], size=3, alpha=0.3, beta=0.6, bias=1.2)], {}, X)


LAYERS = [
    ("LSTM", 4, {}),
    ("GRU", 3, {}),
    ("GRU", 3, {"linear_before_reset": 1}),
    ("RNN", 1, {}),
]


@cases(("kind", "gates", "attributes"), LAYERS)
@cases("direction", ["forward", "reverse", "bidirectional"])
@cases("started", [False, True])
def test_recurrent_layers_compute_the_same(
    kind: str, gates: int, attributes: dict[str, Any], direction: str, started: bool
) -> None:
    count, hidden, size = (2 if direction == "bidirectional" else 1), 3, 4
    found = weights(
        w=(count, gates * hidden, size), r=(count, gates * hidden, hidden), b=(count, 2 * gates * hidden)
    )
    inputs = ["x", "w", "r", "b", "", *(["h", "c"] if kind == "LSTM" else ["h"])][: None if started else 4]
    outputs = ["y", "last", *(["cell"] if kind == "LSTM" else [])]
    shapes = {"x": [5, 2, size]}
    if started:
        shapes |= {name: [count, 2, hidden] for name in inputs[5:]}
    layer = node(kind, inputs, outputs, hidden_size=hidden, direction=direction, **attributes)
    checked(model_of([layer], found, shapes, outputs))


def test_a_recurrent_layer_starts_anew_in_each_run() -> None:
    found = weights(w=(1, 12, 4), r=(1, 12, 3))
    model = model_of([node("LSTM", ["x", "w", "r"], ["", "y"], hidden_size=3)], found, {"x": [5, 2, 4]})
    feed = {"x": np.ones((5, 2, 4), np.float32)}
    checked(model, feeds=[feed, feed, feed])


@pytest.mark.parametrize("axis", [1, -1])
def test_root_mean_square_normalization_computes_the_same(axis: int) -> None:
    shape = tuple(X["x"][axis:])
    nodes = [node("RMSNormalization", ["x", "s"], ["y"], axis=axis)]
    converted(nodes, weights(s=shape), X, opset=23, ir=11)
