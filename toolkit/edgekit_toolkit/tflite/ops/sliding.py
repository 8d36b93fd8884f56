"""Windows of convolutions and pooling, and padding that TFLite's options do not cover."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.node_facts import NodeFacts
from edgekit_toolkit.tflite.ops.windows import Pads, WindowAttributes, Windows, windows
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph

PADDING_CODES = {"SAME": 0, "VALID": 1}
KEEPING_SIGNS = frozenset({"MaxPool", "AveragePool", "Transpose", "Reshape", "Identity", "Slice"})
SYMMETRIC = 1  # option of MIRROR_PAD: the elements at the border are copied too


def windows_of(step: Step, kernel: Sequence[int]) -> Windows:
    """Return the windows over the first input [N, C, spatial...], with at least two spatial axes.

    A 1-D input is treated as an image of height 1. `kernel` is the window size without dilation.

    Raises:
        RefusedError: The windows are not supported, see `windows`.
    """
    sliding = windows(step.shape(0)[2:], kernel, attributes_of(step), step.out_shape()[2:])
    if len(sliding.sizes) != 1:
        return sliding
    return Windows(
        sizes=(1, *sliding.sizes),
        kernel=(1, *sliding.kernel),
        strides=(1, *sliding.strides),
        dilations=(1, *sliding.dilations),
        outputs=(1, *sliding.outputs),
        pads=((0, 0), *sliding.pads),
    )


def attributes_of(node: NodeFacts) -> WindowAttributes:
    strides, dilations, pads = (node.attribute(name) for name in ("strides", "dilations", "pads"))
    return WindowAttributes(strides, dilations, pads, node.attribute("auto_pad", "NOTSET"))


def pad_spatial(step: Step, tensor: Tensor, pads: Pads) -> Tensor:
    """Return the tensor [N, spatial..., C], padded with zeros. Write no operator if all `pads` are 0."""
    if not any(before or after for before, after in pads):
        return tensor
    amounts, shape = _bordered(step, tensor, pads)
    return step.emit("PAD", [tensor, amounts], shape, Options("PadOptions"))


def pad_for_maxima(step: Step, tensor: Tensor, sliding: Windows) -> Tensor:
    """Return the tensor [N, spatial..., C] with padding that does not change the maximum of any window.

    Tensors without negative elements are padded with zeros. Other tensors are padded by reflection if no pad
    is larger than half of the undilated window or than the input. Otherwise, the padding is the lowest float,
    and the model should not be quantized later.
    """
    if is_never_negative(step.graph, step.node.inputs[0]):
        return pad_spatial(step, tensor, sliding.pads)
    amounts, shape = _bordered(step, tensor, sliding.pads)
    borders = zip(sliding.pads, sliding.kernel, sliding.sizes, strict=True)
    if all(2 * max(pads) <= kernel and max(pads) <= size for pads, kernel, size in borders):
        options = Options("MirrorPadOptions", {"mode": SYMMETRIC})
        return step.emit("MIRROR_PAD", [tensor, amounts], shape, options)
    lowest = step.number(float(np.finfo(np.float32).min))
    return step.emit("PADV2", [tensor, amounts, lowest], shape, Options("PadV2Options"))


def is_never_negative(graph: Graph, name: str) -> bool:
    """Return whether the nodes that compute the tensor `name` ensure that no element is negative."""
    while (node := graph.producers.get(name)) is not None:
        if node.activation in {"RELU", "RELU6"} or node.op_type in {
            "Relu",
            "Sigmoid",
            "HardSigmoid",
            "Softmax",
        }:
            return True
        if node.op_type == "Clip":
            low = graph.constants.get(node.input(1))
            return low is not None and bool((low >= 0).all())
        if node.op_type not in KEEPING_SIGNS:
            return False
        name = node.inputs[0]
    return False


def _bordered(step: Step, tensor: Tensor, pads: Pads) -> tuple[Tensor, list[int]]:
    """Return the amounts of padding as a constant, and the sizes with them."""
    amounts = np.array([(0, 0), *pads, (0, 0)], np.int32)
    shape = [size + int(row.sum()) for size, row in zip(tensor.shape, amounts, strict=True)]
    return step.builder.constant(amounts), shape


def padded(step: Step, tensor: Tensor, sliding: Windows) -> tuple[Tensor, str]:
    """Return a tensor and its padding option `SAME` or `VALID`.

    If neither option fits, return `tensor` padded with zeros, and `VALID`.
    """
    if sliding.padding is not None:
        return tensor, sliding.padding
    return pad_spatial(step, tensor, sliding.pads), "VALID"


def strides_of(sliding: Windows, padding: str) -> dict[str, Any]:
    """Return the stride and padding fields of 2-D windows. `padding` is `SAME` or `VALID`."""
    return {"padding": PADDING_CODES[padding], "strideH": sliding.strides[0], "strideW": sliding.strides[1]}
