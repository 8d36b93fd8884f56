"""Boxes of one picture, and the suppression of those that overlap a better one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of one picture.

    Attributes:
        corners: float32 [K, 4], x1, y1, x2, y2.
        scores: float32 [K], 0..1.
        classes: int64 [K].
    """

    corners: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> "Boxes":
        """Return the boxes of these positions, or where a mask holds."""
        return Boxes(self.corners[chosen], self.scores[chosen], self.classes[chosen])


def find_overlaps(box: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the intersection over union of a box [4] and others [K, 4]; 0 without an area."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    inside = np.clip(sides[:, 0], 0, None) * np.clip(sides[:, 1], 0, None)
    areas = (others[:, 2] - others[:, 0]) * (others[:, 3] - others[:, 1])
    union = (box[2] - box[0]) * (box[3] - box[1]) + areas - inside
    return np.asarray(inside / np.where(union > 0, union, np.inf), np.float32)


def choose_best(boxes: Boxes, *, overlap: float, max_boxes: int, max_candidates: int = 1000) -> Boxes:
    """Return the best boxes, the best first; of boxes of one class that overlap only the best one.

    Args:
        boxes: boxes of one picture; those with a NaN or without an area are left out.
        overlap: intersection over union above which the worse box is left out; 1 leaves all.
        max_boxes: most boxes that are returned.
        max_candidates: only so many boxes of the highest scores are looked at.
    """
    corners = boxes.corners
    is_box = (corners[:, 2] > corners[:, 0]) & (corners[:, 3] > corners[:, 1])  # NaN compares false
    is_box &= np.isfinite(corners).all(axis=1) & np.isfinite(boxes.scores)
    ranked = boxes.take(is_box)
    ranked = ranked.take(np.argsort(-ranked.scores, kind="stable")[:max_candidates])
    if overlap >= 1:
        return ranked.take(np.arange(min(len(ranked), max_boxes)))
    is_free = np.ones(len(ranked), np.bool_)
    chosen: list[int] = []
    while len(chosen) < max_boxes and is_free.any():
        index = int(is_free.argmax())  # the best of those left
        chosen.append(index)
        near = find_overlaps(ranked.corners[index], ranked.corners) > overlap
        is_free &= ~(near & (ranked.classes == ranked.classes[index]))
        is_free[index] = False
    return ranked.take(np.array(chosen, np.intp))
