"""Pooling over windows, and global pooling."""

import math

import numpy as np

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
    if any(step.graph.is_read(name) for name in step.node.outputs[1:]):
        raise RefusedError("the places of the maxima (the second output) are not covered")
    sliding = _windows(step)
    if max(sliding.dilations) > 1:
        raise RefusedError(f"dilations {sliding.dilations} have no kernel in TFLite")
    tensor, padding = step.read(0), sliding.padding
    if padding is None:
        tensor, padding = pad_for_maxima(step, tensor, sliding), "VALID"
    fields = {
        **strides_of(sliding, padding),
        "filterHeight": sliding.kernel[0],
        "filterWidth": sliding.kernel[1],
    }
    options = Options("Pool2DOptions", {**fields, **fused(step.node.activation)})
    step.give(step.emit("MAX_POOL_2D", [tensor], step.held(), options))


@writes("AveragePool", rule=_rule)
def write_average_pool(step: Step) -> None:
    """Write AVERAGE_POOL_2D. A PAD with zeros is added if neither SAME nor VALID fits.

    TFLite includes the added zeros in its averages. A MUL corrects the averages if ONNX excludes the zeros.
    """
    sliding = _windows(step)
    if max(sliding.dilations) > 1:
        raise RefusedError(f"dilations {sliding.dilations} have no kernel in TFLite")
    counts_padding = bool(step.attribute("count_include_pad", 0))
    fields = {"filterHeight": sliding.kernel[0], "filterWidth": sliding.kernel[1]}
    if sliding.padding == "VALID" or (sliding.padding == "SAME" and not counts_padding):
        options = Options("Pool2DOptions", {**fields, **strides_of(sliding, sliding.padding)})
        step.give(step.emit("AVERAGE_POOL_2D", [step.read(0)], step.held(), options))
        return
    tensor = pad_spatial(step, step.read(0), sliding.pads)
    options = Options("Pool2DOptions", {**fields, **strides_of(sliding, "VALID")})
    result = step.emit("AVERAGE_POOL_2D", [tensor], step.held(), options)
    attributes = attributes_of(step)
    scale = math.prod(sliding.kernel) / sliding.counts(attributes, counts_padding=counts_padding)
    if (scale != 1).any():
        factors = step.builder.constant(scale[None, :, :, None].astype(np.float32))
        result = step.binary("MUL", result, factors)
    step.give(result)


@writes("GlobalAveragePool", "GlobalMaxPool", rule=axiswise)
def write_global_pool(step: Step) -> None:
    """Write MEAN or REDUCE_MAX over all axes except batch and channels."""
    axes = sorted(step.axis(axis) for axis in range(2, len(step.shape(0))))
    kind = "MEAN" if step.node.op_type == "GlobalAveragePool" else "REDUCE_MAX"
    step.give(emit_reduction(step, kind, step.read(0), axes))


def _windows(step: Step) -> Windows:
    return windows_of(step, step.attribute("kernel_shape"))
