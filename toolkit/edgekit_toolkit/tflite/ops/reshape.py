"""Operators that change the shape of a tensor without changing its elements."""

import numpy as np

from edgekit_toolkit.tflite.builder import Options
from edgekit_toolkit.tflite.layout.rules import as_onnx, elementwise, regrouping
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step


@writes("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", rule=regrouping)
def write_reshape(step: Step) -> None:
    step.give(step.builder.reshape(step.read(0), step.held()))


@writes("Dropout", rule=as_onnx)
def write_dropout(step: Step) -> None:
    """Raise RefusedError. This is not called for a Dropout that returns its input unchanged."""
    raise RefusedError(f"its mask, and dropping in training_mode, are not covered: {step.node.outputs}")


@writes("Expand", rule=elementwise)
def write_expand(step: Step) -> None:
    sizes = step.builder.constant(np.array(step.held(), np.int32))
    step.give(
        step.emit(
            "BROADCAST_TO", [step.read(0), sizes], step.held(), Options("BroadcastToOptions"), version=2
        )
    )
