"""Elements by computed places: all of them become one gather or scatter over a list of rows."""

import math
from collections.abc import Sequence

import numpy as np

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.refusal import RefusedError


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _flat_places(body: Body, axis: int) -> Value:
    """Return for each element of the indices [...] its place in the flat data, int64 of their shape."""
    shape, places = body.shape(0), body.shape(1)
    strides = _strides(shape)
    grids = np.indices(places, np.int64)
    offsets = sum((grids[a] * strides[a] for a in range(len(shape)) if a != axis), np.zeros(places, np.int64))
    return body.input(1).cast(np.int64).op("Mod", shape[axis]) * strides[axis] + np.asarray(offsets)


@lowers("GatherElements")
def _gather_elements(body: Body) -> Value:
    return body.input(0).reshape(-1).op("Gather", _flat_places(body, body.axis(0)), axis=0)


@lowers("ScatterElements")
def _scatter_elements(body: Body) -> Value:
    places = _flat_places(body, body.axis(0)).reshape(-1, 1)
    updates = body.input(2).reshape(-1)
    reduction = body.attribute("reduction", "none")
    flat = body.input(0).reshape(-1).op("ScatterND", places, updates, reduction=reduction)
    return flat.reshape(*body.shape(0))


@lowers("GatherND")
def _gather_nd(body: Body) -> Value | None:
    """Write a gather of rows where places are computed or begin behind batch axes."""
    batches = body.attribute("batch_dims", 0)
    if not batches and body.value(1) is not None:
        return None
    shape, places = body.shape(0), body.shape(1)
    inner = shape[batches : batches + places[-1]]
    rows = math.prod(shape[: batches + places[-1]])
    indices = body.input(1).cast(np.int64).op("Mod", np.array(inner, np.int64))
    row = (indices * np.array(_strides(inner), np.int64)).sum(len(places) - 1).reshape(*places[:-1])
    batch = np.arange(math.prod(shape[:batches])).reshape(shape[:batches]) * math.prod(inner)
    row = row + batch.reshape(*shape[:batches], *[1] * (len(places) - 1 - batches))
    return body.input(0).reshape(rows, -1).op("Gather", row, axis=0).reshape(*body.out_shape())


@lowers("Col2Im")
def _col2im(body: Body) -> Value:
    """Add the columns [N, C * kernel, L] to the places of the image that they were taken from."""
    image, kernel = (body.constant(number, "a size").tolist() for number in (1, 2))
    rank = len(image)
    dilations, strides = (body.attribute(name, [1] * rank) for name in ("dilations", "strides"))
    pads = body.attribute("pads", [0] * (2 * rank))
    outputs = [
        (image[a] + pads[a] + pads[a + rank] - dilations[a] * (kernel[a] - 1) - 1) // strides[a] + 1
        for a in range(rank)
    ]
    grid = np.indices([*kernel, *outputs])
    padded = [image[a] + pads[a] + pads[a + rank] for a in range(rank)]
    place = [grid[a] * dilations[a] + grid[rank + a] * strides[a] for a in range(rank)]
    flat = np.ravel_multi_index(place, padded).reshape(-1, 1)
    channels = math.prod(body.out_shape()[:2])
    rows = body.input(0).reshape(channels, -1).transpose([1, 0])
    empty = body.stored(np.zeros((math.prod(padded), channels), np.float32))
    whole = empty.op("ScatterND", flat, rows, reduction="add").transpose([1, 0])
    result = whole.reshape(*body.out_shape()[:2], *padded)
    for axis in range(rank):
        result = result.slice(2 + axis, pads[axis], pads[axis] + image[axis])
    return result


@lowers("TensorScatter")
def _tensor_scatter(body: Body) -> Value:
    """Write new rows into a cache [B, ..., T, D], from a computed place of each batch."""
    shape, updates = body.shape(0), body.shape(1)
    axis = body.axis(-2)
    if body.attribute("mode", "linear") not in {"linear", "circular"}:
        raise RefusedError(f"mode '{body.attribute('mode')}' is not covered, linear and circular are")
    columns = [1] * (len(shape) - axis - 1)
    begin = (
        body.input(2).cast(np.int64).reshape(-1, *[1] * (len(shape) - 1))
        if body.has(2)
        else body.stored(np.zeros([1] * len(shape), np.int64))
    )
    source = (-begin + np.arange(shape[axis]).reshape(-1, *columns)).op("Mod", shape[axis])
    is_new = source.less(updates[axis])
    # Each place of the cache takes the row of the updates that belongs there, if there is one.
    spread = np.broadcast_to(np.zeros(1, np.int64), (*updates[:axis], shape[axis], *updates[axis + 1 :]))
    rows = is_new.where(source, 0) + spread
    return is_new.where(body.op("GatherElements", body.input(1), rows, axis=axis), body.input(0))
