"""How far two answers to the same picture or sound agree: for canary and shadow of pipelines.

    [car, person] and [car, dog], each box over its counterpart     0.5: one of two pairs

Which boxes are of one thing is said at `compare_answers`.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.tasks.boxes import find_overlaps
from edgekit_runtime.tasks.task import Decoded
from edgekit_runtime.tensors import Array

_MIN_OVERLAP: Final = 0.5  # intersection over union at which two boxes are of one thing
_MAX_BOXES: Final = 100  # the best of each answer are compared


def compare_answers(current: Decoded, candidate: Decoded) -> float:
    """Return the agreement of two answers, 0..1: the mean over their lists of entries and inner answers.

    Entries with boxes agree in pairs of one label whose boxes overlap by half; of other lists, the best
    entries agree or not. Inner answers of a pair count with it. Numbers agree as `compare_numbers` says, and
    anything else if it is equal.
    """
    parts = [_compare(current.get(name), candidate.get(name)) for name in sorted({*current, *candidate})]
    return sum(parts) / len(parts) if parts else 1.0


def compare_numbers(current: Array, candidate: Array) -> float:
    """Return 1 - |difference| / |current| of two arrays of one shape, at least 0; 0 with NaN."""
    expected = current.reshape(-1).astype(np.float64)
    error = np.linalg.norm(candidate.reshape(-1).astype(np.float64) - expected)
    return max(0.0, 1.0 - float(error / max(np.linalg.norm(expected), 1e-12)))


def _compare(current: Any, candidate: Any) -> float:
    if isinstance(current, dict) and isinstance(candidate, dict):
        return compare_answers(current, candidate)
    if not (_are_entries(current) and _are_entries(candidate)):
        numbers = _read_numbers(current), _read_numbers(candidate)
        if numbers[0] is None or numbers[1] is None or numbers[0].shape != numbers[1].shape:
            return float(current == candidate)
        return compare_numbers(numbers[0], numbers[1])
    if not current or not candidate:
        return float(not current and not candidate)
    if all("value" in entry for entry in (*current, *candidate)):  # of a regression
        if [entry["label"] for entry in current] != [entry["label"] for entry in candidate]:
            return 0.0
        return _compare([entry["value"] for entry in current], [entry["value"] for entry in candidate])
    if any("box" in entry for entry in (*current, *candidate)):
        return _compare_boxes(current, candidate)
    return _compare_pair(current[0], candidate[0])


def _are_entries(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) and "label" in entry for entry in value)


def _read_numbers(value: Any) -> "Array | None":
    """Return a number, or lists of numbers of one length, as an array; None for anything else."""
    try:
        array = np.array(value)
    except ValueError:  # lists of several lengths
        return None
    return array if array.dtype.kind in "iuf" else None


def _compare_boxes(current: Sequence[Decoded], candidate: Sequence[Decoded]) -> float:
    current, candidate = current[:_MAX_BOXES], candidate[:_MAX_BOXES]
    overlaps = find_overlaps(_read_boxes(current), _read_boxes(candidate))
    labels = [np.array([str(entry["label"]) for entry in entries]) for entries in (current, candidate)]
    overlaps *= labels[0][:, None] == labels[1]
    agreement = 0.0
    for entry, row in zip(current, overlaps, strict=True):
        best = int(row.argmax())
        if row[best] >= _MIN_OVERLAP:
            agreement += _compare_pair(entry, candidate[best])
            overlaps[:, best] = 0  # a box is in one pair
    return agreement / max(len(current), len(candidate))


def _read_boxes(entries: Sequence[Decoded]) -> NDArray[np.float32]:
    """Return the boxes of entries [K, 4]; zeros without one."""
    return np.array([entry.get("box") or [0] * 4 for entry in entries], np.float32)


def _compare_pair(current: Decoded, candidate: Decoded) -> float:
    """Return the agreement of two entries: 0 for other labels, else that of their inner answers."""
    if current["label"] != candidate["label"]:
        return 0.0
    inner = [
        name for name in {*current, *candidate} if isinstance(current.get(name, candidate.get(name)), dict)
    ]
    return compare_answers({name: current.get(name) for name in inner}, {n: candidate.get(n) for n in inner})
