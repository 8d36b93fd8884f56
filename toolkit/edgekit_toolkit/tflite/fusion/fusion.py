"""Nodes that one TFLite operator computes are joined: activations, biases, Gelu, flatten and product.

Works on the plain view and returns a new one. A node is joined with the next only where nothing else reads
what lies between.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.fusion.gelu import join_gelu
from edgekit_toolkit.tflite.fusion.joins import Joined, next_of, scalar_of
from edgekit_toolkit.tflite.ops import OPERATORS
from edgekit_toolkit.tflite.ops.linear import has_linear_weights
from edgekit_toolkit.tflite.view import NO_ACTIVATION, Graph, Node

Join: TypeAlias = Callable[[Node, Graph], Joined | None]


def fuse(graph: Graph) -> Graph:
    """Return the graph with joined nodes."""
    for join in (join_gelu, _bias, _flatten, _activation, _depth_order):
        graph = _apply(join, graph)
    return _without_unread(graph)


def _without_unread(graph: Graph) -> Graph:
    """Return the graph without nodes that no output depends on, such as half of a Gelu that was joined."""
    wanted = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(name for name in node.inputs if name)
    return replace(graph, nodes=tuple(reversed(kept)))


def _apply(join: Join, graph: Graph) -> Graph:
    """Return the graph after one kind of join."""
    instead: dict[int, tuple[Node, ...]] = {}
    constants: dict[str, NDArray[Any]] = {}
    alike: dict[str, str] = {}
    for node in graph.nodes:
        joined = None if id(node) in instead else join(node, graph)
        if joined is None or any(id(old) in instead for old in joined.old):
            continue
        instead.update((id(old), ()) for old in joined.old)
        instead[id(joined.old[-1])] = joined.new
        constants |= joined.constants
        alike |= joined.alike
    if not instead:
        return graph
    nodes = tuple(new for node in graph.nodes for new in instead.get(id(node), (node,)))
    shapes = {**graph.shapes, **{name: value.shape for name, value in constants.items()}}
    dtypes = {**graph.dtypes, **{name: value.dtype for name, value in constants.items()}}
    shapes |= {name: shapes[model] for name, model in alike.items() if model in shapes}
    dtypes |= {name: dtypes[model] for name, model in alike.items() if model in dtypes}
    return replace(
        graph, nodes=nodes, constants={**graph.constants, **constants}, shapes=shapes, dtypes=dtypes
    )


def _activation(node: Node, graph: Graph) -> Joined | None:
    """A Relu, or a Clip to 0..6, behind an operator that can apply it."""
    operator = OPERATORS.get(node.op_type)
    if operator is None or not operator.fuses or node.domain or len(node.outputs) != 1:
        return None
    if graph.dtypes.get(node.outputs[0]) != np.float32:
        return None
    after = next_of(node, graph)
    kind = None if after is None else _activation_kind(after, graph)
    if after is None or kind is None or node.activation != NO_ACTIVATION:
        return None
    return Joined((replace(node, outputs=after.outputs, activation=kind),), (node, after))


def _activation_kind(node: Node, graph: Graph) -> str | None:
    if node.op_type == "Relu":
        return "RELU"
    if node.op_type != "Clip":
        return None
    low, high = scalar_of(graph, node.input(1)), scalar_of(graph, node.input(2))
    if low != 0:
        return None
    if high == 6:
        return "RELU6"
    return "RELU" if not node.input(2) else None


def _bias(node: Node, graph: Graph) -> Joined | None:
    """A constant [N] that is added to a product with a constant matrix [K, N]."""
    weights = graph.constants.get(node.input(1))
    if node.op_type != "MatMul" or weights is None or weights.ndim != 2:
        return None
    if len(graph.shapes.get(node.inputs[0], ())) < 2:
        return None
    after = next_of(node, graph)
    if after is None or after.op_type != "Add":
        return None
    bias = after.inputs[1] if after.inputs[0] == node.outputs[0] else after.inputs[0]
    shape = graph.constants[bias].shape if bias in graph.constants else ()
    if not shape or shape[-1] != weights.shape[1] or math.prod(shape) != shape[-1]:
        return None
    if graph.shapes.get(after.outputs[0]) != graph.shapes.get(node.outputs[0]):
        return None
    joined = replace(node, op_type="FusedLinear", inputs=(*node.inputs, bias), outputs=after.outputs)
    return Joined((joined,), (node, after))


def _flatten(node: Node, graph: Graph) -> Joined | None:
    """A reshape to [N, K] before a product with constant weights [K, M]."""
    if node.op_type not in {"Reshape", "Flatten"} or graph.is_constant(node.inputs[0]):
        return None
    before, after = graph.shapes.get(node.inputs[0], ()), graph.shapes.get(node.outputs[0], ())
    if len(before) < 3 or len(after) != 2 or before[0] != after[0] or 0 in before:
        return None
    product = next_of(node, graph)
    if product is None or product.inputs[0] != node.outputs[0] or not has_linear_weights(product, graph):
        return None
    inputs = (node.inputs[0], *product.inputs[1:])
    return Joined((replace(product, op_type="FusedFlattenLinear", inputs=inputs),), (node, product))


def _depth_order(node: Node, graph: Graph) -> Joined | None:
    """A convolution before DepthToSpace in mode CRD: its filters are put in the order of TFLite, DCR."""
    after = next_of(node, graph)
    weights, bias = graph.constants.get(node.input(1)), graph.constants.get(node.input(2))
    if node.op_type != "Conv" or after is None or after.op_type != "DepthToSpace" or weights is None:
        return None
    if after.attributes.get("mode", b"DCR") != b"CRD" or node.attributes.get("group", 1) != 1:
        return None
    if node.input(2) and bias is None:
        return None
    block = after.attributes["blocksize"] ** 2
    order = np.arange(len(weights)).reshape(-1, block).T.reshape(-1)
    stem = node.outputs[0]
    constants = {f"{stem};weights": weights[order]}
    if bias is not None:
        constants[f"{stem};bias"] = bias[order]
    conv = replace(node, inputs=(node.inputs[0], *constants))
    ordered = replace(after, attributes={**after.attributes, "mode": b"DCR"})
    return Joined((conv, ordered), (node, after), constants)
