"""Refusals of the writer, with the names of operator and node."""

from dataclasses import dataclass
from typing import Final

from edgekit_runtime.errors import ModelError

REFUSED: Final = "edgekit.refused"  # attribute of an ONNX node that nothing covers: the reason


class RefusedError(Exception):
    """A node cannot be written as TFLite; the text says why. It does not leave the package `tflite`."""


class UnknownTensorError(RefusedError):
    """The shape or element type of a tensor is not known."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one node cannot be written as TFLite.

    Attributes:
        operator: operator type, with its domain if that is not ONNX's own.
        node: name in messages: `node 'x'`, or the tensors that it makes.
        reason: feature that is not covered.
    """

    operator: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"operator '{self.operator}' at {self.node}: {self.reason}"


class ConversionError(ModelError):
    """The model cannot be written as TFLite, or the written file computes something else.

    Attributes:
        refusals: every node that is not covered; empty if the reason is not a node.
    """

    def __init__(self, message: str, refusals: tuple[Refusal, ...] = ()) -> None:
        super().__init__(message)
        self.refusals = refusals


def describe_failure(error: Exception) -> str:
    """Return class and first line of an error other than `RefusedError`, as the reason of a `Refusal`."""
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line}"


def refuse_all(refusals: tuple[Refusal, ...]) -> ConversionError:
    """Return an error that names every refused node; the caller raises it."""
    count = len(refusals)
    listed = "\n".join(f"  {refusal}" for refusal in refusals)
    return ConversionError(
        f"the model cannot be written as TFLite: {count} {'node is' if count == 1 else 'nodes are'} not"
        f" covered\n{listed}\npackage it for onnxruntime (--backend ort), or export it without these"
        " operators",
        refusals,
    )
