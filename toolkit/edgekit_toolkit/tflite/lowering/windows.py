"""Replaces pooling operators that TFLite lacks, such as 3-D pooling, dilated pooling and LpPool."""

import numpy as np

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.ops.sliding import attributes_of
from edgekit_toolkit.tflite.ops.windows import Windows, windows
from edgekit_toolkit.tflite.refusal import RefusedError


def _windows(body: Body) -> Windows:
    kernel = body.attribute("kernel_shape")
    return windows(body.shape(0)[2:], kernel, attributes_of(body), body.out_shape()[2:])


def _has_kernel(body: Body) -> bool:
    is_dilated = max(body.attribute("dilations", None) or [1]) > 1
    return len(body.shape(0)) in {3, 4} and not is_dilated and body.input(0).dtype.kind == "f"


def _fold(tensor: Value, sliding: Windows, kind: str, border: float) -> Value:
    """Join the elements of each window by an operator of two tensors."""
    pads = [(0, 0), (0, 0), *sliding.pads]
    if np.any(pads):
        amounts = np.array([*(before for before, _ in pads), *(after for _, after in pads)])
        tensor = tensor.op("Pad", amounts, tensor.like(border))
    steps = zip(sliding.kernel, sliding.dilations, sliding.strides, sliding.outputs, strict=True)
    for axis, (kernel, dilation, stride, count) in enumerate(steps, start=2):
        begins = [tap * dilation for tap in range(kernel)]
        parts = [tensor.slice(axis, begin, begin + (count - 1) * stride + 1, stride) for begin in begins]
        tensor = parts[0]
        for part in parts[1:]:
            tensor = tensor.op(kind, part)
    return tensor


@lowers("MaxPool")
def _max_pool(body: Body) -> Value | None:
    if _has_kernel(body) or body.is_read(1):
        return None
    x = body.input(0)
    lowest = np.finfo(x.dtype).min if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    return _fold(x, _windows(body), "Max", lowest)


@lowers("AveragePool")
def _average_pool(body: Body) -> Value | None:
    if _has_kernel(body):
        return None
    sliding = _windows(body)
    counts = sliding.counts(attributes_of(body), counts_padding=bool(body.attribute("count_include_pad", 0)))
    return _fold(body.input(0), sliding, "Add", 0) / counts.astype(np.float32)


@lowers("LpPool")
def _lp_pool(body: Body) -> Value:
    power = float(body.attribute("p", 2))
    if body.input(0).dtype.kind != "f":
        raise RefusedError(f"it is covered for floating-point numbers, not for {body.input(0).dtype}")
    sums = _fold(body.input(0).op("Abs").op("Pow", power), _windows(body), "Add", 0)
    return sums.op("Pow", 1 / power)
