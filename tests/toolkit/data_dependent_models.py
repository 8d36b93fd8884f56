"""Generated models whose shapes are decided by data: detectors, rows that are found, recurrences, caches.

Each member of a kind is drawn from a seed: weights, sizes, number of classes, order of columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper
from tests.toolkit.package_run import model_of, tensor

Array = NDArray[Any]
SAMPLES, SIDE, ANCHORS = 24, 16, 64


@dataclass
class Member:
    """A model under construction, with its samples.

    Attributes:
        draw: the member's random numbers.
        nodes, weights: of the graph.
        inputs, outputs: name, shape and type of each.
        samples: input name -> array [samples, ...].
    """

    draw: np.random.Generator
    nodes: list[NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    samples: dict[str, Array] = field(default_factory=dict)

    def add(self, operator: str, *inputs: str | Array, count: int = 1, **attributes: Any) -> str:
        """Add a node and return its (first) output; arrays become weights."""
        names = []
        for value in inputs:
            names.append(value if isinstance(value, str) else f"w{len(self.weights)}")
            if not isinstance(value, str):
                self.weights[names[-1]] = value
        made = [f"t{len(self.nodes)}_{place}" for place in range(count)]
        self.nodes.append(helper.make_node(operator, names, made, **attributes))
        return made[0]

    def give(self, name: str, value: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> None:
        """Make a tensor an output."""
        self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(tensor(name, shape, dtype))

    def take(self, name: str, shape: Sequence[int | str], sample: Sequence[int]) -> str:
        """Add an input of normal values; the samples' axis is in front of `sample`."""
        self.inputs.append(tensor(name, shape))
        self.samples[name] = self.draw.normal(size=(SAMPLES, *sample)).astype(np.float32)
        return name

    def matrix(self, *shape: int) -> Array:
        """Return weights that keep the size of values."""
        return (self.draw.normal(size=shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)

    def model(self) -> onnx.ModelProto:
        return model_of(self.nodes, self.inputs, self.outputs, self.weights)


def anchors(member: Member, classes: int, *, scale: float) -> tuple[str, str]:
    """Add a network on photographs; return corners [1, 64, 4] up to `scale`, and scores [1, 64, classes]."""
    x = member.take("x", [1, 3, SIDE, SIDE], (3, SIDE, SIDE))
    made = member.add("Relu", member.add("Conv", x, member.matrix(16, 3, 3, 3), strides=[2, 2], pads=[1] * 4))
    heads = member.add("Conv", made, 3 * member.matrix(4 + classes, 16, 1, 1))
    rows = member.add(
        "Transpose", member.add("Reshape", heads, np.array([1, 4 + classes, 64])), perm=[0, 2, 1]
    )
    shares = member.add("Sigmoid", rows)
    member.nodes.append(helper.make_node("Split", [shares, "parts"], ["centre", "extent", "shares"], axis=2))
    member.weights["parts"] = np.array([2, 2, classes])
    corner = member.add("Mul", "centre", np.float32(0.8 * scale).reshape(()))
    size = member.add(
        "Mul", member.add("Add", "extent", np.float32(0.2).reshape(())), np.float32(0.15 * scale).reshape(())
    )
    return member.add("Concat", corner, member.add("Add", corner, size), axis=2), "shares"


def best(member: Member, boxes: str, scores: str, count: int) -> tuple[str, str, str]:
    """Return the best boxes [1, count, 4], their scores and classes [1, count, 1], as floats."""
    top = member.add("ReduceMax", scores, axes=[2], keepdims=1)
    label = member.add("Cast", member.add("ArgMax", scores, axis=2, keepdims=1), to=TensorProto.FLOAT)
    whole = member.add("Concat", boxes, top, label, axis=2)
    values = member.add("Squeeze", top, np.array([0, 2]))
    member.nodes.append(helper.make_node("TopK", [values, "most"], ["unused", "order"]))
    member.weights["most"] = np.array([count])
    member.nodes += [
        helper.make_node("Gather", [whole, "order"], ["rows"], axis=1),
        helper.make_node("Split", ["rows", "columns"], ["b", "s", "c"], axis=2),
    ]
    member.weights["columns"] = np.array([4, 1, 1])
    return "b", "s", "c"


ORDERS = ("bsc", "bcs", "csb", "nbcs", "nbsc", "ncsb")


def end_to_end(member: Member) -> None:
    classes, count = int(member.draw.integers(1, 6)), int(member.draw.integers(8, 40))
    boxes, scores = anchors(member, classes, scale=float(member.draw.choice([1.0, 320.0])))
    columns = dict(zip("bsc", best(member, boxes, scores, count), strict=True))
    columns["n"] = member.add("Mul", columns["c"], np.float32(0).reshape(()))
    order = str(member.draw.choice(ORDERS))
    made = member.add("Concat", *(columns[letter] for letter in order), axis=2)
    member.give("y", made, [1, count, 6 + ("n" in order)])


def four_outputs(member: Member) -> None:
    classes, count = int(member.draw.integers(1, 6)), 10
    boxes, scores, labels = best(member, *anchors(member, classes, scale=1.0), count)
    member.give("boxes", boxes, [1, count, 4])
    for name, value in (("classes", labels), ("scores", scores)):
        member.give(name, member.add("Squeeze", value, np.array([2])), [1, count])
    sure = member.add("Greater", scores, np.float32(0.4).reshape(()))
    counted = member.add("Cast", sure, to=TensorProto.FLOAT)
    total = member.add("ReduceSum", counted, np.array([1, 2]), keepdims=0)
    member.give("count", total, [1])


def raw_detector(member: Member) -> None:
    classes = int(member.draw.integers(1, 6))
    boxes, scores = anchors(member, classes, scale=320.0)
    made = member.add("Concat", boxes, scores, axis=2)
    is_turned = bool(member.draw.integers(2))
    shape = [1, 4 + classes, ANCHORS] if is_turned else [1, ANCHORS, 4 + classes]
    member.give("y", member.add("Transpose", made, perm=[0, 2, 1]) if is_turned else made, shape)


def suppressed(member: Member) -> None:
    classes = int(member.draw.integers(1, 4))
    boxes, scores = anchors(member, classes, scale=320.0)
    turned = member.add("Transpose", scores, perm=[0, 2, 1])
    one = np.array([1])
    chosen = member.add(
        "NonMaxSuppression",
        boxes,
        turned,
        np.array([int(member.draw.integers(5, 60))]),
        np.array([0.5], np.float32),
        np.array([float(member.draw.uniform(0.3, 0.6))], np.float32),
    )
    number = member.add("Squeeze", member.add("Gather", chosen, np.array([2]), axis=1), one)
    label = member.add("Squeeze", member.add("Gather", chosen, np.array([1]), axis=1), one)
    found = member.add("Gather", member.add("Squeeze", boxes, np.array([0])), number, axis=0)
    rated = member.add("GatherND", turned, chosen)
    form = int(member.draw.integers(5))
    if form == 0:
        member.give("y", found, ["K", 4])
    elif form == 1:
        member.give("chosen", chosen, ["K", 3], TensorProto.INT64)
    elif form == 2:
        member.give("boxes", found, ["K", 4])
        member.give("labels", label, ["K"], TensorProto.INT64)
        member.give("scores", rated, ["K"])
    else:
        columns = [member.add("Unsqueeze", value, one) for value in (rated, member.add("Cast", label, to=1))]
        rows = member.add("Concat", found, *columns, axis=1)
        is_batched = form == 4
        made = member.add("Unsqueeze", rows, np.array([0])) if is_batched else rows
        member.give("y", made, [1, "K", 6] if is_batched else ["K", 6])


def found_rows(member: Member) -> None:
    x = member.take("x", [1, 24, 6], (24, 6))
    values = member.add("Squeeze", member.add("MatMul", x, member.matrix(6, 4)), np.array([0]))
    first = member.add("Squeeze", member.add("Gather", values, np.array([0]), axis=1), np.array([1]))
    is_large = member.add("Greater", first, np.float32(member.draw.uniform(-0.3, 0.8)).reshape(()))
    kind = int(member.draw.integers(5))
    if kind in (0, 4):
        member.give("places", member.add("NonZero", is_large), [1, "K"], TensorProto.INT64)
    if kind in (1, 4):
        member.give("rows", member.add("Compress", values, is_large, axis=0), ["R", 4])
    if kind == 2:
        rounded = member.add("Round", member.add("Mul", first, np.float32(4).reshape(())))
        member.give("values", member.add("Unique", rounded, sorted=1), ["U"])
    if kind == 3:
        total = member.add("ReduceSum", member.add("Cast", is_large, to=TensorProto.INT64), keepdims=1)
        member.nodes.append(helper.make_node("TopK", [first, total], ["largest", "where"]))
        member.give("top", "largest", ["K"])


def recurrent(member: Member) -> None:
    operator = str(member.draw.choice(["LSTM", "GRU", "RNN"]))
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    width, hidden, steps = 6, int(member.draw.integers(4, 12)), int(member.draw.integers(3, 14))
    time = member.draw.choice([0, 1])
    has_state = bool(member.draw.integers(2))
    x = member.take("x", ["T" if time else steps, 1, width], (steps, 1, width))
    inputs = [x, member.matrix(1, gates * hidden, width), member.matrix(1, gates * hidden, hidden)]
    if has_state:
        inputs += ["", "", member.take("h", [1, 1, hidden], (1, 1, hidden))]
    made = member.add(operator, *inputs, count=2, hidden_size=hidden)
    last = made.replace("_0", "_1")
    flat = member.add("Squeeze", last, np.array([0]))
    member.give("y", member.add("Gemm", flat, member.matrix(hidden, 3)), [1, 3])
    if has_state:
        member.give("h_out", last, [1, 1, hidden])


def cached(member: Member) -> None:
    width, past = 8, int(member.draw.choice([0, 0, 3]))
    key = member.take("past", [1, "P", width], (1, past, width) if member.draw.integers(2) else (past, width))
    if member.samples["past"].ndim == 4:
        x = member.take("x", [1, 1, width], (1, 1, width))
    else:
        x = member.take("x", [1, 1, width], (1, width))
    present = member.add("Concat", key, x, axis=1)
    scores = member.add("MatMul", x, member.add("Transpose", present, perm=[0, 2, 1]))
    mixed = member.add("MatMul", member.add("Softmax", scores, axis=-1), present)
    member.give("y", member.add("MatMul", mixed, member.matrix(width, 5)), [1, 1, 5])
    member.give("present", present, [1, "Q", width])


KINDS: Mapping[str, Callable[[Member], None]] = {
    "end_to_end": end_to_end,
    "four_outputs": four_outputs,
    "raw_detector": raw_detector,
    "suppressed": suppressed,
    "found_rows": found_rows,
    "recurrent": recurrent,
    "cached": cached,
}


def member_of(kind: str, seed: int) -> Member:
    """Return a member of a kind."""
    member = Member(np.random.default_rng([seed, *kind.encode()]))
    KINDS[kind](member)
    return member
