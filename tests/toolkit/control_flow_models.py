"""Models with loops and branches, as exporters write them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

node = helper.make_node
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name: str, shape: Sequence[int | str] | None, dtype: int = FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def graph(
    nodes: Sequence[NodeProto], inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "body", list(inputs), list(outputs))


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    constants: dict[str, Any],
) -> onnx.ModelProto:
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    whole = helper.make_graph(list(nodes), "model", list(inputs), list(outputs), stored)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _cell(step: str) -> list[NodeProto]:
    """An LSTM cell on `x_t` and the states `h`, `c`; its weights `w`, `r`, `b` are captured from outside."""
    return [
        node("MatMul", [step, "w"], ["xw"]),
        node("MatMul", ["h", "r"], ["hr"]),
        node("Add", ["xw", "hr"], ["sum"]),
        node("Add", ["sum", "b"], ["gates"]),
        node("Split", ["gates"], ["i", "f", "g", "o"], axis=1),
        node("Sigmoid", ["i"], ["si"]),
        node("Sigmoid", ["f"], ["sf"]),
        node("Tanh", ["g"], ["tg"]),
        node("Sigmoid", ["o"], ["so"]),
        node("Mul", ["sf", "c"], ["kept"]),
        node("Mul", ["si", "tg"], ["new"]),
        node("Add", ["kept", "new"], ["c_next"]),
        node("Tanh", ["c_next"], ["tc"]),
        node("Mul", ["so", "tc"], ["h_next"]),
    ]


def lstm_weights(inputs: int, hidden: int, vocabulary: int, seed: int = 3) -> dict[str, NDArray[Any]]:
    draw = np.random.default_rng(seed)

    def random(*shape: int) -> NDArray[np.float32]:
        return (draw.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    return {
        "table": random(vocabulary, inputs),
        "w": random(inputs, 4 * hidden),
        "r": random(hidden, 4 * hidden),
        "b": random(4 * hidden),
        "zeros": np.zeros((1, hidden), np.float32),
        "dense": random(hidden, 1),
    }


def keras_lstm(
    steps: int | str = 25,
    *,
    inputs: int = 16,
    hidden: int = 32,
    vocabulary: int = 500,
    form: str = "loop",
) -> onnx.ModelProto:
    """A text classifier whose LSTM is a loop, as a Keras model is exported: y [1, 1] of ids int64 [1, steps].

    Args:
        steps: length of the text, or the name of a free dimension (only `scan` and `while`).
        inputs: size of the embedding.
        hidden: size of the state.
        vocabulary: rows of the embedding.
        form: `loop` with a constant trip count, `while` with a counter as condition, `scan`, or `until`: a
            loop whose condition depends on the data.
    """
    weights: dict[str, Any] = lstm_weights(inputs, hidden, vocabulary)
    head = [
        node("Gather", ["table", "ids"], ["embedded"]),
        node("Transpose", ["embedded"], ["x"], perm=[1, 0, 2]),
    ]
    states = [value("h", [1, hidden]), value("c", [1, hidden])]
    made = [value("h_next", [1, hidden]), value("c_next", [1, hidden])]
    if form == "scan":
        body = graph(_cell("x_t"), [*states, value("x_t", [1, inputs])], made)
        loop = node(
            "Scan", ["zeros", "zeros", "x"], ["last_h", "last_c"], name="lstm", body=body, num_scan_inputs=1
        )
    else:
        test = {
            "loop": [node("Identity", ["go"], ["go_next"])],
            "while": [node("Add", ["t", "one"], ["t1"]), node("Less", ["t1", "length"], ["go_next"])],
            "until": [
                node("ReduceMax", ["h_next"], ["top"], keepdims=0),
                node("Less", ["top", "high"], ["go_next"]),
            ],
        }[form]
        body = graph(
            [node("Gather", ["x", "t"], ["x_t"], axis=0), *_cell("x_t"), *test],
            [value("t", [], INT64), value("go", [], BOOL), *states],
            [value("go_next", [], BOOL), *made],
        )
        trips = "many" if form == "while" else "trips"
        loop = node("Loop", [trips, "true", "zeros", "zeros"], ["last_h", "last_c"], name="lstm", body=body)
        weights |= {"true": np.array(True), "one": np.int64(1), "high": np.float32(0.9)}
        weights |= {"trips": np.int64(steps if isinstance(steps, int) else 1), "many": np.int64(2**31 - 1)}
        if form == "while":
            weights |= {"axis1": np.int64(1)}
            head += [node("Shape", ["ids"], ["sizes"]), node("Gather", ["sizes", "axis1"], ["length"])]
    tail = [node("MatMul", ["last_h", "dense"], ["score"]), node("Sigmoid", ["score"], ["y"])]
    return model([*head, loop, *tail], [value("ids", [1, steps], INT64)], [value("y", [1, 1])], weights)


def loop_by_data() -> onnx.ModelProto:
    """y [N, 8] of x [N, 8] by a loop as long as the data say: its latency and energy cannot be modelled."""
    body = graph(
        [node("Relu", ["state"], ["after"]), node("Identity", ["go"], ["on"])],
        [value("step", [], INT64), value("go", [], BOOL), value("state", ["N", 8])],
        [value("on", [], BOOL), value("after", ["N", 8])],
    )
    nodes = [
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Cast", ["top"], ["times"], to=INT64),
        node("Loop", ["times", "", "x"], ["y"], body=body),
    ]
    return model(nodes, [value("x", ["N", 8])], [value("y", ["N", 8])], {})
