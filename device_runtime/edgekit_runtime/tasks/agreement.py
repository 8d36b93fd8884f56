"""How far two answers to the same picture or sound agree: for canary and shadow of pipelines.

[car, person] and [car, dog], boxes at the same places     0.5: one of two pairs
"""

from collections.abc import Sequence
from typing import Any, Final

from edgekit_runtime.tasks.task import Decoded

_LEAST_OVERLAP: Final = 0.5  # intersection over union at which two boxes are of one thing
_MOST_BOXES: Final = 100  # the best of each answer are compared


def compare_answers(current: Decoded, candidate: Decoded) -> float:
    """Return the agreement of two answers, 0..1: the mean over their lists of entries and inner answers.

    Entries with boxes agree in pairs of one label whose boxes overlap by half; of other lists, the best
    entries agree or not. Inner answers of a pair count with it. Values without labels agree if equal.
    """
    parts = [_compare(current.get(name), candidate.get(name)) for name in sorted({*current, *candidate})]
    return sum(parts) / len(parts) if parts else 1.0


def _compare(current: Any, candidate: Any) -> float:
    if isinstance(current, dict) and isinstance(candidate, dict):
        return compare_answers(current, candidate)
    if not (_are_entries(current) and _are_entries(candidate)):
        return float(current == candidate)
    if not current or not candidate:
        return float(not current and not candidate)
    if any("box" in entry for entry in (*current, *candidate)):
        return _compare_boxes(current, candidate)
    return _compare_pair(current[0], candidate[0])


def _are_entries(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) and "label" in entry for entry in value)


def _compare_boxes(current: Sequence[Decoded], candidate: Sequence[Decoded]) -> float:
    current, candidate = current[:_MOST_BOXES], candidate[:_MOST_BOXES]
    remaining, agreement = list(candidate), 0.0
    for entry in current:
        overlaps = [
            _find_overlap(entry.get("box"), other.get("box")) * (other["label"] == entry["label"])
            for other in remaining
        ]
        best = max(range(len(overlaps)), key=overlaps.__getitem__, default=0)
        if overlaps and overlaps[best] >= _LEAST_OVERLAP:
            agreement += _compare_pair(entry, remaining.pop(best))
    return agreement / max(len(current), len(candidate))


def _compare_pair(current: Decoded, candidate: Decoded) -> float:
    """Return the agreement of two entries: 0 for other labels, else that of their inner answers."""
    if current["label"] != candidate["label"]:
        return 0.0
    inner = [
        name for name in {*current, *candidate} if isinstance(current.get(name, candidate.get(name)), dict)
    ]
    return compare_answers({name: current.get(name) for name in inner}, {n: candidate.get(n) for n in inner})


def _find_overlap(box: Any, other: Any) -> float:
    """Return the intersection over union of two boxes [x1, y1, x2, y2]; 0 without an area."""
    if not box or not other:
        return 0.0
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    inside = max(0.0, width) * max(0.0, height)
    areas = [(sides[2] - sides[0]) * (sides[3] - sides[1]) for sides in (box, other)]
    union = sum(areas) - inside
    return float(inside / union) if union > 0 else 0.0
