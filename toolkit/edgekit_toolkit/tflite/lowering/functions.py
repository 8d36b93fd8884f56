"""Replaces functions such as Asin, Celu, Mish, norms, OneHot and Hardmax by simpler operators."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.ops.reduce import reduced_axes
from edgekit_toolkit.tflite.refusal import RefusedError


def _root(value: Value) -> Value:
    return value.op("Sqrt")


def _asin(x: Value) -> Value:
    return (x / _root(-(x * x) + 1)).op("Atan")


def _asinh(x: Value) -> Value:
    size = x.op("Abs")  # of a negative number the sum would cancel
    return (size + _root(size * size + 1)).op("Log") * x.op("Sign")


_FORMULAS: Final[Mapping[str, Callable[[Value], Value]]] = {
    "Acos": lambda x: -_asin(x) + np.pi / 2,
    "Acosh": lambda x: (x + _root(x * x - 1)).op("Log"),
    "Asin": _asin,
    "Asinh": _asinh,
    "Atanh": lambda x: ((x + 1) / (-x + 1)).op("Log") * 0.5,
    "Cosh": lambda x: (x.op("Exp") + (-x).op("Exp")) * 0.5,
    "IsNaN": lambda x: x.equals(x).op("Not"),
    "Sinh": lambda x: (x.op("Exp") - (-x).op("Exp")) * 0.5,
    "Softsign": lambda x: x / (x.op("Abs") + 1),
    "Tan": lambda x: x.op("Sin") / x.op("Cos"),
}


@lowers(*_FORMULAS)
def _formula(body: Body) -> Value:
    return _FORMULAS[body.node.op_type](body.input(0))


@lowers("IsInf")
def _is_inf(body: Body) -> Value:
    x = body.input(0)
    if not body.attribute("detect_negative", 1):
        return x.equals(np.inf)
    return (x if not body.attribute("detect_positive", 1) else -(x.op("Abs"))).equals(-np.inf)


@lowers("BitwiseNot")
def _bitwise_not(body: Body) -> Value:
    x = body.input(0)
    all_ones = -1 if x.dtype.kind == "i" else int(np.iinfo(x.dtype).max)
    return (-x.cast(np.int64) + all_ones).cast(x.dtype)


@lowers("Reciprocal")
def _reciprocal(body: Body) -> Value:
    x = body.input(0)
    return body.stored(np.ones((), x.dtype)) / x


@lowers("Elu", "Selu")
def _scaled_elu(body: Body) -> Value | None:
    """Write gamma * (relu(x) + alpha * min(elu(x), 0))."""
    is_elu = body.node.op_type == "Elu"
    alpha = float(body.attribute("alpha", 1.0 if is_elu else 1.67326319217681884765625))
    gamma = 1.0 if is_elu else float(body.attribute("gamma", 1.05070102214813232421875))
    if is_elu and alpha == 1:
        return None
    x = body.input(0)
    low = x.op("Elu", alpha=1.0).op("Min", 0.0) * (alpha * gamma)
    return x.op("Relu") * gamma + low


@lowers("Celu")
def _celu(body: Body) -> Value:
    alpha, x = float(body.attribute("alpha", 1.0)), body.input(0)
    return x.op("Relu") + (x / alpha).op("Elu", alpha=1.0).op("Min", 0.0) * alpha


@lowers("Softplus", "Mish")
def _softplus(body: Body) -> Value:
    """Write relu(x) + log(1 + exp(-|x|)), which does not overflow; Mish is x * tanh of it."""
    x = body.input(0)
    result = ((-x.op("Abs")).op("Exp") + 1).op("Log") + x.op("Relu")
    return x * result.op("Tanh") if body.node.op_type == "Mish" else result


@lowers("Swish")
def _swish(body: Body) -> Value:
    x, alpha = body.input(0), float(body.attribute("alpha", 1.0))
    return x * (x if alpha == 1 else x * alpha).op("Sigmoid")


@lowers("RMSNormalization")
def _rms_normalization(body: Body) -> Value:
    """Write x / sqrt(mean(x^2) + epsilon) over `axis` and all later axes."""
    x = body.input(0)
    mean = (x * x).mean(*range(body.axis(-1), len(body.shape(0))))
    return x / _root(mean + body.attribute("epsilon", 1e-5)) * body.input(1)


@lowers("LpNormalization")
def _lp_normalization(body: Body) -> Value:
    """Write x / |x| along one axis; 0 where the norm is 0."""
    x, is_sum = body.input(0), body.attribute("p", 2) == 1
    sums = (x.op("Abs") if is_sum else x * x).sum(body.axis(-1))
    sums = sums.op("Max", float(np.finfo(np.float32).tiny))
    return x / (sums if is_sum else _root(sums))


@lowers("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare")
def _reduction_of_a_function(body: Body) -> Value:
    """Write the sum with what comes before and after it; the largest element keeps exponentials finite."""
    kind, x = body.node.op_type, body.input(0)
    axes = reduced_axes(body.node, body.graph)
    if kind == "ReduceLogSumExp":
        largest = x.max(*axes) if axes else x
        result = (x - largest).op("Exp").sum(*axes).op("Log") + largest
    elif kind in {"ReduceL1", "ReduceLogSum"}:
        result = x.op("Abs").sum(*axes) if kind == "ReduceL1" else x.sum(*axes).op("Log")
    else:
        result = (x * x).sum(*axes)
        result = _root(result) if kind == "ReduceL2" else result
    return result.reshape(*body.out_shape())


@lowers("ArgMax", "ArgMin")
def _last_extreme(body: Body) -> Value | None:
    """Take the first of equal elements of the reversed input."""
    if not body.attribute("select_last_index", 0):
        return None
    axis = body.axis(0)
    size = body.shape(0)[axis]
    backwards = body.input(0).op("Gather", np.arange(size)[::-1].copy(), axis=axis)
    keep = body.attribute("keepdims", 1)
    index = body.op(body.node.op_type, backwards, dtype=np.int64, axis=axis, keepdims=keep)
    return -index + (size - 1)


@lowers("Hardmax")
def _hardmax(body: Body) -> Value:
    axis, x = body.axis(-1), body.input(0)
    index = body.op("ArgMax", x, dtype=np.int64, axis=axis, keepdims=1)
    indices = np.arange(body.shape(0)[axis]).reshape(-1, *[1] * (len(body.shape(0)) - axis - 1))
    return index.equals(indices).cast(x.dtype)


@lowers("OneHot")
def _one_hot(body: Body) -> Value:
    depth, rank = int(body.constant(1, "the depth").reshape(())), len(body.shape(0)) + 1
    axis = int(body.attribute("axis", -1)) % rank
    index = body.input(0).cast(np.int64)
    index = index.less(0).where(index + depth, index)
    index = index.op("Unsqueeze", np.array([axis]))
    chosen = index.equals(np.arange(depth).reshape(-1, *[1] * (rank - axis - 1)))
    off, on = (body.input(2).slice(0, index, index + 1).reshape() for index in (0, 1))
    return chosen.where(on, off)


@lowers("EyeLike")
def _eye_like(body: Body) -> Value:
    rows, columns = body.shape(0)
    dtype = body.graph.dtype(body.node.outputs[0])
    return body.stored(np.eye(rows, columns, body.attribute("k", 0), dtype=dtype))


@lowers("Trilu")
def _trilu(body: Body) -> Value:
    """Write the choice between the input and zeros by the places of rows and columns."""
    rows, columns = (np.arange(size) for size in body.shape(0)[-2:])
    diagonal = body.input(1).reshape() if body.has(1) else body.stored(np.array(0))
    x, distance = body.input(0), body.stored(columns[None, :] - rows[:, None])
    is_beyond = distance.less(diagonal) if body.attribute("upper", 1) else diagonal.less(distance)
    return is_beyond.where(0, x)


@lowers("Pow")
def _whole_power(body: Body) -> Value | None:
    """Compute a power of whole numbers in int32 where base and exponent are of that type."""
    base, exponent = body.input(0), body.input(1)
    if base.dtype.kind == "f" or (base.dtype == exponent.dtype == np.int32):
        return None
    if base.dtype.kind != "i" or exponent.dtype.kind != "i":
        raise RefusedError(f"{base.dtype} to the power of {exponent.dtype} has no kernel in TFLite")
    return base.cast(np.int32).op("Pow", exponent.cast(np.int32)).cast(base.dtype)
