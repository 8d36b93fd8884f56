"""Finds operators that remain in float, and divides kernels into blocks, for graphs of any format.

Some operators must remain in float, because their inputs need relative precision. Others may remain in float,
because they only decode results.

For example, a normalisation divides by the square root of a variance. With 8 bits, variances below 1/255 of
the largest one become 0, and the division returns infinity. Square roots, logarithms, powers and divisors
need relative precision, so tensors that only such operators read remain in float.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

Block = tuple[str, ...]
Ranges = Mapping[str, tuple[float, float]]

# Operators of ONNX and of LiteRT, in capitals, with the input that needs relative precision.
_SHARP: Final = {"SQRT": 0, "RSQRT": 0, "RECIPROCAL": 0, "LOG": 0, "POW": 0, "DIV": 1}
# Their results spread over as many decades as the inputs that they magnify.
_SPREADING: Final = frozenset({"RSQRT", "RECIPROCAL"})
_JOINS: Final = frozenset({"CONCAT", "CONCATENATION", "PACK"})
# Tensors whose values differ by more than this factor do not share a scale: 8 bits hold 255 steps.
UNLIKE: Final = 16.0


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """An operator of a graph of any format.

    Attributes:
        op: The name of the operator. The case is ignored.
        inputs: The names of the inputs. They are None for constants and omitted inputs.
        outputs: The names of the outputs.
        product: Whether the operator is a matrix product, which never remains in float.
    """

    op: str
    inputs: Sequence[str | None]
    outputs: Sequence[str]
    product: bool

    @property
    def sharp(self) -> int | None:
        """The index of the input that needs relative precision, such as the divisor of a Div, or None."""
        return _SHARP.get(self.op.upper())

    @property
    def spreads(self) -> bool:
        """Whether the results are reciprocals, which cover as many orders of magnitude as the inputs."""
        op = self.op.upper()
        return op in _SPREADING or (op == "DIV" and self.inputs[0] is None)


def precise_operators(nodes: Sequence[OperatorNode], ends: Collection[str]) -> set[str]:
    """Return the first outputs of the operators that remain in float.

    An operator remains in float if it reads reciprocals, or if its results are only used by inputs that need
    relative precision. Matrix products never remain in float.

    Args:
        nodes: The operators in topological order.
        ends: The outputs of the graph.
    """
    readers: dict[str, list[tuple[OperatorNode, int]]] = {}
    for node in nodes:
        for position, tensor in enumerate(node.inputs):
            if tensor is not None:
                readers.setdefault(tensor, []).append((node, position))
    spread = {tensor for node in nodes if node.spreads for tensor in node.outputs}
    precise: dict[int, OperatorNode] = {}
    for node in reversed(nodes):
        if node.product:
            continue
        reached = [reader for tensor in node.outputs for reader in readers.get(tensor, ())]
        is_precise = all(
            operator.sharp == position or id(operator) in precise for operator, position in reached
        )
        only_asked = bool(reached) and is_precise and not set(node.outputs) & set(ends)
        if only_asked or spread & set(node.inputs):
            precise[id(node)] = node
    return {node.outputs[0] for node in precise.values() if node.outputs}


def tail_kernels(nodes: Sequence[OperatorNode], kernels: Sequence[str]) -> frozenset[str]:
    """Return the operators in `kernels` that no matrix product follows, such as the decoding of boxes.

    Args:
        nodes: The operators in topological order.
        kernels: The first outputs of operators.
    """
    read_before: set[str] = set()
    behind: set[str] = set()
    for node in reversed(nodes):
        if node.product or not read_before.isdisjoint(node.outputs):
            read_before.update(tensor for tensor in node.inputs if tensor is not None)
        else:
            behind.update(node.outputs)
    return frozenset(kernels) & behind


def unlike_joins(nodes: Sequence[OperatorNode], kernels: Sequence[str], ranges: Ranges) -> frozenset[str]:
    """Return the concatenations in `kernels` whose input ranges differ too much for one scale."""
    joins = (node for node in nodes if node.op.upper() in _JOINS)
    return frozenset(kernels).intersection(
        node.outputs[0] for node in joins if _are_unlike(filter(None, node.inputs), ranges)
    )


def _are_unlike(names: Iterable[str], ranges: Ranges) -> bool:
    """Return whether a range of `names` reaches over `UNLIKE` times as far from 0 as another.

    A range of nothing but 0 does not count.
    """
    reaches = [max(map(abs, ranges[name])) for name in names if name in ranges]
    return max(reaches, default=0) > UNLIKE * min(filter(None, reaches), default=np.inf)


def blocks(nodes: Sequence[OperatorNode], kernels: Collection[str]) -> list[Block]:
    """Divide `kernels` into blocks in the order of the graph. Each matrix product starts a new block."""
    groups: list[list[str]] = []
    for node in nodes:
        if not node.outputs or node.outputs[0] not in kernels:
            continue
        if not groups or node.product:
            groups.append([])
        groups[-1].append(node.outputs[0])
    return [tuple(block) for block in groups]
