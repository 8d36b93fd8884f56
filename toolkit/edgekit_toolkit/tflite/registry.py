"""The registry of functions that write ONNX operators. The modules in `ops/` register them on import."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from edgekit_toolkit.tflite.layout.rules import MakeRule
from edgekit_toolkit.tflite.step import Step

Emit: TypeAlias = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class Operator:
    """A function that writes an ONNX operator, and the layout rule of the operator.

    Attributes:
        emit: Writes a node. It raises RefusedError if this is not possible.
        rule: Returns the layout rule of a node.
        fuses: Whether the operator can include the activation that follows it.
    """

    emit: Emit
    rule: MakeRule
    fuses: bool = False


OPERATORS: Final[dict[str, Operator]] = {}


def writes(*names: str, rule: MakeRule, fuses: bool = False) -> Callable[[Emit], Emit]:
    """Return a decorator that registers a function for the ONNX operators `names`. See `Operator`."""

    def register(emit: Emit) -> Emit:
        OPERATORS.update(dict.fromkeys(names, Operator(emit, rule, fuses)))
        return emit

    return register
