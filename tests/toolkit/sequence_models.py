"""Models with states, and sequences for them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tests.toolkit.package_run import model_of, stored, tensor

FEATURES, HIDDEN, CLASSES, STEPS = 8, 48, 4, 24
_NOISE = 0.3

Array = NDArray[Any]


def draw_words(count: int, seed: int, steps: int = STEPS) -> tuple[Array, Array]:
    """Return sequences float32 [count, steps, 8] and their classes.

    A peak of energy wanders up, down, up and down, or stays: only the order of the steps tells which.
    """
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, count)
    time = np.linspace(0, 1, steps)
    ways = np.stack([time, 1 - time, 1 - np.abs(2 * time - 1), np.full(steps, 0.5)]) * (FEATURES - 1)
    centres = ways[labels] + draw.normal(0, 0.5, (count, 1))
    bands = np.arange(FEATURES)
    energy = np.exp(-((bands - centres[..., None]) ** 2)) + draw.normal(0, _NOISE, (count, steps, FEATURES))
    return energy.astype(np.float32), labels.astype(np.int64)


def make_spotter() -> onnx.ModelProto:
    """Return a streaming keyword spotter: scores [batch, 4], hn [batch, 48] of x [batch, 8], h0 [batch, 48].

    A GRU of random weights, written out in matrix products, and scores fitted to the states after whole
    sequences.
    """
    draw = np.random.default_rng(7)
    weights: dict[str, Array] = {}
    for gate in ("z", "r", "n"):
        weights[f"w{gate}"] = draw.normal(0, 1.0, (FEATURES, HIDDEN)).astype(np.float32)
        recurrent = draw.normal(0, 1.0, (HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)
        weights[f"u{gate}"] = recurrent.astype(np.float32)
    weights["b"] = np.full(HIDDEN, 1.5, np.float32)  # keeps much of the state
    weights |= _fit_scores(weights)
    make = helper.make_node
    nodes = []
    for gate in ("z", "r"):
        nodes += [
            make("MatMul", ["x", f"w{gate}"], [f"x{gate}"]),
            make("MatMul", ["h0", f"u{gate}"], [f"h{gate}"]),
            make("Add", [f"x{gate}", f"h{gate}"], [f"s{gate}"]),
        ]
    nodes += [
        make("Add", ["sz", "b"], ["bz"]),
        make("Sigmoid", ["bz"], ["z"]),
        make("Sigmoid", ["sr"], ["r"]),
        make("Mul", ["r", "h0"], ["rh"]),
        make("MatMul", ["x", "wn"], ["xn"]),
        make("MatMul", ["rh", "un"], ["un_out"]),
        make("Add", ["xn", "un_out"], ["sn"]),
        make("Tanh", ["sn"], ["n"]),
        make("Sub", ["h0", "n"], ["difference"]),
        make("Mul", ["z", "difference"], ["kept"]),
        make("Add", ["n", "kept"], ["hn"]),
        make("Gemm", ["hn", "scores_w", "scores_b"], ["scores"]),
    ]
    inputs = [tensor("x", ["batch", FEATURES]), tensor("h0", ["batch", HIDDEN])]
    outputs = [tensor("scores", ["batch", CLASSES]), tensor("hn", ["batch", HIDDEN])]
    return model_of(nodes, inputs, outputs, weights)


def run_gru(weights: dict[str, Array], words: Array) -> Array:
    """Return the states after sequences [count, steps, 8]."""
    state = np.zeros((len(words), HIDDEN), np.float32)
    for x in words.swapaxes(0, 1):
        z, r = (
            1 / (1 + np.exp(-(x @ weights[f"w{gate}"] + state @ weights[f"u{gate}"] + bias)))
            for gate, bias in (("z", weights["b"]), ("r", 0.0))
        )
        n = np.tanh(x @ weights["wn"] + (r * state) @ weights["un"])
        state = n + z * (state - n)
    return state


def _fit_scores(weights: dict[str, Array]) -> dict[str, Array]:
    words, labels = draw_words(800, 1)
    states = np.c_[run_gru(weights, words), np.ones(len(words))]
    normal = states.T @ states + 1e-1 * np.eye(states.shape[1])
    fitted = np.linalg.solve(normal, states.T @ np.eye(CLASSES)[labels])
    return {"scores_w": fitted[:-1].astype(np.float32), "scores_b": fitted[-1].astype(np.float32)}


def store_words(path: Path, count: int, seed: int, steps: int = STEPS) -> Path:
    words, labels = draw_words(count, seed, steps)
    return stored(path, {"x": words, "y": labels})


def make_lstm() -> onnx.ModelProto:
    """y, hn, cn of x [batch, 3], h0, c0 [1, batch, 5]: the batch of its states is the second axis."""
    draw = np.random.default_rng(3)
    weights = {
        "w": draw.normal(0, 0.5, (1, 20, 3)).astype(np.float32),
        "r": draw.normal(0, 0.5, (1, 20, 5)).astype(np.float32),
        "axes": np.array([0], np.int64),
    }
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axes"], ["sequence"]),
        helper.make_node("LSTM", ["sequence", "w", "r", "", "", "h0", "c0"], ["", "hn", "cn"], hidden_size=5),
        helper.make_node("Squeeze", ["hn", "axes"], ["y"]),
    ]
    states = [tensor(name, [1, "batch", 5]) for name in ("h0", "c0")]
    outputs = [tensor("y", ["batch", 5]), *(tensor(name, [1, "batch", 5]) for name in ("hn", "cn"))]
    return model_of(nodes, [tensor("x", ["batch", 3]), *states], outputs, weights)


def make_copies(target: list[int | str], source: list[int | str], dtype: int = TensorProto.FLOAT) -> Any:
    """y = x [batch, 2]; `out` of shape `source` and a dtype, and a state `state` of shape `target`."""
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Cast", ["state"], ["out"], to=dtype),
    ]
    inputs = [tensor("x", ["batch", 2]), tensor("state", target)]
    return model_of(nodes, inputs, [tensor("y", ["batch", 2]), tensor("out", source, dtype)])


def make_hidden() -> onnx.ModelProto:
    """hn = x + h0, and nothing else."""
    inputs = [tensor(name, ["batch", 2]) for name in ("x", "h0")]
    return model_of([helper.make_node("Add", ["x", "h0"], ["hn"])], inputs, [tensor("hn", ["batch", 2])])
