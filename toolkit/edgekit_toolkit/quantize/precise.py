"""Finds operators that stay in float, from the order of a graph alone.

Some must, because their inputs need relative precision; others may, because they only decode results.

A normalisation written as single operators divides by the root of a variance. Eight bits hold variances down
to 1/255 of the largest one; all smaller ones become 0, and the division gives infinities. Square roots,
logarithms, powers and divisors need relative precision, so tensors that only they read stay in float.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)  # a tensor, by name or place

# Operators of ONNX and of LiteRT, in capitals, with the input that needs relative precision.
_SHARP: Final = {"SQRT": 0, "RSQRT": 0, "RECIPROCAL": 0, "LOG": 0, "POW": 0, "DIV": 1}
# Their results spread over as many decades as the inputs that they magnify.
_SPREADING: Final = frozenset({"RSQRT", "RECIPROCAL"})


@dataclass(frozen=True, slots=True)
class OperatorNode(Generic[T]):
    """An operator of a graph of any format, with what the rules of this module need.

    Attributes:
        op: name of the operator, in any case of letters.
        inputs: tensors; None for constants and for inputs that are left out.
        product: whether it is a matrix product, which never stays in float.
    """

    op: str
    inputs: Sequence[T | None]
    outputs: Sequence[T]
    product: bool

    @property
    def sharp(self) -> int | None:
        """Position of the input that needs relative precision, as in Log or Div; None without one."""
        return _SHARP.get(self.op.upper())

    @property
    def spreads(self) -> bool:
        """Whether the results are reciprocals, which spread over as many decades as the inputs."""
        op = self.op.upper()
        return op in _SPREADING or (op == "DIV" and self.inputs[0] is None)


def precise_operators(nodes: Sequence[OperatorNode[T]], ends: Collection[T]) -> list[OperatorNode[T]]:
    """Return the operators that stay in float, the last first.

    An operator stays in float if it reads reciprocals, or if its results reach only inputs that need relative
    precision. Matrix products never stay.

    Args:
        nodes: operators in topological order.
        ends: outputs of the graph.
    """
    readers: dict[T, list[tuple[OperatorNode[T], int]]] = {}
    for node in nodes:
        for position, tensor in enumerate(node.inputs):
            if tensor is not None:
                readers.setdefault(tensor, []).append((node, position))
    spread = {tensor for node in nodes if node.spreads for tensor in node.outputs}
    precise: dict[int, OperatorNode[T]] = {}
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
    return list(precise.values())


def operators_behind_products(nodes: Sequence[OperatorNode[T]]) -> list[OperatorNode[T]]:
    """Return the operators that no matrix product follows, such as the decoding of boxes, the last first.

    Args:
        nodes: operators in topological order.
    """
    read_before: set[T] = set()
    behind = []
    for node in reversed(nodes):
        if node.product or not read_before.isdisjoint(node.outputs):
            read_before.update(tensor for tensor in node.inputs if tensor is not None)
        else:
            behind.append(node)
    return behind
