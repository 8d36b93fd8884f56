"""Measures how well two answers to the same picture or sound agree, for a canary or shadow of a pipeline.

For example, the agreement of [car, person] and [car, dog] with the same boxes is 0.5, because the labels of
one of the two pairs are equal.
"""

from typing import Any, Final

import numpy as np

from edgekit_runtime.package.row_sets import compare_numbers
from edgekit_runtime.tasks.boxes import find_overlaps
from edgekit_runtime.tasks.task import Decoded

_MIN_OVERLAP: Final = 0.5  # intersection over union from which two boxes show one object
_MAX_BOXES: Final = 100  # the best of each answer are compared


def compare_answers(current: Decoded, candidate: Decoded) -> float:
    """Return the agreement of two answers, 0..1, which is the mean over their fields.

    In lists of boxes, two boxes with the same label and an IoU of at least 0.5 form a pair. The agreement of
    the lists is the number of pairs divided by the length of the longer list. If boxes contain answers of
    a later stage, each pair is weighted by the agreement of these answers. In regressions, all values are
    compared. In other lists with labels, only the first entries are compared. Numbers are compared by
    `compare_numbers`. Other values agree if they are equal.
    """
    parts = [_compare(current.get(name), candidate.get(name)) for name in {*current, *candidate}]
    return sum(parts) / len(parts) if parts else 1.0


def _compare(current: Any, candidate: Any) -> float:
    if isinstance(current, dict) and isinstance(candidate, dict):
        return compare_answers(current, candidate)
    pair = [current, candidate]
    if all(isinstance(value, list) and all(map(_is_entry, value)) for value in pair):
        return _compare_entries(current, candidate)
    try:
        numbers = [np.array(value) for value in pair]
    except ValueError:  # lists of several lengths
        return float(current == candidate)
    if all(array.dtype.kind in "iuf" for array in numbers) and numbers[0].shape == numbers[1].shape:
        return compare_numbers(*numbers)
    return float(current == candidate)


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and "label" in value


def _compare_entries(current: list[Decoded], candidate: list[Decoded]) -> float:
    if not current or not candidate:
        return float(current == candidate)
    entries = [*current, *candidate]
    if any("box" in entry for entry in entries):
        return _compare_boxes(current[:_MAX_BOXES], candidate[:_MAX_BOXES])
    if all("value" in entry for entry in entries):
        labels, others = ([entry["label"] for entry in side] for side in (current, candidate))
        values = ([entry["value"] for entry in side] for side in (current, candidate))
        return _compare(*values) if labels == others else 0.0
    return _compare_pair(current[0], candidate[0])


def _compare_boxes(current: list[Decoded], candidate: list[Decoded]) -> float:
    boxes = [
        np.array([entry.get("box") or [0] * 4 for entry in entries], np.float32)
        for entries in (current, candidate)
    ]
    agreement, overlaps = 0.0, find_overlaps(*boxes)
    labels = [np.array([str(entry["label"]) for entry in entries]) for entries in (current, candidate)]
    overlaps *= labels[0][:, None] == labels[1]
    for entry, row in zip(current, overlaps, strict=True):
        best = int(row.argmax())
        if row[best] >= _MIN_OVERLAP:
            agreement += _compare_pair(entry, candidate[best])
            overlaps[:, best] = 0  # a box is in one pair
    return agreement / max(len(current), len(candidate))


def _compare_pair(current: Decoded, candidate: Decoded) -> float:
    """Return the agreement of two entries: 0 for other labels, else that of their inner answers."""
    inner: list[Decoded] = [
        {name: value for name, value in entry.items() if isinstance(value, dict)}
        for entry in (current, candidate)
    ]
    return compare_answers(*inner) if current["label"] == candidate["label"] else 0.0
