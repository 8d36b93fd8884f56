"""Errors of the conversion, which name the operator and the node."""

from dataclasses import dataclass
from typing import Final

from edgekit_runtime.errors import ModelError

REFUSED: Final = "edgekit.refused"  # attribute of an ONNX node that nothing covers: the reason


class RefusedError(Exception):
    """A node cannot be written as TFLite. The error is handled within the package `tflite`."""


class UnknownTensorError(RefusedError):
    """The shape or element type of a tensor is unknown."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a node cannot be written as TFLite.

    Attributes:
        operator: The operator type, or `DOMAIN.TYPE` if the domain is not ONNX's default domain.
        node: A text for messages that contains the name of the node, or else the names of its outputs.
        reason: The unsupported feature.
    """

    operator: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"operator '{self.operator}' at {self.node}: {self.reason}"


class ConversionError(ModelError):
    """The model cannot be written as TFLite, or the written file gives other results.

    Attributes:
        refusals: All unsupported nodes, empty if the reason is not a node.
    """

    def __init__(self, message: str, refusals: tuple[Refusal, ...] = ()) -> None:
        super().__init__(message)
        self.refusals = refusals


def describe_failure(error: Exception) -> str:
    """Return the class and the first line of an unexpected error, as the reason of a `Refusal`."""
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line}"


def refuse_all(refusals: tuple[Refusal, ...]) -> ConversionError:
    """Return an error that names all refused nodes."""
    count = len(refusals)
    listed = "\n".join(f"  {refusal}" for refusal in refusals)
    return ConversionError(
        f"the model cannot be written as TFLite: {count} {'node is' if count == 1 else 'nodes are'} not"
        f" covered\n{listed}\npackage it for onnxruntime (--backend ort), or export it without these"
        " operators",
        refusals,
    )
