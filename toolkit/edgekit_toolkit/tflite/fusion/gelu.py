"""Gelu written out with an error function becomes TFLite's operator: TFLite has no error function."""

import math
from typing import Final

import numpy as np

from edgekit_toolkit.tflite.fusion.joins import Joined, next_of, scalar_of
from edgekit_toolkit.tflite.view import Graph, Node

HALF_ROOT: Final = math.sqrt(0.5)


def join_gelu(node: Node, graph: Graph) -> Joined | None:
    """Join x * 0.5 * (1 + erf(x / sqrt 2)), its factors in any order.

    Where the half has become part of a weight behind it, what is left is twice a Gelu.
    """
    if node.op_type != "Erf" or node.inputs[0] not in graph.producers:
        return None
    scale, after = graph.producers[node.inputs[0]], next_of(node, graph)
    x = _scaled_by(scale, HALF_ROOT, graph)
    if x is None or after is None or graph.sole_reader(node.inputs[0]) is None:
        return None
    if after.op_type != "Add" or scalar_of(graph, _other(after, node)) != 1:
        return None
    chain, factors = [scale, node, after], set[str]()
    while factors != {"x", "half"}:
        product = next_of(chain[-1], graph)
        found = None if product is None else _factors(product, chain[-1], x, graph)
        if product is None or found is None or found & factors:
            break
        factors |= found
        chain.append(product)
    return _joined(x, factors, chain)


def _joined(x: str, factors: set[str], chain: list[Node]) -> Joined | None:
    last = chain[-1]
    if factors == {"x", "half"}:
        return Joined((Node("Gelu", (x,), last.outputs, name=last.name),), tuple(chain))
    if factors != {"x"}:
        return None
    half, two = f"{last.outputs[0]};half", f"{last.outputs[0]};two"
    new = (
        Node("Gelu", (x,), (half,), name=last.name),
        Node("Mul", (half, two), last.outputs, name=last.name),
    )
    return Joined(new, tuple(chain), {two: np.array(2, np.float32)}, {half: last.outputs[0]})


def _factors(product: Node, before: Node, x: str, graph: Graph) -> set[str] | None:
    """Return which factors of a Gelu a node multiplies with; None where it does something else."""
    if product.op_type != "Mul":
        return None
    other = _other(product, before)
    if other == x:
        return {"x"}
    if scalar_of(graph, other) == 0.5:
        return {"half"}
    halved = graph.producers.get(other)
    return {"x", "half"} if halved is not None and _scaled_by(halved, 0.5, graph) == x else None


def _other(node: Node, before: Node) -> str:
    """Return the operand of a node that `before` does not make."""
    return node.inputs[1] if node.inputs[0] == before.outputs[0] else node.inputs[0]


def _scaled_by(node: Node, factor: float, graph: Graph) -> str | None:
    """Return what a node multiplies by `factor`; None where it does something else."""
    if node.op_type not in {"Mul", "Div"}:
        return None
    for place in (1, 0) if node.op_type == "Mul" else (1,):
        scalar = scalar_of(graph, node.inputs[place])
        wanted = 1 / factor if node.op_type == "Div" else factor
        if scalar is not None and math.isclose(scalar, wanted, rel_tol=1e-5):
            return node.inputs[1 - place]
    return None
