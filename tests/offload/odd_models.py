"""Ordinary models with something odd for a planner: all kinds in turn, drawn from a seed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Feeds = dict[str, NDArray[Any]]
_FLOAT, _INT64, _BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


@dataclass
class _Graph:
    """A graph under construction; `draws` decides what a kind leaves open."""

    draws: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def add(self, op: str, reads: str, writes: str, **attributes: Any) -> None:
        """Add a node; `-` stands for an input that is left out."""
        names = ["" if name == "-" else name for name in reads.split()]
        self.nodes.append(helper.make_node(op, names, writes.split(), **attributes))

    def take(self, name: str, *shape: int | str, dtype: int = _FLOAT) -> None:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def give(self, name: str, *shape: int | str, dtype: int = _FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def constant(self, name: str, value: Any) -> None:
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))

    def weight(self, name: str, *shape: int) -> None:
        scale = np.sqrt(np.prod(shape[1:]) or 1)
        self.constant(name, (self.draws.normal(size=shape) / scale).astype(np.float32))

    def body(self, side: int = 8) -> None:
        """Begin with a photo `x` and a convolution `d`."""
        self.take("x", self.pick(1, "N"), 3, side, side)
        self.weight("k", 4, 3, 3, 3)
        self.add("Conv", "x k", "c", pads=[1] * 4)
        self.add("Relu", "c", "d")

    def classes(self, tensor: str, channels: int = 4) -> None:
        """End with a mean over positions and scores `y`."""
        self.weight("o", channels, 5)
        self.add("GlobalAveragePool", tensor, "e")
        self.add("Flatten", "e", "f")
        self.add("Gemm", "f o", "y")
        self.give("y", "B", 5)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.draws.integers(len(choices)))]

    def model(self) -> bytes:
        graph = helper.make_graph(self.nodes, "odd", self.inputs, self.outputs, self.weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def _recurrent(graph: _Graph) -> None:
    op, gates = graph.pick(("GRU", 3), ("LSTM", 4), ("RNN", 1))
    direction, count = graph.pick(("forward", 1), ("reverse", 1), ("bidirectional", 2))
    steps = graph.pick(1, 30, "T")
    if graph.pick(True, False):
        graph.take("x", steps, 1, 6)
        graph.add("Identity", "x", "xt")
    else:
        graph.take("x", 1, steps if steps != "T" else 9, 6)
        graph.add("Transpose", "x", "xt", perm=[1, 0, 2])
    graph.weight("w", count, gates * 8, 6)
    graph.weight("r", count, gates * 8, 8)
    state = "- - h0" if graph.pick(True, False) else ""
    if state:
        graph.take("h0", count, 1, 8)
    directions = {"direction": direction, "hidden_size": 8}
    graph.add(op, f"xt w r {state}", "all h", **directions)
    graph.constant("shape", np.array([-1, 8 * count]))
    graph.add("Transpose", "all", "at", perm=[0, 2, 1, 3])
    graph.add("Reshape", "at shape", "rows")
    graph.weight("o", 8 * count, 3)
    graph.add("MatMul", "rows o", "y")
    graph.give("y", "R", 3)
    if graph.pick(True, False):
        graph.give("h", count, 1, 8)


def _tokens(graph: _Graph) -> None:
    graph.body(16)
    graph.inputs[0].type.tensor_type.shape.dim[0].dim_value = 1
    channels = graph.pick(4, 64)
    graph.weight("k2", channels, 4, 2, 2)
    graph.add("Conv", "d k2", "p", strides=[2, 2])
    graph.constant("shape", np.array([channels, 64]))
    graph.add("Reshape", "p shape", "r")
    graph.add("Transpose", "r", "t", perm=[1, 0])
    graph.weight("a", channels, 12)
    graph.add("MatMul", "t a", "m")
    graph.add("Relu", "m", "n")
    graph.add("ReduceMean", "n", "q", axes=[0], keepdims=graph.pick(0, 1))
    graph.weight("b", 12, 5)
    graph.add("MatMul", "q b", "y")
    graph.give("y")
    del graph.outputs[-1].type.tensor_type.shape.dim[:]
    graph.outputs[-1].type.tensor_type.ClearField("shape")


def _sequence(graph: _Graph) -> None:
    graph.body()
    graph.add("SplitToSequence", "d", "parts", axis=1, keepdims=1)
    graph.constant("first", np.array(graph.pick(0, -1)))
    if graph.pick(True, False):
        graph.add("SequenceAt", "parts first", "part")
        graph.classes("part", 1)
    else:
        graph.add("ConcatFromSequence", "parts", "joined", axis=1)
        graph.classes("joined")
    if graph.pick(True, False, False):
        kind = helper.make_tensor_type_proto(_FLOAT, None)
        graph.outputs.append(helper.make_value_info("parts", helper.make_sequence_type_proto(kind)))


def _optional(graph: _Graph) -> None:
    graph.body()
    graph.add("Optional", "d", "maybe")
    graph.add("OptionalGetElement", "maybe", "got")
    graph.classes("got")


def _control_flow(graph: _Graph) -> None:
    graph.body()
    scaled = helper.make_tensor_value_info("scaled", _FLOAT, None)
    if graph.pick(True, False):
        graph.add("ReduceMean", "d", "mean", keepdims=0)
        graph.constant("limit", np.float32(0.1))
        graph.add("Greater", "mean limit", "is_high")
        branches = {
            name: helper.make_graph([helper.make_node(op, ["d"], ["scaled"])], name, [], [scaled])
            for name, op in (("then_branch", "Neg"), ("else_branch", "Tanh"))
        }
        graph.add("If", "is_high", "scaled_out", **branches)
    else:
        graph.constant("count", np.array(3))
        graph.constant("go", np.array(True))
        nodes = [
            helper.make_node("Tanh", ["state"], ["scaled"]),
            helper.make_node("Identity", ["on"], ["on_out"]),
        ]
        loop = helper.make_graph(
            nodes,
            "loop",
            [
                helper.make_tensor_value_info("i", _INT64, []),
                helper.make_tensor_value_info("on", _BOOL, []),
                helper.make_tensor_value_info("state", _FLOAT, None),
            ],
            [helper.make_tensor_value_info("on_out", _BOOL, []), scaled],
        )
        graph.add("Loop", "count go d", "scaled_out", body=loop)
    graph.classes("scaled_out")


def _sizes_from_data(graph: _Graph) -> None:
    graph.body()
    graph.inputs[0].type.tensor_type.shape.dim[0].dim_value = 1
    kind = graph.pick("NonZero", "Compress", "Unique", "Slice", "TopK", "Range")
    graph.constant("one", np.array(1))
    graph.constant("minus", np.array([-1]))
    if kind in ("Slice", "TopK", "Range"):
        graph.constant("three", np.array(3))
        graph.add("ReduceSum", "d", "sum", keepdims=0)
        graph.add("Cast", "sum", "i", to=_INT64)
        graph.add("Mod", "i three", "m")
        graph.add("Add", "m one", "p")
        graph.add("Reshape", "p minus", "end")
    graph.add("Reshape", "d minus", "flat")
    graph.constant("zero", np.array([0]))
    graph.constant("scalar", np.array(0))
    if kind == "Slice":
        graph.add("Slice", "flat zero end", "rows")
    elif kind == "TopK":
        graph.add("TopK", "flat end", "rows index")
    elif kind == "Range":
        graph.add("Range", "scalar p one", "index")
        graph.add("Gather", "flat index", "rows")
    elif kind == "Unique":
        graph.add("Unique", "flat", "rows")
    else:
        graph.constant("limit", np.float32(graph.pick(0.2, 1e9)))
        graph.add("Greater", "flat limit", "mask")
        if kind == "Compress":
            graph.add("Compress", "flat mask", "rows", axis=0)
        else:
            graph.add("NonZero", "mask", "index")
            graph.add("Reshape", "index minus", "places")
            graph.add("Gather", "flat places", "rows")
    graph.add("Mul", "rows rows", "z")
    if graph.pick(True, False):
        graph.give("z", "K")
    else:
        graph.add("ReduceSum", "z", "y", keepdims=0)
        graph.give("y")
    if graph.pick(True, False):
        graph.classes("d")
        graph.outputs[-1].name = "y2"
        graph.nodes[-1].output[0] = "y2"


def _several_free_axes(graph: _Graph) -> None:
    first, second = graph.pick(("N", "M"), ("N", "N"), ("batch", "batch_1"))
    graph.take("x", first, 6)
    graph.take("q", second, 6)
    graph.weight("a", 6, 4)
    graph.weight("b", 6, 4)
    graph.add("Gemm", "x a", "p")
    graph.add("Gemm", "q b", "s")
    if first == "batch":
        graph.add("Add", "p s", "y")
    else:
        graph.add("Transpose", "s", "t", perm=[1, 0])
        graph.add("MatMul", "p t", "y")
    graph.give("y", first, 4 if first == "batch" else second)


def _odd_output(graph: _Graph) -> None:
    graph.body()
    graph.classes("d")
    kind = graph.pick("initializer", "constant", "input", "shape", "empty", "scalar", "identity")
    if kind == "initializer":
        graph.give("o", 4, 5)
    elif kind == "constant":
        value = numpy_helper.from_array(graph.draws.normal(size=(20, 4)).astype(np.float32))
        graph.add("Constant", "", "priors", value=value)
        graph.give("priors", 20, 4)
    elif kind == "input":
        graph.take("image_id", graph.pick(1, "N"), dtype=_INT64)
        graph.give("image_id", "I", dtype=_INT64)
    elif kind == "shape":
        graph.add("Shape", "d", "sizes")
        graph.give("sizes", 4, dtype=_INT64)
    elif kind == "empty":
        graph.constant("none", np.array([], np.int64))
        graph.add("Gather", "f none", "z", axis=1)
        graph.give("z", "B", 0)
    elif kind == "scalar":
        graph.add("ReduceMean", "d", "z", keepdims=0)
        graph.give("z")
    else:
        graph.add("Identity", "x", "z")
        graph.give("z", "B", 3, 8, 8)


def _tied_weights(graph: _Graph) -> None:
    graph.take("ids", graph.pick(1, "N"), 7, dtype=graph.pick(_INT64, TensorProto.INT32))
    graph.weight("table", 20, 16)
    graph.add("Gather", "table ids", "x", axis=0)
    graph.weight("a", 16, 16)
    previous = "x"
    for layer in range(3):
        graph.add("MatMul", f"{previous} a", f"m{layer}")
        graph.add("Relu", f"m{layer}", f"r{layer}")
        previous = f"r{layer}"
    graph.add("Transpose", "table", "tt", perm=[1, 0])
    graph.add("MatMul", f"{previous} tt", "y")
    graph.give("y", "N", 7, 20)


def _odd_input(graph: _Graph) -> None:
    graph.body()
    kind = graph.pick("rate", "unused", "mask", "bytes", "float16", "float64", "text", "empty", "scalar")
    tensor = "d"
    if kind == "rate":  # only the tail reads it
        graph.take("sr", dtype=_INT64)
        graph.add("Cast", "sr", "rate", to=_FLOAT)
        graph.add("Mul", "d rate", "e0")
        tensor = "e0"
    elif kind == "unused":
        graph.take("nothing", 1, 3, dtype=_INT64)
    elif kind == "mask":
        graph.take("mask", 8, 8, dtype=_BOOL)
        graph.constant("low", np.float32(-np.inf))
        graph.add("Where", "mask d low", "e0")
        graph.add("Softmax", "e0", "e1")
        graph.constant("zero", np.float32(0))
        graph.add("IsNaN", "e1", "bad")
        graph.add("Where", "bad zero e1", "e2")
        tensor = "e2"
    elif kind in ("bytes", "float16", "float64"):
        dtype = {"bytes": TensorProto.UINT8, "float16": TensorProto.FLOAT16, "float64": TensorProto.DOUBLE}[
            kind
        ]
        graph.take("b", 8, 8, dtype=dtype)
        graph.add("Cast", "b", "bf", to=_FLOAT)
        graph.add("Add", "d bf", "e0")
        tensor = "e0"
    elif kind == "text":
        graph.take("word", 1, dtype=TensorProto.STRING)
        graph.add("Identity", "word", "again")
        graph.give("again", 1, dtype=TensorProto.STRING)
    elif kind == "empty":
        graph.take("past", 1, 4, 0, 8)
        graph.constant("shape", np.array([1, 4, 8, 8]))
        graph.inputs[0].type.tensor_type.shape.dim[0].dim_value = 1
        graph.add("Concat", "past d", "e0", axis=2)
        tensor = "e0"
    else:
        graph.take("gain")
        graph.add("Mul", "d gain", "e0")
        tensor = "e0"
    graph.classes(tensor)


def _small(graph: _Graph) -> None:
    kind = graph.pick("one node", "no weights", "constant", "one axis", "unused node")
    graph.take("x", *({"one axis": (300,)}.get(kind, (graph.pick(1, "N"), 300))))
    if kind == "one node":
        graph.weight("a", 300, 2)
        graph.add("MatMul", "x a", "y")
    elif kind == "constant":
        graph.constant("zero", np.zeros(3, np.float32))
        graph.add("Identity", "zero", "y")
    else:
        graph.add("Sin", "x", "m")
        graph.add("Tanh", "m", "y")
    if kind == "unused node":
        graph.add("Cos", "x", "nobody")
    graph.outputs.append(helper.make_tensor_value_info("y", _FLOAT, None))


def _random(graph: _Graph) -> None:
    graph.body()
    if graph.pick(True, False):
        graph.add("RandomNormalLike", "d", "noise", seed=1.0)
    else:
        graph.add("RandomUniform", "", "noise", shape=[8, 8], seed=1.0)
    graph.add("Add", "d noise", "e0")
    graph.classes("e0")


def _own_operator(graph: _Graph) -> None:
    graph.body()
    graph.add("Gelu", "d", "g", domain="com.microsoft")
    graph.classes("g")


KINDS: tuple[Callable[[_Graph], None], ...] = (
    _recurrent,
    _tokens,
    _sequence,
    _optional,
    _control_flow,
    _sizes_from_data,
    _several_free_axes,
    _odd_output,
    _tied_weights,
    _odd_input,
    _small,
    _random,
    _own_operator,
)


def odd_models(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield models that onnxruntime runs, with names that say their kind."""
    draws = np.random.default_rng(seed)
    for number in range(count):
        graph = _Graph(draws)
        kind = KINDS[number % len(KINDS)]
        kind(graph)
        yield f"{number}{kind.__name__}", graph.model()


def make_feeds(content: bytes, draws: np.random.Generator) -> Feeds:
    """Return values for the inputs of a model; free sizes are 1, integers 0 or 1."""
    feeds: Feeds = {}
    graph = onnx.load_from_string(content).graph
    weights = {one.name for one in graph.initializer}
    for value in graph.input:
        if value.name in weights:
            continue
        kind = value.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "f":
            feeds[value.name] = np.asarray(draws.normal(size=shape)).astype(dtype)
        elif dtype.kind == "O":
            feeds[value.name] = np.full(shape, "text", object)
        else:
            feeds[value.name] = np.asarray(draws.integers(0, 2, shape)).astype(dtype)
    return feeds
