"""Softmax and its logarithm, along the last held axis."""

from edgekit_toolkit.tflite.builder import Options
from edgekit_toolkit.tflite.layout.rules import axis_last
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step


@writes("Softmax", rule=axis_last(-1))
def write_softmax(step: Step) -> None:
    """Write SOFTMAX."""
    step.give(step.emit("SOFTMAX", [step.read(0)], step.held(), Options("SoftmaxOptions", {"beta": 1.0})))


@writes("LogSoftmax", rule=axis_last(-1))
def write_log_softmax(step: Step) -> None:
    """Write LOG_SOFTMAX."""
    step.give(step.emit("LOG_SOFTMAX", [step.read(0)], step.held(), Options("LogSoftmaxOptions")))
