"""Replaces quantized operators by floating-point operators with the same results.

The products of quantized values and their sums are integers. float32 represents integers up to 2^24 exactly,
so the results are rounded to the same values as in onnxruntime.
"""

from typing import Any

import numpy as np

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.refusal import RefusedError

_CODES = frozenset({"int8", "uint8", "int16", "uint16", "int32"})


def _check(body: Body, *dtypes: "np.dtype[Any]") -> None:
    for dtype in dtypes:
        if dtype.name not in _CODES:
            raise RefusedError(f"codes of {dtype} are not covered, only {', '.join(sorted(_CODES))}")
    if body.attribute("block_size", 0):
        raise RefusedError("scales of blocks are not covered, of tensors and of one axis they are")


def _spread(body: Body, number: int, rank: int, axis: int) -> Value:
    """Return a scale or zero point in float32, broadcast along `axis` of a tensor of `rank` axes."""
    value, sizes = body.input(number).cast(np.float32), body.shape(number)
    if len(sizes) != 1:
        return value
    return value.reshape(-1, *[1] * (rank - axis % rank - 1)) if sizes[0] > 1 else value.reshape()


def _to_codes(value: Value, zero_point: "Value | None", dtype: "np.dtype[Any]") -> Value:
    """Round to whole numbers, halves to even ones; shift and saturate."""
    rounded = value.op("Round")
    shifted = rounded if zero_point is None else rounded + zero_point
    info = np.iinfo(dtype)
    low, high = np.asarray(info.min, np.float32), np.asarray(info.max, np.float32)
    return shifted.op("Clip", low, high).cast(dtype)


@lowers("QuantizeLinear")
def _quantize(body: Body) -> Value:
    dtype = body.graph.dtype(body.node.outputs[0])
    _check(body, dtype)
    rank, axis = len(body.shape(0)), body.attribute("axis", 1)
    zero_point = _spread(body, 2, rank, axis) if body.has(2) else None
    return _to_codes(body.input(0).cast(np.float32) / _spread(body, 1, rank, axis), zero_point, dtype)


@lowers("DequantizeLinear")
def _dequantize(body: Body) -> Value:
    rank, axis = len(body.shape(0)), body.attribute("axis", 1)
    codes = _shifted(body, 0, 2, axis)
    return (codes * _spread(body, 1, rank, axis)).cast(body.graph.dtype(body.node.outputs[0]))


def _shifted(body: Body, number: int, zero_point: int, axis: int) -> Value:
    """Return codes less their zero point, in float32; several zero points lie along `axis`."""
    codes = body.input(number)
    _check(body, codes.dtype)
    if not body.has(zero_point):
        return codes.cast(np.float32)
    return codes.cast(np.float32) - _spread(body, zero_point, len(body.shape(number)), axis)


@lowers("MatMulInteger")
def _matmul_integer(body: Body) -> Value:
    return _shifted(body, 0, 2, -2).op("MatMul", _shifted(body, 1, 3, -1)).cast(np.int32)


@lowers("ConvInteger")
def _conv_integer(body: Body) -> Value:
    attributes = dict(body.node.attributes)
    return _shifted(body, 0, 2, 1).op("Conv", _shifted(body, 1, 3, 0), **attributes).cast(np.int32)


@lowers("QLinearMatMul")
def _qlinear_matmul(body: Body) -> Value:
    product = _shifted(body, 0, 2, -2).op("MatMul", _shifted(body, 3, 5, -1))
    rank = len(body.out_shape())
    scale = _spread(body, 1, rank, -2) * _spread(body, 4, rank, -1) / _spread(body, 6, rank, -2)
    return _to_codes(product * scale, _spread(body, 7, rank, -2), body.input(7).dtype)


@lowers("QLinearConv")
def _qlinear_conv(body: Body) -> Value:
    rank = len(body.shape(0))
    sums = _shifted(body, 0, 2, 1).op("Conv", _shifted(body, 3, 5, 0), **dict(body.node.attributes))
    if body.has(8):
        sums = sums + body.input(8).cast(np.float32).reshape(-1, *[1] * (rank - 2))
    scale = _spread(body, 1, rank, 1) * _spread(body, 4, rank, 1) / _spread(body, 6, rank, 1)
    return _to_codes(sums * scale, _spread(body, 7, rank, 1), body.input(7).dtype)
