"""Replaces x + x * g by x * (1 + g) if the gate g has far fewer values than x.

A squeeze-and-excite block with a residual connection reads and writes the full tensor twice. After this
pass, it reads and writes the full tensor once, because 1 is added to the gate, which has one value per
channel.
"""

import numpy as np
import onnx
from onnx import helper

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    add_constant,
    float_tensors,
    fresh_name,
    replace_nodes,
    rewrite_all,
)

# A gate of one value a channel comes from one of these, through a chain that keeps its 1x1 size.
_POOLS = {"GlobalAveragePool", "GlobalMaxPool"}
_KEEPS_SIZE = {"Conv", "Relu", "Sigmoid", "HardSigmoid", "Clip", "Mul", "Add"}


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with x * (1 + g) instead of x + x * g for each small gate g."""
    # Names keep their types: the new nodes make one new tensor, which is no source of another gate.
    floats = float_tensors(onnx.shape_inference.infer_shapes(model))
    return rewrite_all(model, lambda graph: _distribute_one(graph, floats))


def _distribute_one(graph: onnx.GraphProto, floats: frozenset[str]) -> bool:
    index = GraphIndex(graph)
    for add in graph.node:
        if add.op_type != "Add" or add.output[0] not in floats:
            continue
        for at in (0, 1):
            mul, source = index.producers.get(add.input[at]), add.input[1 - at]
            if (
                mul is None
                or mul.op_type != "Mul"
                or source not in mul.input
                or not index.only_feeds(mul.output[0], add)
            ):
                continue
            gates = [name for name in mul.input if name != source]
            if len(gates) == 1 and _is_gate(index, gates[0]):
                _write(index, add, mul, source, gates[0])
                return True
    return False


def _is_gate(index: GraphIndex, name: str) -> bool:
    node = index.producers.get(name)
    if node is None or node.op_type not in _KEEPS_SIZE:
        return node is not None and node.op_type in _POOLS
    return all(_is_gate(index, other) for other in node.input if other and other not in index.initializers)


def _write(index: GraphIndex, add: onnx.NodeProto, mul: onnx.NodeProto, source: str, gate: str) -> None:
    one_name = add_constant(index, f"{gate}_one", np.asarray(1, np.float32))
    plus = fresh_name(index, f"{gate}_plus_one")
    replace_nodes(
        index.graph,
        [mul, add],
        [
            helper.make_node("Add", [gate, one_name], [plus], name=add.name),
            helper.make_node("Mul", [source, plus], [add.output[0]], name=mul.name),
        ],
    )
