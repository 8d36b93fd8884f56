"""Transposed convolutions in 1 and 2 dimensions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.forms import NEW, channels_last
from edgekit_toolkit.tflite.layout.rules import Rule
from edgekit_toolkit.tflite.ops.sliding import PADDING_CODES, attributes_of, pad_spatial
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node

# TFLite has no groups here: their weights become one matrix with zeros between the groups.
MAX_GROUPED_WEIGHTS = 1 << 22


def _rule(node: Node, graph: Graph) -> Rule:
    shape, result = graph.shape(node.inputs[0]), graph.shape(node.outputs[0])
    if len(shape) not in {3, 4}:
        raise RefusedError(
            f"a transposed convolution over {len(shape) - 2} axes is not covered, over 1 and 2 it is"
        )
    if len(result) != len(shape):  # onnx infers nothing for an output_shape below the input's
        raise RefusedError(f"the shape of its result is inferred as {list(result)}, for {list(shape)}")
    form = channels_last(len(shape))
    return Rule(form, shape, lambda _: (form,), lambda _: (form,))


@writes("ConvTranspose", rule=_rule)
def write_conv_transpose(step: Step) -> None:
    """Write TRANSPOSE_CONV with padding SAME if it equals the ONNX padding, else with VALID and a crop."""
    weights = _weights(step)  # [O, H, W, I]
    kernel = weights.shape[1:3]
    sizes, outputs = _image(step.shape(0)[2:]), _image(step.out_shape()[2:])
    strides = _image(step.attribute("strides") or [1] * (len(step.shape(0)) - 2))
    begins = _begin_pads(step)
    crops = (begins[0], begins[1]) if len(begins) == 2 else (0, begins[0])
    whole = tuple((n - 1) * s + k for n, s, k in zip(sizes, strides, kernel, strict=True))
    tensor = step.read(0)
    batch, channels = tensor.shape[0], weights.shape[0]
    same = tuple(max(w - o, 0) // 2 for w, o in zip(whole, outputs, strict=True))
    is_same = same == crops and all(
        -(-o // s) == n and w >= o for o, s, n, w in zip(outputs, strides, sizes, whole, strict=True)
    )
    shape = (batch, *(outputs if is_same else whole), channels)
    inputs = [
        step.numbers(shape),
        weights,
        tensor,
    ]
    fields: dict[str, Any] = {"strideH": strides[0], "strideW": strides[1]}
    fields["padding"] = PADDING_CODES["SAME" if is_same else "VALID"]
    result = step.emit(
        "TRANSPOSE_CONV", inputs, shape, Options("TransposeConvOptions", fields), dtype=tensor.dtype
    )
    if not is_same:
        result = _cropped(step, result, crops, (batch, *outputs, channels))
    step.give(step.binary("ADD", result, step.read(2, (0,))) if step.has(2) else result)


def _image(values: Any) -> tuple[int, int]:
    """Return the values of an image's two axes; a signal's value is that of the second axis."""
    sizes = tuple(int(value) for value in values)
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (1, sizes[0])


def _begin_pads(step: Step) -> list[int]:
    """Return how much is cut off at the begin of each axis, as ONNX defines it."""
    rank = len(step.shape(0)) - 2
    attributes = attributes_of(step)
    strides = attributes.strides or [1] * rank
    dilations = attributes.dilations or [1] * rank
    extra = step.attribute("output_padding") or [0] * rank
    begins = []
    for axis in range(rank):
        span = (step.shape(1)[2 + axis] - 1) * dilations[axis] + 1
        total = (
            strides[axis] * (step.shape(0)[2 + axis] - 1) + extra[axis] + span - step.out_shape()[2 + axis]
        )
        if step.attribute("output_shape") is not None or attributes.auto_pad in {"SAME_UPPER", "SAME_LOWER"}:
            total = max(total, 0)
            begins.append(total // 2 if attributes.auto_pad == "SAME_UPPER" else total - total // 2)
        else:
            begins.append(attributes.pads[axis] if attributes.pads else 0)
    if any(begin < 0 for begin in begins):
        raise RefusedError(f"pads {attributes.pads} are negative")
    return begins


def _cropped(step: Step, tensor: Tensor, begins: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Return rows and columns of the result from `begins` on; beyond its end they are zero."""
    missing = [
        max(begin + length - size, 0)
        for begin, length, size in zip(begins, shape[1:3], tensor.shape[1:3], strict=True)
    ]
    tensor = pad_spatial(step, tensor, ((0, missing[0]), (0, missing[1])))
    if tensor.shape == shape:
        return tensor
    inputs = [tensor, step.numbers([0, *begins, 0]), step.numbers(shape)]
    return step.emit("SLICE", inputs, shape, Options("SliceOptions"))


def _weights(step: Step) -> Tensor:
    """Return the weights [O, H, W, I] without groups and dilation."""
    is_plain = step.attribute("group", 1) == 1 and max(step.attribute("dilations") or [1]) == 1
    if step.value(1) is None and is_plain:
        return step.read(1, (1, NEW, 2, 0) if len(step.shape(1)) == 3 else (1, 2, 3, 0))
    dense = _dense_weights(step).transpose(1, 2, 3, 0)
    return step.builder.constant(np.ascontiguousarray(dense, np.float32))


def _dense_weights(step: Step) -> NDArray[np.float32]:
    """Return the weights [I, O, H, W] without groups and dilation.

    Raises:
        RefusedError: they are not constant, or become too large.
    """
    weights = step.constant(1, "the weights")
    weights = weights[:, :, None, :] if weights.ndim == 3 else weights
    groups = step.attribute("group", 1)
    inputs, outputs = weights.shape[:2]
    if groups > 1:
        if weights.size * groups > MAX_GROUPED_WEIGHTS:
            raise RefusedError(f"{groups} groups would need {weights.size * groups} weights without groups")
        dense = np.zeros((inputs, outputs * groups, *weights.shape[2:]), np.float32)
        for group in range(groups):
            rows = slice(group * inputs // groups, (group + 1) * inputs // groups)
            dense[rows, group * outputs : (group + 1) * outputs] = weights[rows]
        weights = dense
    dilations = _image(step.attribute("dilations") or [1] * (len(step.shape(0)) - 2))
    if max(dilations) > 1:
        spans = [(k - 1) * d + 1 for k, d in zip(weights.shape[2:], dilations, strict=True)]
        spread = np.zeros((*weights.shape[:2], *spans), np.float32)
        spread[:, :, :: dilations[0], :: dilations[1]] = weights
        weights = spread
    return weights
