"""What joining nodes shares: its result, and steps from node to node."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from edgekit_toolkit.tflite.view import Graph, Node


@dataclass(frozen=True, slots=True)
class Joined:
    """What a join makes of nodes.

    Attributes:
        new: the nodes that take the place of the last of the old ones.
        old: the nodes that they stand for, in order.
        constants: that the new ones read.
        alike: new value -> an old one of the same shape and dtype.
    """

    new: tuple[Node, ...]
    old: tuple[Node, ...]
    constants: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)


def next_of(node: Node, graph: Graph) -> Node | None:
    """Return the only reader of a node's result."""
    return graph.sole_reader(node.outputs[0])


def scalar_of(graph: Graph, name: str) -> float | None:
    """Return the value of a constant of one element; None for anything else."""
    value = graph.constants.get(name)
    return float(value.reshape(())) if value is not None and value.size == 1 else None
