"""Boxes of one picture and their non-maximum suppression."""

from typing import Final

import numpy as np

from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array, Floats

_BLOCK: Final = 128  # candidates that are compared with each other at once


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of one picture.

    Attributes:
        corners: x1, y1, x2 and y2 in pixels of the input, float32 [K, 4].
        scores: Scores in 0..1, float32 [K].
        classes: Indices of classes, int64 [K].
    """

    corners: Floats
    scores: Floats
    classes: Array

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, chosen: "Array | slice") -> "Boxes":
        """Return the boxes selected by `chosen`: indices, a bool mask or a slice."""
        return Boxes(self.corners[chosen], self.scores[chosen], self.classes[chosen])


def find_overlaps(boxes: Floats, others: Floats) -> Floats:
    """Return the intersection over union of `boxes` [J, 4] and `others` [K, 4], as [J, K].

    It is 0 if a box has no area.
    """
    left, top, right, bottom = (np.ascontiguousarray(column) for column in others.T)
    areas = (right - left) * (bottom - top)
    x1, y1, x2, y2 = (column[:, None] for column in boxes.T)
    inside = np.minimum(x2, right)
    inside -= np.maximum(x1, left)
    height = np.minimum(y2, bottom)
    height -= np.maximum(y1, top)
    np.maximum(inside, 0, out=inside)
    inside *= np.maximum(height, 0, out=height)
    union = (x2 - x1) * (y2 - y1) + areas
    union -= inside
    overlaps: Floats = np.divide(inside, union, out=np.zeros_like(union), where=union > 0)
    return overlaps


def choose_best(boxes: Boxes, *, overlap: float, max_boxes: int, max_candidates: int = 1000) -> Boxes:
    """Return the boxes that `find_best` selects, best first."""
    return boxes.take(find_best(boxes, overlap=overlap, max_boxes=max_boxes, max_candidates=max_candidates))


def find_best(boxes: Boxes, *, overlap: float, max_boxes: int, max_candidates: int = 1000) -> Array:
    """Return the indices of the best boxes, best first, after non-maximum suppression in each class.

    Args:
        boxes: The boxes of one picture. Boxes with NaN, without area or with infinite area are ignored.
        overlap: The intersection over union above which the worse of two boxes is removed. 1 keeps all boxes.
        max_boxes: The maximum number of boxes in the result.
        max_candidates: The number of boxes with the highest scores that are considered.
    """
    rows = _rank(boxes, max_candidates)
    if overlap >= 1:
        return rows[:max_boxes]
    ranked = boxes.take(rows)
    chosen: list[int] = []
    for start in range(0, len(ranked), _BLOCK):
        block = ranked.take(slice(start, start + _BLOCK))
        better = ranked.take(np.array(chosen, np.intp))
        free = np.logical_not(_suppress(better, block, overlap).any(axis=0))
        near = _suppress(block, block, overlap)
        for index in range(len(block)):
            if free[index]:
                chosen.append(start + index)
                if len(chosen) == max_boxes:
                    return rows[chosen]
                free &= ~near[index]
    return rows[np.array(chosen, np.intp)]


def _rank(boxes: Boxes, max_candidates: int) -> Array:
    """Return where the usable boxes of the highest scores are, the best first."""
    corners = boxes.corners
    with np.errstate(over="ignore", invalid="ignore"):
        sides = corners[:, 2:] - corners[:, :2]
        areas = sides[:, 0] * sides[:, 1]
        # NaN compares false.
        is_box = (sides > 0).all(axis=1) & (areas > 0) & (areas < np.inf) & np.isfinite(boxes.scores)
    rows = np.flatnonzero(is_box)
    if len(rows) > max_candidates:
        best = np.argpartition(-boxes.scores[rows], max_candidates)[:max_candidates]
        rows = rows[np.sort(best)]
    return rows[np.argsort(-boxes.scores[rows], kind="stable")]


def _suppress(better: Boxes, others: Boxes, overlap: float) -> Array:
    """Return which better boxes [J] suppress which other boxes [K], bool [J, K]."""
    is_near = find_overlaps(better.corners, others.corners) > overlap
    is_near &= better.classes[:, None] == others.classes
    return is_near
