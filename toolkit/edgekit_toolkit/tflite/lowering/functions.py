"""Functions of elements: trigonometry, hyperbolas, norms, what is chosen by its place or by a condition."""

import numpy as np

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.refusal import RefusedError


def _root(value: Value) -> Value:
    return value.op("Sqrt")


@lowers("Tan")
def _tan(body: Body) -> Value:
    return body.input(0).op("Sin") / body.input(0).op("Cos")


@lowers("Asin")
def _asin(body: Body) -> Value:
    x = body.input(0)
    return (x / _root(-(x * x) + 1)).op("Atan")


@lowers("Acos")
def _acos(body: Body) -> Value:
    return -_asin(body) + np.pi / 2


@lowers("Sinh")
def _sinh(body: Body) -> Value:
    x = body.input(0)
    return (x.op("Exp") - (-x).op("Exp")) * 0.5


@lowers("Cosh")
def _cosh(body: Body) -> Value:
    x = body.input(0)
    return (x.op("Exp") + (-x).op("Exp")) * 0.5


@lowers("Asinh")
def _asinh(body: Body) -> Value:
    x, size = body.input(0), body.input(0).op("Abs")  # of a negative number the sum would cancel
    return (size + _root(size * size + 1)).op("Log") * x.op("Sign")


@lowers("Acosh")
def _acosh(body: Body) -> Value:
    x = body.input(0)
    return (x + _root(x * x - 1)).op("Log")


@lowers("Atanh")
def _atanh(body: Body) -> Value:
    x = body.input(0)
    return ((x + 1) / (-x + 1)).op("Log") * 0.5


@lowers("IsInf")
def _is_inf(body: Body) -> Value:
    x = body.input(0)
    if not body.attribute("detect_negative", 1):
        return x.equals(np.inf)
    return (x if not body.attribute("detect_positive", 1) else -(x.op("Abs"))).equals(-np.inf)


@lowers("BitwiseNot")
def _bitwise_not(body: Body) -> Value:
    x = body.input(0)
    ones = -1 if x.dtype.kind == "i" else int(np.iinfo(x.dtype).max)
    return (-x.cast(np.int64) + ones).cast(x.dtype)


@lowers("LpNormalization")
def _l1_normalization(body: Body) -> Value | None:
    if body.attribute("p", 2) != 1:
        return None
    x = body.input(0)
    sums = x.op("Abs").sum(body.axis(-1))
    return x / sums.op("Max", float(np.finfo(np.float32).tiny))


@lowers("ArgMax", "ArgMin")
def _last_extreme(body: Body) -> Value | None:
    """Take the first of equal elements of the reversed input."""
    if not body.attribute("select_last_index", 0):
        return None
    axis = body.axis(0)
    size = body.shape(0)[axis]
    backwards = body.input(0).op("Gather", np.arange(size)[::-1].copy(), axis=axis)
    keep = body.attribute("keepdims", 1)
    place = body.op(body.node.op_type, backwards, dtype=np.int64, axis=axis, keepdims=keep)
    return -place + (size - 1)


@lowers("Hardmax")
def _hardmax(body: Body) -> Value:
    axis, x = body.axis(-1), body.input(0)
    place = body.op("ArgMax", x, dtype=np.int64, axis=axis, keepdims=1)
    places = np.arange(body.shape(0)[axis]).reshape(-1, *[1] * (len(body.shape(0)) - axis - 1))
    return place.equals(places).cast(x.dtype)


@lowers("OneHot")
def _one_hot(body: Body) -> Value:
    depth, rank = int(body.constant(1, "the depth").reshape(())), len(body.shape(0)) + 1
    axis = int(body.attribute("axis", -1)) % rank
    index = body.input(0).cast(np.int64)
    index = index.less(0).where(index + depth, index)
    index = index.op("Unsqueeze", np.array([axis]))
    chosen = index.equals(np.arange(depth).reshape(-1, *[1] * (rank - axis - 1)))
    off, on = (body.input(2).slice(0, place, place + 1).reshape() for place in (0, 1))
    return chosen.where(on, off)


@lowers("EyeLike")
def _eye_like(body: Body) -> Value:
    rows, columns = body.shape(0)
    dtype = body.graph.dtype(body.node.outputs[0])
    return body.stored(np.eye(rows, columns, body.attribute("k", 0), dtype=dtype))


@lowers("Trilu")
def _computed_trilu(body: Body) -> Value | None:
    """Compare the places of rows and columns where the diagonal is computed."""
    if not body.has(1) or body.value(1) is not None:
        return None
    rows, columns = (np.arange(size) for size in body.shape(0)[-2:])
    x, diagonal = body.input(0), body.input(1).reshape()
    above = body.stored(columns[None, :] - rows[:, None])
    is_beyond = above.less(diagonal) if body.attribute("upper", 1) else diagonal.less(above)
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
