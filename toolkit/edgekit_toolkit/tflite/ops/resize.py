"""Resizing of images: TFLite's own operators if they sample at the same places, else by index."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import Rule, spatial
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node

# TFLite computes places in float32; for images of some thousand pixels the error is smaller than this.
PLACE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Sampling:
    """TFLite's sampling: its two options."""

    align_corners: bool
    half_pixel_centers: bool

    def places(self, size: int, length: int) -> NDArray[np.float64]:
        """Return the place of each of `length` results among `size` elements, float64 [length]."""
        scale = (size - 1) / (length - 1) if self.align_corners and length > 1 else size / length
        grid = np.arange(length, dtype=np.float64)
        return (grid + 0.5) * scale - 0.5 if self.half_pixel_centers else grid * scale

    def nearest(self, size: int, length: int) -> NDArray[np.int32]:
        """Return the element that each result takes, int32 [length].

        Source: tensorflow/lite/kernels/internal/reference/resize_nearest_neighbor.h.
        """
        scale = np.float32((size - 1) / (length - 1) if self.align_corners and length > 1 else size / length)
        grid = np.arange(length, dtype=np.float32) + np.float32(0.5 if self.half_pixel_centers else 0)
        # It rounds halves up; numpy rounds them to even numbers.
        sources = np.floor(grid * scale + np.float32(0.5 if self.align_corners else 0))
        rows: NDArray[np.int32] = np.clip(sources, 0, size - 1).astype(np.int32)
        return rows


SAMPLINGS = (Sampling(False, False), Sampling(False, True), Sampling(True, False))


def _rule(node: Node, graph: Graph) -> Rule:
    shape, result = graph.shape(node.inputs[0]), graph.shape(node.outputs[0])
    if len(shape) not in {3, 4} or shape[:2] != result[:2] or 0 in result:
        raise RefusedError(
            f"resizing {list(shape)} to {list(result)} is not covered, of images [N, C, H, W] it is"
        )
    return spatial(node, graph)


@writes("Resize", rule=_rule)
def write_resize(step: Step) -> None:
    """Write RESIZE_NEAREST_NEIGHBOR or RESIZE_BILINEAR."""
    mode = step.text("mode", "nearest")
    if (
        step.attribute("antialias", 0)
        or step.text("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    ):
        raise RefusedError("antialias and tf_crop_and_resize are not covered")
    if step.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise RefusedError("keep_aspect_ratio_policy is not covered")
    if mode not in {"nearest", "linear"}:
        raise RefusedError(f"mode '{mode}' is not covered, nearest and linear are")
    tensor = step.read(0)
    sizes, lengths = tensor.shape[1:3], step.held()[1:3]
    sources = [
        _places(step, axis, size, length)
        for axis, (size, length) in enumerate(zip(sizes, lengths, strict=True))
    ]
    if mode == "nearest":
        step.give(_nearest(step, tensor, [_rounded(step, p, s) for p, s in zip(sources, sizes, strict=True)]))
        return
    clipped = [np.clip(source, 0, size - 1) for source, size in zip(sources, sizes, strict=True)]
    for sampling in SAMPLINGS:
        theirs = [np.clip(sampling.places(s, n), 0, s - 1) for s, n in zip(sizes, lengths, strict=True)]
        if all(np.allclose(a, b, rtol=0, atol=PLACE_TOLERANCE) for a, b in zip(clipped, theirs, strict=True)):
            step.give(_emit(step, "RESIZE_BILINEAR", "ResizeBilinearOptions", tensor, sampling))
            return
    mode = step.text("coordinate_transformation_mode", "half_pixel")
    raise RefusedError(
        f"linear resizing of {list(sizes)} to {list(lengths)} with '{mode}' has no kernel in TFLite"
    )


def _nearest(step: Step, tensor: Tensor, sources: list[NDArray[np.int32]]) -> Tensor:
    for sampling in SAMPLINGS:
        theirs = [sampling.nearest(size, len(p)) for size, p in zip(tensor.shape[1:3], sources, strict=True)]
        if all(np.array_equal(a, b) for a, b in zip(sources, theirs, strict=True)):
            return _emit(step, "RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions", tensor, sampling)
    for axis, index in enumerate(sources, start=1):
        if not np.array_equal(index, np.arange(tensor.shape[axis])):
            shape = (*tensor.shape[:axis], len(index), *tensor.shape[axis + 1 :])
            options = Options("GatherOptions", {"axis": axis})
            tensor = step.emit("GATHER", [tensor, step.builder.constant(index)], shape, options)
    return tensor


def _emit(step: Step, kind: str, table: str, tensor: Tensor, sampling: Sampling) -> Tensor:
    fields = {"alignCorners": sampling.align_corners, "halfPixelCenters": sampling.half_pixel_centers}
    inputs = [tensor, step.numbers(step.held()[1:3])]
    return step.emit(kind, inputs, step.held(), Options(table, fields), version=3)


def _places(step: Step, axis: int, size: int, length: int) -> NDArray[np.float64]:
    """Return the places at which ONNX samples one axis, float64 [length].

    Source: ONNX operators, Resize, coordinate_transformation_mode.
    """
    grid = np.arange(length, dtype=np.float64)
    scale = _scale(step, axis, size, length)
    mode = step.text("coordinate_transformation_mode", "half_pixel")
    if mode == "asymmetric":
        return grid / scale
    if mode == "align_corners":
        return grid * (size - 1) / (length - 1) if length > 1 else grid * 0
    if mode == "pytorch_half_pixel" and length == 1:
        return grid * 0
    if mode in {"half_pixel", "pytorch_half_pixel"}:
        return (grid + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        adjustment = length / (scale * size)
        return size / 2 * (1 - adjustment) + (grid + 0.5) / scale - 0.5
    raise RefusedError(f"coordinate_transformation_mode '{mode}' is not covered")


def _scale(step: Step, axis: int, size: int, length: int) -> float:
    """Return the scale with which ONNX samples: the model's, else the quotient of the sizes."""
    rank = len(step.shape(0))
    if rank == 3 and axis == 0:
        return 1.0
    scales = step.value(2)
    if scales is None or scales.size == 0:
        return length / size
    axes = [int(item) % rank for item in step.attribute("axes", range(rank))]
    own = axis + 1 if rank == 3 else axis + 2
    return float(scales[axes.index(own)]) if own in axes else 1.0


def _rounded(step: Step, sources: NDArray[np.float64], size: int) -> NDArray[np.int32]:
    """Return the element that ONNX takes, int32 [length]."""
    mode = step.text("nearest_mode", "round_prefer_floor")
    rounded = {
        "round_prefer_floor": np.ceil(sources - 0.5),
        "round_prefer_ceil": np.floor(sources + 0.5),
        "floor": np.floor(sources),
        "ceil": np.ceil(sources),
    }[mode]
    return np.clip(rounded, 0, size - 1).astype(np.int32)
