"""Pooling over windows and over everything."""

import itertools

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.builder import Options
from edgekit_toolkit.tflite.layout.rules import Rule, axiswise, spatial
from edgekit_toolkit.tflite.ops.sliding import (
    attributes_of,
    pad_for_maxima,
    pad_spatial,
    strides_of,
    windows_of,
)
from edgekit_toolkit.tflite.ops.sums import emit_reduction
from edgekit_toolkit.tflite.ops.windows import Windows
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step, fused
from edgekit_toolkit.tflite.view import Graph, Node


def _rule(node: Node, graph: Graph) -> Rule:
    rank = len(graph.shape(node.inputs[0]))
    if rank not in {3, 4}:
        raise RefusedError(f"pooling over {rank - 2} axes has no kernel in TFLite, over 1 and 2 it has")
    return spatial(node, graph)


@writes("MaxPool", rule=_rule, fuses=True)
def write_max_pool(step: Step) -> None:
    """Write MAX_POOL_2D."""
    if any(step.graph.is_read(name) for name in step.node.outputs[1:]):
        raise RefusedError("the places of the maxima (the second output) are not covered")
    found = _windows(step)
    if max(found.dilations) > 1:
        raise RefusedError(f"dilations {found.dilations} have no kernel in TFLite")
    tensor, padding = step.read(0), found.padding
    if padding is None:
        tensor, padding = pad_for_maxima(step, tensor, found), "VALID"
    fields = {**strides_of(found, padding), "filterHeight": found.kernel[0], "filterWidth": found.kernel[1]}
    options = Options("Pool2DOptions", {**fields, **fused(step.node.activation)})
    step.give(step.emit("MAX_POOL_2D", [tensor], step.held(), options))


@writes("AveragePool", rule=_rule)
def write_average_pool(step: Step) -> None:
    """Write AVERAGE_POOL_2D, which leaves SAME padding out of its averages.

    Other padding is added as zeros, and the averages are scaled where ONNX counts fewer elements.
    """
    found = _windows(step)
    if max(found.dilations) > 1:
        raise RefusedError(f"dilations {found.dilations} have no kernel in TFLite")
    counts_padding = bool(step.attribute("count_include_pad", 0))
    fields = {"filterHeight": found.kernel[0], "filterWidth": found.kernel[1]}
    if found.padding == "VALID" or (found.padding == "SAME" and not counts_padding):
        options = Options("Pool2DOptions", {**fields, **strides_of(found, found.padding)})
        step.give(step.emit("AVERAGE_POOL_2D", [step.read(0)], step.held(), options))
        return
    tensor = pad_spatial(step, step.read(0), found.pads)
    options = Options("Pool2DOptions", {**fields, **strides_of(found, "VALID")})
    result = step.emit("AVERAGE_POOL_2D", [tensor], step.held(), options)
    scale = found.kernel[0] * found.kernel[1] / _counts(step, found, counts_padding)
    if (scale != 1).any():
        factors = step.builder.constant(scale[None, :, :, None].astype(np.float32))
        result = step.binary("MUL", result, factors)
    step.give(result)


@writes("GlobalAveragePool", "GlobalMaxPool", rule=axiswise)
def write_global_pool(step: Step) -> None:
    """Write MEAN or REDUCE_MAX over all axes but batch and channels, for any form of the input."""
    axes = sorted(step.axis(axis) for axis in range(2, len(step.shape(0))))
    kind = "MEAN" if step.node.op_type == "GlobalAveragePool" else "REDUCE_MAX"
    step.give(emit_reduction(step, kind, step.read(0), axes))


def _windows(step: Step) -> Windows:
    return windows_of(step, step.attribute("kernel_shape"))


def _counts(step: Step, found: Windows, counts_padding: bool) -> NDArray[np.float64]:
    """Return how many elements ONNX divides by: float64 [rows, columns] of the result."""
    stated = attributes_of(step).pads
    rank = len(step.shape(0)) - 2
    per_axis = []
    for axis, size in enumerate(found.sizes):
        before, after = found.pads[axis]
        low, high = 0, size
        if counts_padding:  # but not elements that ceil_mode adds beyond it
            place = axis - len(found.sizes) + rank
            after = stated[place + rank] if stated and place >= 0 else after
            low, high = -before, size + after
        starts = [place * found.strides[axis] - before for place in range(found.outputs[axis])]
        ends = [start + found.kernel[axis] for start in starts]
        per_axis.append([min(end, high) - max(start, low) for start, end in zip(starts, ends, strict=True)])
    flat = [rows * columns for rows, columns in itertools.product(*per_axis)]
    return np.array(flat, np.float64).reshape(len(per_axis[0]), len(per_axis[1]))
