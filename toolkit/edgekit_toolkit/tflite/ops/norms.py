"""Batch, instance and layer normalisation, and local response normalisation."""

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.forms import plain
from edgekit_toolkit.tflite.layout.rules import Rule, axiswise, spatial
from edgekit_toolkit.tflite.ops.sums import emit_reduction
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node


def _stored_statistics(node: Node, graph: Graph) -> Rule:
    if node.attributes.get("training_mode", 0):
        raise RefusedError("training_mode=1 computes statistics of the batch, which is not for inference")
    return axiswise(node, graph)


@writes("BatchNormalization", rule=_stored_statistics)
def write_batch_norm(step: Step) -> None:
    """Write x * scale + shift with two constants that are computed from the stored statistics."""
    names = ("the scale", "the bias", "the mean", "the variance")
    gain, bias, mean, variance = (
        step.constant(index, name).astype(np.float64) for index, name in enumerate(names, start=1)
    )
    scale = gain / np.sqrt(variance + step.attribute("epsilon", 1e-5))
    result = step.binary("MUL", step.read(0), _per_channel(step, scale))
    step.give(step.binary("ADD", result, _per_channel(step, bias - mean * scale)))


@writes("InstanceNormalization", rule=axiswise)
def write_instance_norm(step: Step) -> None:
    """Write the normalisation of each channel over its spatial axes."""
    axes = sorted(step.axis(axis) for axis in range(2, len(step.shape(0))))
    result = _normalized(step, step.read(0), axes, step.attribute("epsilon", 1e-5))
    result = step.binary("MUL", result, _per_channel(step, step.constant(1, "the scale")))
    step.give(step.binary("ADD", result, _per_channel(step, step.constant(2, "the bias"))))


def _over_last(node: Node, graph: Graph) -> Rule:
    if any(graph.is_read(name) for name in node.outputs[1:]):
        raise RefusedError("the statistics (the second and third output) are not covered")
    return axiswise(node, graph)


@writes("LayerNormalization", rule=_over_last)
def write_layer_norm(step: Step) -> None:
    """Write the normalisation over `axis` and all later axes."""
    rank = len(step.shape(0))
    first = step.attribute("axis", -1) % rank
    axes = sorted(step.axis(axis) for axis in range(first, rank))
    result = _normalized(step, step.read(0), axes, step.attribute("epsilon", 1e-5))
    result = step.binary("MUL", result, _aligned(step, 1))
    step.give(step.binary("ADD", result, _aligned(step, 2)) if step.has(2) else result)


def _spatial_rule(node: Node, graph: Graph) -> Rule:
    if len(graph.shape(node.inputs[0])) not in {3, 4}:
        raise RefusedError("it has a TFLite kernel for images [N, C, H, W] only")
    return spatial(node, graph)


@writes("LRN", rule=_spatial_rule)
def write_lrn(step: Step) -> None:
    """Write LOCAL_RESPONSE_NORMALIZATION. Its alpha is ONNX's alpha divided by the window size."""
    size = step.attribute("size")
    if size % 2 == 0:
        raise RefusedError(f"the window has an even size {size}; TFLite's are symmetric")
    fields = {
        "radius": (size - 1) // 2,
        "bias": step.attribute("bias", 1.0),
        "alpha": step.attribute("alpha", 1e-4) / size,
        "beta": step.attribute("beta", 0.75),
    }
    options = Options("LocalResponseNormalizationOptions", fields)
    step.give(step.emit("LOCAL_RESPONSE_NORMALIZATION", [step.read(0)], step.held(), options))


def _normalized(step: Step, tensor: Tensor, axes: list[int], epsilon: float) -> Tensor:
    centred = step.binary("SUB", tensor, emit_reduction(step, "MEAN", tensor, axes))
    variance = emit_reduction(step, "MEAN", step.binary("MUL", centred, centred), axes)
    raised = step.binary("ADD", variance, step.number(epsilon))
    return step.binary("MUL", centred, step.unary("RSQRT", raised))


def _per_channel(step: Step, values: np.typing.NDArray[np.floating]) -> Tensor:
    """Return a constant [C] as a tensor that is broadcast along the held channels."""
    channel_axis = step.axis(1)
    shape = (values.size, *[1] * (len(step.form) - channel_axis - 1))
    return step.builder.constant(values.astype(np.float32).reshape(shape))


def _aligned(step: Step, input_number: int) -> Tensor:
    """Return an input that ONNX aligns with the last axes, in the order of the held ones."""
    rank = len(step.shape(0))
    missing = rank - len(step.shape(input_number))
    form = tuple(axis - missing if axis >= missing else -1 for axis in step.form)
    return step.read(input_number, form) if missing else step.read(input_number, form or plain(rank))
