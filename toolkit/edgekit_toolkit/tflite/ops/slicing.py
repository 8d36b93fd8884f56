"""Slices, splits, concatenations and tilings of tensors."""

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import axiswise
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step

MAX_SLICED_RANK = 5


@writes("Slice", rule=axiswise)
def write_slice(step: Step) -> None:
    """Write SLICE, or STRIDED_SLICE if elements are skipped or reversed."""
    shape, tensor = step.shape(0), step.read(0)
    _check_rank(tensor)
    starts, ends = step.option("starts", 1), step.option("ends", 2)
    if starts is None or ends is None:
        raise RefusedError("starts and ends are missing")
    axes = step.option("axes", 3) or list(range(len(starts)))
    steps = step.option("steps", 4) or [1] * len(starts)
    begin, size, stride, end = [0] * len(tensor.shape), list(tensor.shape), [1] * len(tensor.shape), 0
    stop = list(tensor.shape)
    for axis, first, last, by in zip(axes, starts, ends, steps, strict=True):
        positions = range(*slice(first, last, by).indices(shape[axis % len(shape)]))
        stored_axis = step.axis(axis)
        begin[stored_axis], size[stored_axis], stride[stored_axis], stop[stored_axis] = (
            positions.start,
            len(positions),
            by,
            positions.stop,
        )
        end |= (1 << stored_axis) if positions.stop < 0 else 0  # TFLite would count from the end
    if all(by == 1 for by in stride):
        inputs = [tensor, step.numbers(begin), step.numbers(size)]
        step.give(step.emit("SLICE", inputs, step.held(), Options("SliceOptions")))
        return
    inputs = [tensor, step.numbers(begin), step.numbers(stop), step.numbers(stride)]
    options = Options("StridedSliceOptions", {"endMask": end})
    step.give(step.emit("STRIDED_SLICE", inputs, step.held(), options))


@writes("Split", rule=axiswise)
def write_split(step: Step) -> None:
    """Write SPLIT for equal parts, else SPLIT_V."""
    axis = step.axis(step.attribute("axis", 0))
    tensor = step.read(0)
    shapes = [
        (*tensor.shape[:axis], step.out_shape(index)[step.attribute("axis", 0)], *tensor.shape[axis + 1 :])
        for index in range(len(step.node.outputs))
    ]
    parts = [shape[axis] for shape in shapes]
    outputs = [(shape, tensor.dtype) for shape in shapes]
    if len(set(parts)) == 1:
        options = Options("SplitOptions", {"numSplits": len(parts)})
        outputs_of_split = step.builder.operator("SPLIT", [step.numbers([axis]), tensor], outputs, options)
    else:
        options = Options("SplitVOptions", {"numSplits": len(parts)})
        inputs = [tensor, step.numbers(parts), step.numbers([axis])]
        outputs_of_split = step.builder.operator("SPLIT_V", inputs, outputs, options)
    for index, (name, part) in enumerate(zip(step.node.outputs, outputs_of_split, strict=True)):
        if name:
            step.give(part, index)


@writes("Concat", rule=axiswise)
def write_concat(step: Step) -> None:
    """Write CONCATENATION; parts without elements add nothing."""
    filled = [index for index in range(len(step.node.inputs)) if 0 not in step.shape(index)]
    tensors = [step.read(number) for number in filled]
    if len(tensors) == 1:
        step.give(step.builder.copy(tensors[0], tensors[0].shape))
        return
    options = Options("ConcatenationOptions", {"axis": step.axis(step.attribute("axis"))})
    step.give(step.emit("CONCATENATION", tensors, step.held(), options))


@writes("Tile", rule=axiswise)
def write_tile(step: Step) -> None:
    repeats = step.constant(1, "the repeats").reshape(-1)
    stored_repeats = [1 if axis < 0 else int(repeats[axis]) for axis in step.form]
    step.give(
        step.emit("TILE", [step.read(0), step.numbers(stored_repeats)], step.held(), Options("TileOptions"))
    )


def _check_rank(tensor: Tensor) -> None:
    if len(tensor.shape) > MAX_SLICED_RANK:
        raise RefusedError(
            f"{len(tensor.shape)} axes have no kernel in TFLite, at most {MAX_SLICED_RANK} have"
        )


@writes("CumSum", rule=axiswise)
def write_cumsum(step: Step) -> None:
    axis = step.axis(int(step.constant(1, "the axis").reshape(())))
    fields = {
        "exclusive": bool(step.attribute("exclusive", 0)),
        "reverse": bool(step.attribute("reverse", 0)),
    }
    inputs = [step.read(0), step.number(axis, np.dtype(np.int32))]
    step.give(step.emit("CUMSUM", inputs, step.held(), Options("CumsumOptions", fields)))


@writes("Trilu", rule=axiswise)
def write_trilu(step: Step) -> None:
    """Write the choice between the input and zeros by a constant triangle."""
    shape = step.shape(0)
    offset = int(step.constant(1, "k").reshape(())) if step.has(1) else 0
    square = np.ones(shape[-2:], np.bool_)
    mask = np.triu(square, offset) if step.attribute("upper", 1) else np.tril(square, offset)
    axes = [axis - (len(shape) - 2) for axis in step.form]
    stored_mask = mask.transpose([axis for axis in axes if axis >= 0])
    stored_mask = stored_mask.reshape(
        [size if axis >= 0 else 1 for axis, size in zip(axes, step.held(), strict=True)]
    )
    tensor = step.read(0)
    inputs = [step.builder.constant(stored_mask), tensor, step.number(0, tensor.dtype)]
    options = Options("SelectV2Options")
    step.give(step.emit("SELECT_V2", inputs, step.held(), options, dtype=tensor.dtype))
