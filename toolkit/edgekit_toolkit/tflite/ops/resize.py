"""Resizing of images with TFLite's operators if they give the same result, and with gathers otherwise."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import Rule, spatial
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node, text_of

# TFLite computes places in float32. For images of some thousand pixels the error is smaller than this.
PLACE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of TFLite's resizing operators, which determine the sampling positions."""

    align_corners: bool
    half_pixel_centers: bool

    def places(self, size: int, length: int) -> NDArray[np.float64]:
        """Return the positions at which an axis is sampled, float64 [length].

        `size` is the size of the axis. `length` is the number of results.
        """
        scale = (size - 1) / (length - 1) if self.align_corners and length > 1 else size / length
        grid = np.arange(length, dtype=np.float64)
        return (grid + 0.5) * scale - 0.5 if self.half_pixel_centers else grid * scale

    def nearest(self, size: int, length: int) -> NDArray[np.int32]:
        """Return the index of the input element for each output element of an axis, int32 [length].

        `size` is the size of the axis. `length` is its size in the output.

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
    """Write RESIZE_BILINEAR, RESIZE_NEAREST_NEIGHBOR or GATHERs. Other modes were already replaced."""
    node, graph, tensor = step.node, step.graph, step.read(0)
    sampling = bilinear_sampling(node, graph)
    if sampling is not None:
        step.give(_emit(step, "RESIZE_BILINEAR", "ResizeBilinearOptions", tensor, sampling))
        return
    axes = range(2, len(step.shape(0)))
    sources = [_rounded(step, places(node, graph, axis), step.shape(0)[axis]) for axis in axes]
    rows = [np.zeros(1, np.int32)] * (2 - len(sources))  # a signal is an image of one row
    step.give(_nearest(step, tensor, [*rows, *sources]))


def bilinear_sampling(node: Node, graph: Graph) -> Sampling | None:
    """Return the options with which RESIZE_BILINEAR is equal to a linear Resize, or None."""
    axes = range(2, len(graph.shape(node.inputs[0])))
    if text_of(node, "mode", "nearest") != "linear" or node.attributes.get("antialias", 0):
        return None
    if text_of(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        return None
    for sampling in SAMPLINGS:
        pairs = []
        for axis in axes:
            size, length = (graph.shape(name)[axis] for name in (node.inputs[0], node.outputs[0]))
            own, theirs = places(node, graph, axis), sampling.places(size, length)
            pairs.append((np.clip(own, 0, size - 1), np.clip(theirs, 0, size - 1)))
        if all(np.allclose(own, theirs, rtol=0, atol=PLACE_TOLERANCE) for own, theirs in pairs):
            return sampling
    return None


def _nearest(step: Step, tensor: Tensor, sources: list[NDArray[np.int32]]) -> Tensor:
    for sampling in SAMPLINGS:
        theirs = [sampling.nearest(size, len(p)) for size, p in zip(tensor.shape[1:3], sources, strict=True)]
        if all(np.array_equal(a, b) for a, b in zip(sources, theirs, strict=True)):
            return _emit(step, "RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions", tensor, sampling)
    for axis, index in enumerate(sources, start=1):
        tensor = step.gathered(tensor, axis, index.tolist())
    return tensor


def _emit(step: Step, kind: str, table: str, tensor: Tensor, sampling: Sampling) -> Tensor:
    fields = {"alignCorners": sampling.align_corners, "halfPixelCenters": sampling.half_pixel_centers}
    inputs = [tensor, step.numbers(step.held()[1:3])]
    return step.emit(kind, inputs, step.held(), Options(table, fields), version=3)


def places(node: Node, graph: Graph, axis: int) -> NDArray[np.float64]:
    """Return the positions at which an ONNX Resize samples an axis of its input, float64 [length].

    Raises:
        RefusedError: The coordinate_transformation_mode or the keep_aspect_ratio_policy is not supported.

    Source: ONNX operators, Resize, coordinate_transformation_mode.
    """
    size, length = (graph.shape(name)[axis] for name in (node.inputs[0], node.outputs[0]))
    grid = np.arange(length, dtype=np.float64)
    scale = scale_of(node, graph, axis)
    mode = text_of(node, "coordinate_transformation_mode", "half_pixel")
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


def scale_of(node: Node, graph: Graph, axis: int) -> float:
    """Return the scale of one axis of a Resize: the stated scale, or else result size / input size.

    Raises:
        RefusedError: The node has a keep_aspect_ratio_policy, which is not supported.
    """
    if text_of(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        raise RefusedError("keep_aspect_ratio_policy is not covered")
    before, after = graph.shape(node.inputs[0]), graph.shape(node.outputs[0])
    scales = graph.constants.get(node.input(2))
    if scales is None or scales.size == 0:
        return after[axis] / before[axis]
    axes = [int(item) % len(before) for item in node.attributes.get("axes", range(len(before)))]
    return float(scales[axes.index(axis)]) if axis in axes else 1.0


def _rounded(step: Step, sources: NDArray[np.float64], size: int) -> NDArray[np.int32]:
    """Return the element that ONNX takes, int32 [length]."""
    mode = step.attribute("nearest_mode", "round_prefer_floor")
    rounded = {
        "round_prefer_floor": np.ceil(sources - 0.5),
        "round_prefer_ceil": np.floor(sources + 0.5),
        "floor": np.floor(sources),
        "ceil": np.ceil(sources),
    }[mode]
    return np.clip(rounded, 0, size - 1).astype(np.int32)
