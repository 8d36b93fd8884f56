"""What convolutions and pooling share: their windows, and the padding that TFLite has no word for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.windows import Pads, WindowAttributes, Windows, windows

PADDING_CODES = {"SAME": 0, "VALID": 1}


def windows_of(step: Step, kernel: Sequence[int]) -> Windows:
    """Return a node's windows over its first input [N, C, spatial...]; 1-D signals as images of one row.

    Raises:
        RefusedError: negative padding.
    """
    found = windows(step.shape(0)[2:], kernel, attributes_of(step), step.out_shape()[2:])
    if len(found.sizes) != 1:
        return found
    return Windows(
        (1, *found.sizes),
        (1, *found.kernel),
        (1, *found.strides),
        (1, *found.dilations),
        (1, *found.outputs),
        ((0, 0), *found.pads),
    )


def attributes_of(step: Step) -> WindowAttributes:
    """Return what a node says of its windows."""
    return WindowAttributes(
        step.attribute("strides"),
        step.attribute("dilations"),
        step.attribute("pads"),
        step.text("auto_pad", "NOTSET"),
    )


def pad_spatial(step: Step, tensor: Tensor, pads: Pads, value: float = 0.0) -> Tensor:
    """Return the tensor [N, spatial..., C] with a border of `value`."""
    if not any(before or after for before, after in pads):
        return tensor
    amounts = np.array([(0, 0), *pads, (0, 0)], np.int32)
    shape = [size + int(row.sum()) for size, row in zip(tensor.shape, amounts, strict=True)]
    if value == 0:
        return step.emit("PAD", [tensor, step.builder.constant(amounts)], shape, Options("PadOptions"))
    inputs = [tensor, step.builder.constant(amounts), step.number(value, tensor.dtype)]
    return step.emit("PADV2", inputs, shape, Options("PadV2Options"))


def padded(step: Step, tensor: Tensor, found: Windows, value: float = 0.0) -> tuple[Tensor, str]:
    """Return the input, padded where TFLite has no word for the padding, and the word to use."""
    if found.padding is not None:
        return tensor, found.padding
    return pad_spatial(step, tensor, found.pads, value), "VALID"


def strides_of(found: Windows, padding: str) -> dict[str, Any]:
    """Return the option fields that all 2-D windows have."""
    return {"padding": PADDING_CODES[padding], "strideH": found.strides[0], "strideW": found.strides[1]}
