"""Padding with a constant, by reflection or with the edge values. Negative padding crops."""

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import axiswise
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step

MAX_PADDED_RANK = 5
REFLECT = 0


@writes("Pad", rule=axiswise)
def write_pad(step: Step) -> None:
    """Write PAD, PADV2 or MIRROR_PAD. A SLICE is added before it for negative padding."""
    tensor, mode = step.read(0), step.attribute("mode", "constant")
    if len(tensor.shape) > MAX_PADDED_RANK:
        raise RefusedError(
            f"{len(tensor.shape)} axes have no kernel in TFLite, at most {MAX_PADDED_RANK} have"
        )
    amounts = _amounts(step, len(tensor.shape))
    if (amounts < 0).any():
        tensor = _cut(step, tensor, np.minimum(amounts, 0))
        amounts = np.maximum(amounts, 0)
    if mode == "edge":
        step.give(_edge(step, tensor, amounts))
        return
    inputs = [tensor, step.builder.constant(amounts)]
    if mode == "reflect":
        options = Options("MirrorPadOptions", {"mode": REFLECT})
        step.give(step.emit("MIRROR_PAD", inputs, step.held(), options))
        return
    if mode != "constant":
        raise RefusedError(f"mode '{mode}' is not covered, constant, reflect and edge are")
    if not step.has(2) or (step.value(2) is not None and not step.constant(2, "the value").any()):
        step.give(step.emit("PAD", inputs, step.held(), Options("PadOptions")))
        return
    value = step.read(2, tuple(range(len(step.shape(2)))))
    step.give(step.emit("PADV2", [*inputs, value], step.held(), Options("PadV2Options")))


def _amounts(step: Step, rank: int) -> "np.typing.NDArray[np.int32]":
    """Return how much is added before and after each held axis: int32 [rank, 2]."""
    pads = step.option("pads", 1) or []
    onnx_rank = len(step.shape(0))
    axes = (
        [int(axis) % onnx_rank for axis in step.constant(3, "the axes").reshape(-1)] if step.has(3) else None
    )
    axes = list(range(onnx_rank)) if axes is None else axes
    result = np.zeros((rank, 2), np.int32)
    for index, axis in enumerate(axes):
        result[step.axis(axis)] = pads[index], pads[index + len(axes)]
    return result


def _cut(step: Step, tensor: Tensor, amounts: "np.typing.NDArray[np.int32]") -> Tensor:
    begin = [-int(before) for before, _ in amounts]
    shape = [size + int(row.sum()) for size, row in zip(tensor.shape, amounts, strict=True)]
    return step.emit(
        "SLICE", [tensor, step.numbers(begin), step.numbers(shape)], shape, Options("SliceOptions")
    )


def _edge(step: Step, tensor: Tensor, amounts: "np.typing.NDArray[np.int32]") -> Tensor:
    """Return the tensor with its first and last elements repeated, an axis at a time."""
    for axis, (before, after) in enumerate(amounts.tolist()):
        if before or after:
            positions = np.clip(np.arange(-before, tensor.shape[axis] + after), 0, tensor.shape[axis] - 1)
            tensor = step.gathered(tensor, axis, positions.tolist())
    return tensor
