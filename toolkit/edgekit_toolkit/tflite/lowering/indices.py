"""Replaces GatherElements, ScatterElements and GatherND by a gather or scatter of rows."""

import math
from collections.abc import Sequence

import numpy as np

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _flat_places(body: Body, axis: int) -> Value:
    """Return for each element of the indices [...] its place in the flat data, int64 of their shape."""
    shape, index_shape = body.shape(0), body.shape(1)
    strides = _strides(shape)
    grids = np.indices(index_shape, np.int64)
    offsets = sum(
        (grids[a] * strides[a] for a in range(len(shape)) if a != axis), np.zeros(index_shape, np.int64)
    )
    return body.input(1).cast(np.int64).op("Mod", shape[axis]) * strides[axis] + np.asarray(offsets)


@lowers("GatherElements")
def _gather_elements(body: Body) -> Value:
    return body.input(0).reshape(-1).op("Gather", _flat_places(body, body.axis(0)), axis=0)


@lowers("ScatterElements")
def _scatter_elements(body: Body) -> Value:
    positions = _flat_places(body, body.axis(0)).reshape(-1, 1)
    updates = body.input(2).reshape(-1)
    reduction = body.attribute("reduction", "none")
    flat = body.input(0).reshape(-1).op("ScatterND", positions, updates, reduction=reduction)
    return flat.reshape(*body.shape(0))


@lowers("GatherND")
def _gather_nd(body: Body) -> Value:
    batches = body.attribute("batch_dims", 0)
    shape, index_shape = body.shape(0), body.shape(1)
    inner = shape[batches : batches + index_shape[-1]]
    rows = math.prod(shape[: batches + index_shape[-1]])
    indices = body.input(1).cast(np.int64).op("Mod", np.array(inner, np.int64))
    row = (indices * np.array(_strides(inner), np.int64)).sum(len(index_shape) - 1).reshape(*index_shape[:-1])
    batch = np.arange(math.prod(shape[:batches])).reshape(shape[:batches]) * math.prod(inner)
    row = row + batch.reshape(*shape[:batches], *[1] * (len(index_shape) - 1 - batches))
    return body.input(0).reshape(rows, -1).op("Gather", row, axis=0).reshape(*body.out_shape())
