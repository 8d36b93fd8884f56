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
    """Write SLICE, or STRIDED_SLICE if the step is not 1.

    These operators support at most five axes. For tensors with more axes, write a GATHER for each axis.
    """
    tensor, ranges = step.read(0), _ranges(step)
    stored = [range(size) for size in tensor.shape]
    for axis, positions in ranges.items():
        stored[step.axis(axis)] = positions
    if len(tensor.shape) > MAX_SLICED_RANK:
        for axis, positions in enumerate(stored):
            tensor = step.gathered(tensor, axis, positions)
        step.give(tensor)
        return
    begins = step.numbers([positions.start for positions in stored])
    if all(positions.step == 1 for positions in stored):
        inputs = [tensor, begins, step.numbers([len(positions) for positions in stored])]
        step.give(step.emit("SLICE", inputs, step.held(), Options("SliceOptions")))
        return
    # A negative end would count from the end; the mask says that there is none.
    mask = sum(1 << axis for axis, positions in enumerate(stored) if positions.stop < 0)
    stops = step.numbers([positions.stop for positions in stored])
    inputs = [tensor, begins, stops, step.numbers([positions.step for positions in stored])]
    step.give(
        step.emit("STRIDED_SLICE", inputs, step.held(), Options("StridedSliceOptions", {"endMask": mask}))
    )


def _ranges(step: Step) -> dict[int, range]:
    """Return the positions that are taken along each axis of the input that is sliced."""
    starts, ends = step.option("starts", 1), step.option("ends", 2)
    if starts is None or ends is None:
        raise RefusedError("starts and ends are missing")
    axes = step.option("axes", 3) or list(range(len(starts)))
    steps = step.option("steps", 4) or [1] * len(starts)
    sizes = [step.shape(0)[axis] for axis in axes]
    return {
        axis: range(*slice(first, last, by).indices(size))
        for axis, first, last, by, size in zip(axes, starts, ends, steps, sizes, strict=True)
    }


@writes("Split", rule=axiswise)
def write_split(step: Step) -> None:
    """Write SPLIT for equal parts, else SPLIT_V. Empty parts get no tensor."""
    onnx_axis = step.attribute("axis", 0)
    axis, tensor = step.axis(onnx_axis), step.read(0)
    sizes = [step.out_shape(number)[onnx_axis] for number in range(len(step.node.outputs))]
    numbers = [number for number, size in enumerate(sizes) if size]
    parts = [sizes[number] for number in numbers]
    outputs = [((*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]), tensor.dtype) for size in parts]
    results: tuple[Tensor, ...]
    if len(parts) == 1:
        results = (step.builder.copy(tensor, tensor.shape),)
    elif len(set(parts)) == 1:
        options = Options("SplitOptions", {"numSplits": len(parts)})
        results = step.builder.operator("SPLIT", [step.numbers([axis]), tensor], outputs, options)
    else:
        options = Options("SplitVOptions", {"numSplits": len(parts)})
        inputs = [tensor, step.numbers(parts), step.numbers([axis])]
        results = step.builder.operator("SPLIT_V", inputs, outputs, options)
    for number, part in zip(numbers, results, strict=True):
        if step.node.outputs[number]:
            step.give(part, number)


@writes("Concat", rule=axiswise)
def write_concat(step: Step) -> None:
    """Write CONCATENATION of the inputs that are not empty."""
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


@writes("CumSum", rule=axiswise)
def write_cumsum(step: Step) -> None:
    axis = step.axis(int(step.constant(1, "the axis").reshape(())))
    fields = {
        "exclusive": bool(step.attribute("exclusive", 0)),
        "reverse": bool(step.attribute("reverse", 0)),
    }
    inputs = [step.read(0), step.number(axis, np.dtype(np.int32))]
    step.give(step.emit("CUMSUM", inputs, step.held(), Options("CumsumOptions", fields)))
