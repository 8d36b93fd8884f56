"""Joins nodes that one TFLite operator can compute, such as an activation with the node before it.

A node is joined with the next only if no other node reads the value between them. The result is a new graph.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.ops import OPERATORS
from edgekit_toolkit.tflite.ops.linear import has_linear_weights
from edgekit_toolkit.tflite.view import NO_ACTIVATION, Graph, Node

_HALF_ROOT: Final = math.sqrt(0.5)


@dataclass(frozen=True, slots=True)
class _NodeChain:
    """The result of a join.

    Attributes:
        new: the nodes that replace the last of the old ones.
        old: the nodes that they replace, in order.
        constants: the constants that the new ones read.
        alike: new value -> an old one of the same shape and dtype.
    """

    new: tuple[Node, ...]
    old: tuple[Node, ...]
    constants: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)


_Join: TypeAlias = Callable[[Node, Graph], _NodeChain | None]


def fuse(graph: Graph) -> Graph:
    for join in (_gelu, _bias, _flatten, _activation, _depth_order):
        graph = _apply(join, graph)
    return _without_unread(graph)


def _without_unread(graph: Graph) -> Graph:
    """Return the graph without nodes that no output depends on, such as half of a Gelu that was joined."""
    needed = set(graph.outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed.update(name for name in node.inputs if name)
    return replace(graph, nodes=tuple(reversed(nodes)))


def _apply(join: _Join, graph: Graph) -> Graph:
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


def _activation(node: Node, graph: Graph) -> _NodeChain | None:
    """Join a Relu, or a Clip to 0..6, with an operator before it that can apply it."""
    operator = OPERATORS.get(node.op_type)
    if operator is None or not operator.fuses or node.domain or len(node.outputs) != 1:
        return None
    if graph.dtypes.get(node.outputs[0]) != np.float32:
        return None
    after = _next_of(node, graph)
    kind = None if after is None else _activation_kind(after, graph)
    if after is None or kind is None or node.activation != NO_ACTIVATION:
        return None
    return _NodeChain((replace(node, outputs=after.outputs, activation=kind),), (node, after))


def _activation_kind(node: Node, graph: Graph) -> str | None:
    if node.op_type == "Relu":
        return "RELU"
    if node.op_type != "Clip":
        return None
    low, high = _scalar_of(graph, node.input(1)), _scalar_of(graph, node.input(2))
    if low != 0:
        return None
    if high == 6:
        return "RELU6"
    return "RELU" if not node.input(2) else None


def _bias(node: Node, graph: Graph) -> _NodeChain | None:
    """Join a constant [N] that is added to a product with a constant matrix [K, N]."""
    weights = graph.constants.get(node.input(1))
    if node.op_type != "MatMul" or weights is None or weights.ndim != 2:
        return None
    if len(graph.shapes.get(node.inputs[0], ())) < 2:
        return None
    after = _next_of(node, graph)
    if after is None or after.op_type != "Add":
        return None
    bias = after.inputs[1] if after.inputs[0] == node.outputs[0] else after.inputs[0]
    shape = graph.constants[bias].shape if bias in graph.constants else ()
    if not shape or shape[-1] != weights.shape[1] or math.prod(shape) != shape[-1]:
        return None
    if graph.shapes.get(after.outputs[0]) != graph.shapes.get(node.outputs[0]):
        return None
    joined = replace(node, op_type="FusedLinear", inputs=(*node.inputs, bias), outputs=after.outputs)
    return _NodeChain((joined,), (node, after))


def _flatten(node: Node, graph: Graph) -> _NodeChain | None:
    """Join a reshape to [N, K] with a product behind it with constant weights [K, M]."""
    if node.op_type not in {"Reshape", "Flatten"} or graph.is_constant(node.inputs[0]):
        return None
    before, after = graph.shapes.get(node.inputs[0], ()), graph.shapes.get(node.outputs[0], ())
    if len(before) < 3 or len(after) != 2 or before[0] != after[0] or 0 in before:
        return None
    product = _next_of(node, graph)
    if product is None or product.inputs[0] != node.outputs[0] or not has_linear_weights(product, graph):
        return None
    inputs = (node.inputs[0], *product.inputs[1:])
    return _NodeChain((replace(product, op_type="FusedFlattenLinear", inputs=inputs),), (node, product))


def _depth_order(node: Node, graph: Graph) -> _NodeChain | None:
    """Join a convolution with DepthToSpace in mode CRD: its filters get the order of TFLite, DCR."""
    after = _next_of(node, graph)
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
    return _NodeChain((conv, ordered), (node, after), constants)


def _gelu(node: Node, graph: Graph) -> _NodeChain | None:
    """Join the nodes of a Gelu, x * 0.5 * (1 + erf(x / sqrt 2)), factors in any order; TFLite has no erf.

    If the half has become part of a weight behind it, the remaining nodes are twice a Gelu.
    """
    if node.op_type != "Erf" or node.inputs[0] not in graph.producers:
        return None
    scale, after = graph.producers[node.inputs[0]], _next_of(node, graph)
    x = _scaled_by(scale, _HALF_ROOT, graph)
    if x is None or after is None or graph.sole_reader(node.inputs[0]) is None:
        return None
    if after.op_type != "Add" or _scalar_of(graph, _other(after, node)) != 1:
        return None
    chain, factors = [scale, node, after], set[str]()
    while factors != {"x", "half"}:
        product = _next_of(chain[-1], graph)
        factor_pair = None if product is None else _factors(product, chain[-1], x, graph)
        if product is None or factor_pair is None or factor_pair & factors:
            break
        factors |= factor_pair
        chain.append(product)
    return _joined_gelu(x, factors, chain)


def _joined_gelu(x: str, factors: set[str], chain: list[Node]) -> _NodeChain | None:
    last = chain[-1]
    if factors == {"x", "half"}:
        return _NodeChain(
            (Node(op_type="Gelu", inputs=(x,), outputs=last.outputs, name=last.name),), tuple(chain)
        )
    if factors != {"x"}:
        return None
    half, two = f"{last.outputs[0]};half", f"{last.outputs[0]};two"
    new = (
        Node(op_type="Gelu", inputs=(x,), outputs=(half,), name=last.name),
        Node(op_type="Mul", inputs=(half, two), outputs=last.outputs, name=last.name),
    )
    return _NodeChain(new, tuple(chain), {two: np.array(2, np.float32)}, {half: last.outputs[0]})


def _factors(product: Node, before: Node, x: str, graph: Graph) -> set[str] | None:
    """Return the factors of a Gelu by which a node multiplies; None if it does something else."""
    if product.op_type != "Mul":
        return None
    other = _other(product, before)
    if other == x:
        return {"x"}
    if _scalar_of(graph, other) == 0.5:
        return {"half"}
    halved = graph.producers.get(other)
    return {"x", "half"} if halved is not None and _scaled_by(halved, 0.5, graph) == x else None


def _other(node: Node, before: Node) -> str:
    """Return the operand of a node that `before` does not make."""
    return node.inputs[1] if node.inputs[0] == before.outputs[0] else node.inputs[0]


def _scaled_by(node: Node, factor: float, graph: Graph) -> str | None:
    """Return the operand that a node multiplies by `factor`; None if it does something else."""
    if node.op_type not in {"Mul", "Div"}:
        return None
    for position in (1, 0) if node.op_type == "Mul" else (1,):
        scalar = _scalar_of(graph, node.inputs[position])
        scale = 1 / factor if node.op_type == "Div" else factor
        if scalar is not None and math.isclose(scalar, scale, rel_tol=1e-5):
            return node.inputs[1 - position]
    return None


def _next_of(node: Node, graph: Graph) -> Node | None:
    """Return the only reader of a node's result."""
    return graph.sole_reader(node.outputs[0])


def _scalar_of(graph: Graph, name: str) -> float | None:
    """Return the value of a constant of one element; None for anything else."""
    value = graph.constants.get(name)
    return float(value.reshape(())) if value is not None and value.size == 1 else None
