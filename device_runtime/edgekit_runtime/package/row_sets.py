"""Compares outputs whose number of rows depends on the data, as sets of rows.

The output of `NonZero`, or of a detector that drops overlapping boxes, has as many rows as there are results.
Rounding errors near a threshold can add, remove and reorder rows. Each row is therefore compared with the
nearest row of the reference, not with the row at the same position. For example:

    [[0, 0, 9, 9], [5, 5, 7, 7]] and [[5, 5, 7, 7.1]]    one pair of rows, and one row is missing
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array

Arrays: TypeAlias = Mapping[str, Array]

# Its square is finite.
_LARGEST: Final = 1e100
# Rows that are compared with one another at a time. Larger sets are sorted first. Then a missing row may take
# another's counterpart in each further block.
_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class AlignedRows:
    """Outputs whose rows have the same order as in the reference outputs.

    Attributes:
        outputs: Arrays with the shapes of the reference. A missing row is NaN, or 0 for integers.
        missing: A dict from output names to bool arrays, which are True for each row of the reference without
            a counterpart.
        extra: A dict from output names to the number of rows without a counterpart in the reference.
    """

    outputs: dict[str, Array]
    missing: dict[str, Array]
    extra: dict[str, int]


def row_axes(feeds: Sequence[Arrays], runs: Sequence[Arrays]) -> dict[str, int]:
    """Find the outputs whose number of rows depends on the data.

    The shape of such an output differs in exactly one axis between runs with the same input shapes. Runs with
    other input shapes than the first run are ignored. `feeds` holds the inputs of each run, and `runs` its
    outputs.

    Returns:
        A dict from the names of these outputs to the axis of their rows.
    """
    axes: dict[str, int] = {}
    sizes = [[array.shape for array in feed.values()] for feed in feeds]
    alike = [run for run, shapes in zip(runs, sizes, strict=True) if shapes == sizes[0]]
    for name in runs[0]:
        shapes = {run[name].shape for run in alike}
        if len({len(shape) for shape in shapes}) == 1:
            changing = [axis for axis, counts in enumerate(zip(*shapes, strict=True)) if len(set(counts)) > 1]
            axes |= {name: changing[0]} if len(changing) == 1 else {}
    return axes


def align_rows(outputs: Arrays, reference: Arrays, axes: Mapping[str, int]) -> AlignedRows:
    """Move each row of the outputs to the position of its counterpart in the reference.

    Outputs with the same number of rows, such as boxes, scores and classes, are matched together.

    Args:
        outputs: The outputs of a model. Only the number of rows may differ from the reference.
        reference: The outputs of another model.
        axes: A dict from the names of the outputs to align to the axis of their rows.
    """
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, axis in axes.items():
        groups[outputs[name].shape[axis], reference[name].shape[axis]].append(name)
    aligned = AlignedRows({}, {}, {})
    for (count, _), names in groups.items():
        positions = _pair(
            *(_columns((arrays[name], axes[name]) for name in names) for arrays in (outputs, reference))
        )
        missing = positions < 0
        for name in names:
            rows = np.moveaxis(outputs[name], axes[name], 0)
            blank = np.zeros((1, *rows.shape[1:]), rows.dtype)
            if rows.dtype.kind == "f":
                blank[:] = np.nan
            ordered = np.concatenate([rows, blank])[np.where(missing, count, positions)]
            aligned.outputs[name] = np.moveaxis(ordered, 0, axes[name])
            aligned.missing[name] = missing
            aligned.extra[name] = count - int(np.count_nonzero(~missing))
    return aligned


def row_similarity(outputs: Arrays, reference: Arrays, axes: Mapping[str, int]) -> dict[str, float]:
    """Return a dict from output names to the similarity of their rows to the reference, 0 to 1.

    The similarity is the mean score of the rows, or NaN if neither side has rows. For floats, a row scores
    1 - |difference| / |row of the reference| with Euclidean norms, at least 0. A row of integers scores 1 if
    it is equal, else 0. A row without a counterpart on the other side scores 0. The arguments are those of
    `align_rows`.
    """
    aligned = align_rows(outputs, reference, axes)
    scores = {}
    for name, axis in axes.items():
        expected, actual = (
            np.moveaxis(values, axis, 0) for values in (reference[name], aligned.outputs[name])
        )
        expected, actual = (
            values.reshape(len(values), math.prod(values.shape[1:])) for values in (expected, actual)
        )
        if expected.dtype.kind == "f":
            expected = expected.astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                error = np.where(actual == expected, 0.0, actual - expected)
                sizes = np.maximum(np.linalg.norm(expected, axis=1), 1e-12)
                rows = np.nan_to_num(np.clip(1 - np.linalg.norm(error, axis=1) / sizes, 0, 1), nan=0.0)
        else:
            rows = (actual == expected).all(axis=1) & ~aligned.missing[name]
        count = len(expected) + aligned.extra[name]
        scores[name] = float(rows.sum()) / count if count else math.nan
    return scores


def compare_numbers(current: Array, candidate: Array) -> float:
    """Return the similarity of two arrays of equal shape, 0 to 1.

    It is 1 - |candidate - current| / |current| with Euclidean norms, at least 0, and 0 if a value is NaN.
    """
    expected = current.reshape(-1).astype(np.float64)
    error = np.linalg.norm(candidate.reshape(-1).astype(np.float64) - expected)
    return max(0.0, 1.0 - float(error / max(np.linalg.norm(expected), 1e-12)))


def _columns(outputs: Iterable[tuple[Array, int]]) -> Array:
    """Return all values of each row, float64 [rows, values], finite for distances."""
    rows = [np.moveaxis(values, axis, 0) for values, axis in outputs]
    columns = np.concatenate([row.reshape(len(row), math.prod(row.shape[1:])) for row in rows], axis=1)
    return np.nan_to_num(columns.astype(np.float64)).clip(-_LARGEST, _LARGEST)


def _pair(rows: Array, reference: Array) -> Array:
    """Return for each row of the reference the position of its counterpart, -1 where there is none.

    Equal rows are paired first, then the nearest, each once. Columns count by their range in the reference.
    """
    positions = np.full(len(reference), -1, np.intp)
    if not len(rows) or not len(reference):
        return positions
    _pair_equal(rows, reference, positions)
    spans = np.ptp(reference, axis=0)
    spans[spans == 0] = 1.0
    ours, theirs = rows / spans, reference / spans
    unpaired = np.setdiff1d(np.arange(len(rows)), positions)
    unpaired = unpaired[np.argsort(ours[unpaired].sum(axis=1), kind="stable")]
    open_rows = np.flatnonzero(positions < 0)
    open_rows = open_rows[np.argsort(theirs[open_rows].sum(axis=1), kind="stable")]
    for begin in range(0, len(open_rows), _BLOCK):
        block = open_rows[begin : begin + _BLOCK]
        first, last = np.searchsorted(ours[unpaired].sum(axis=1), theirs[block[[0, -1]]].sum(axis=1))
        start = max(0, int(first) - _BLOCK)
        near = unpaired[start : min(int(last) + _BLOCK, start + 4 * _BLOCK)]
        _pair_nearest(ours, theirs, near=near, block=block, positions=positions)
        unpaired = unpaired[~np.isin(unpaired, positions[block])]
    return positions


def _pair_equal(rows: Array, reference: Array, positions: Array) -> None:
    """Pair equal rows, also those that occur several times."""
    _, codes = np.unique(np.concatenate([rows, reference]), axis=0, return_inverse=True)
    waiting = defaultdict(list)
    for row, code in enumerate(codes.reshape(-1)[: len(rows)].tolist()):
        waiting[code].append(row)
    for row, code in enumerate(codes.reshape(-1)[len(rows) :].tolist()):
        if waiting[code]:
            positions[row] = waiting[code].pop()


def _pair_nearest(ours: Array, theirs: Array, *, near: Array, block: Array, positions: Array) -> None:
    """Pair the rows `block` of the reference with the nearest of `near`, the closest pairs first."""
    if not len(near):
        return
    wanted_rows, other = theirs[block], ours[near]
    distances = (wanted_rows**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * wanted_rows @ other.T
    for row in np.argsort(distances.min(axis=1), kind="stable"):
        column = int(distances[row].argmin())
        if np.isfinite(distances[row, column]):
            positions[block[row]] = near[column]
            distances[:, column] = np.inf
