"""Functions that write ONNX operators. The families in `ops/` register themselves on import."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from edgekit_toolkit.tflite.layout.rules import MakeRule
from edgekit_toolkit.tflite.step import Step

Emit: TypeAlias = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class Operator:
    """The function that writes an ONNX operator, and its rule.

    Attributes:
        emit: writes one node; raises RefusedError if it cannot.
        rule: makes the node's layout rule.
        fuses: whether a following activation can be part of the operator.
    """

    emit: Emit
    rule: MakeRule
    fuses: bool = False


OPERATORS: Final[dict[str, Operator]] = {}


def writes(*names: str, rule: MakeRule, fuses: bool = False) -> Callable[[Emit], Emit]:
    """Return a decorator that registers the function for ONNX operators `names`; see `Operator`."""

    def register(emit: Emit) -> Emit:
        OPERATORS.update(dict.fromkeys(names, Operator(emit, rule, fuses)))
        return emit

    return register
