"""Replaces interpolation in images: Resize by matrix products, and GridSample by a weighted gather."""

import itertools
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.ops.resize import bilinear_sampling, places, scale_of
from edgekit_toolkit.tflite.refusal import RefusedError

# A resize is a dense matrix for each axis. Larger ones would make files and times that nobody wants.
MAX_MATRIX_ELEMENTS: Final = 1 << 22


def _cubic(distance: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    """Return the weight of an element at a distance. Source: R. Keys, Cubic convolution, 1981."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


@lowers("Resize")
def _resize(body: Body) -> Value | None:
    """Write a matrix product for each axis that is resized, where no kernel samples at the same places."""
    rank, is_image = len(body.shape(0)), body.shape(0)[:2] == body.out_shape()[:2]
    if body.attribute("mode", "nearest") == "nearest":
        return None
    if rank in {3, 4} and is_image and bilinear_sampling(body.node, body.graph) is not None:
        return None
    result = body.input(0)
    for axis, (size, length) in enumerate(zip(body.shape(0), body.out_shape(), strict=True)):
        matrix = _resize_matrix(body, axis, size, length)
        if not np.array_equal(matrix, np.eye(size, length)):
            order = [*(other for other in range(rank) if other != axis), axis]
            product = result.transpose(order).op("MatMul", matrix.astype(np.float32))
            result = product.transpose(np.argsort(order).tolist())
    return result


def _resize_matrix(body: Body, axis: int, size: int, length: int) -> NDArray[np.float64]:
    """Return the weight of each of `size` elements in each of `length` results: [size, length].

    Source: ONNX operators, Resize; its antialiasing stretches the kernel by the inverse of the scale.
    """
    if size * length > MAX_MATRIX_ELEMENTS:
        raise RefusedError(f"the matrix of {size} x {length} weights that resizes an axis is too large")
    centres = places(body.node, body.graph, axis)
    stretch = min(scale_of(body.node, body.graph, axis), 1.0) if body.attribute("antialias", 0) else 1.0
    reach = math.ceil(2 / stretch) + 1
    taps = np.floor(centres)[:, None] + np.arange(1 - reach, reach + 1)
    distance = (taps - centres[:, None]) * stretch
    if body.attribute("mode", "nearest") == "cubic":
        weights = _cubic(distance, body.attribute("cubic_coeff_a", -0.75))
    else:
        weights = np.maximum(1 - np.abs(distance), 0)
    if body.attribute("exclude_outside", 0):
        weights = np.where((taps >= 0) & (taps < size), weights, 0)
    weights /= weights.sum(1, keepdims=True)
    matrix = np.zeros((size, length))
    columns = np.broadcast_to(np.arange(length)[:, None], taps.shape)
    np.add.at(matrix, (np.clip(taps, 0, size - 1).astype(int), columns), weights)
    return matrix


@lowers("GridSample")
def _grid_sample(body: Body) -> Value:
    """Gather the neighbours of each place in the grid [N, ..., axes], and weigh them."""
    shape, outputs = body.shape(0), body.out_shape()
    sizes, batch, channels = shape[2:], shape[0], shape[1]
    mode = body.attribute("mode", "linear").removeprefix("bi")
    axes = [_AxisSampler(body, axis, size, mode) for axis, size in enumerate(sizes)]
    rank = len(sizes)
    flat = body.input(0).transpose([0, *range(2, 2 + rank), 1]).reshape(batch * math.prod(sizes), channels)
    batches = np.arange(batch, dtype=np.float32).reshape(-1, *[1] * rank) * math.prod(sizes)
    total: Value | None = None
    for choice in itertools.product(*(axis.taps for axis in axes)):
        row: Value | None = None
        weight: Value | None = None
        for size, (position, axis_weight) in zip(sizes, choice, strict=True):
            row = position if row is None else row * float(size) + position
            weight = axis_weight if weight is None else weight * axis_weight
        assert row is not None and weight is not None  # noqa: S101 - a grid has axes
        sampled = flat.op("Gather", (row + batches).cast(np.int64), axis=0)
        weighted = sampled * weight.reshape(batch, *outputs[2:], 1)
        total = weighted if total is None else total + weighted
    assert total is not None  # noqa: S101 - each axis has taps
    return total.transpose([0, rank + 1, *range(1, rank + 1)])


class _AxisSampler:
    """The neighbours along one axis.

    Attributes:
        taps: place and weight of each, both float32 [N, ...]; places lie inside the image.
    """

    def __init__(self, body: Body, axis: int, size: int, mode: str) -> None:
        self._size, self._mode = size, body.attribute("padding_mode", "zeros")
        self._aligned = bool(body.attribute("align_corners", 0))
        rank = len(body.shape(0)) - 2
        column = rank - 1 - axis  # the grid lists x before y
        sizes = body.shape(1)[:-1]
        grid = body.input(1).slice(rank + 1, column, column + 1).reshape(*sizes).cast(np.float32)
        position = (grid + 1) * ((size - 1) / 2) if self._aligned else ((grid + 1) * size - 1) * 0.5
        if mode in {"linear", "nearest"}:
            position = self._bordered(position)
        if mode == "nearest":
            self.taps = [self._tap(position.op("Round"), None)]
            return
        first = position.op("Floor")
        fraction = position - first
        if mode == "linear":
            weights = [-fraction + 1, fraction]
            self.taps = [self._tap(first + n, weight) for n, weight in enumerate(weights)]
        else:
            weights = [_cubic_weight(fraction, n) for n in (-1, 0, 1, 2)]
            self.taps = [self._tap(first + (n - 1), weight) for n, weight in enumerate(weights)]

    def _tap(self, position: Value, weight: Value | None) -> tuple[Value, Value]:
        inside = self._bordered(position)
        clipped = _clip(inside, 0, self._size - 1)
        if self._mode == "zeros":
            is_inside = clipped.equals(position).cast(np.float32)
            return clipped, is_inside if weight is None else weight * is_inside
        weights = (clipped * 0) + 1 if weight is None else weight
        return clipped, weights

    def _bordered(self, position: Value) -> Value:
        """Return places beyond the image as the padding defines them."""
        if self._mode == "border":
            return _clip(position, 0, self._size - 1)
        if self._mode != "reflection":
            return position
        low = 0.0 if self._aligned else -0.5
        span = self._size - 1 if self._aligned else self._size
        if span == 0:
            return position * 0
        # A wave over the image and back: |((x - low + span) mod 2 span) - span| + low
        shifted = position - (low - span)
        remainder = shifted - (shifted / (2.0 * span)).op("Floor") * (2.0 * span)
        return (remainder - span).op("Abs") + low


def _clip(value: Value, low: float, high: float) -> Value:
    return value.op("Clip", np.asarray(low, np.float32), np.asarray(high, np.float32))


def _cubic_weight(fraction: Value, tap: int) -> Value:
    """Return the weight of the element `tap` places from the one below, with a = -0.75."""
    a = -0.75
    distance = (fraction - tap).op("Abs")
    if tap in {0, 1}:
        return (distance * (a + 2) - (a + 3)) * distance * distance + 1
    return ((distance * a - 5 * a) * distance + 8 * a) * distance - 4 * a
