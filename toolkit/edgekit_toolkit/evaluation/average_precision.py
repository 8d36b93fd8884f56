"""Mean average precision of detections with respect to true boxes, as in COCO's evaluation.

`match_boxes` matches the detections in a sample with the true boxes. `mean_precisions` computes the average
precision of any set of matched samples. At most 100 detections of each class in a picture are used, and the
precision is averaged over 101 recall values. Boxes of all sizes are used.

Source: pycocotools.cocoeval (T.-Y. Lin, P. Dollár).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.tasks.boxes import Boxes
from edgekit_toolkit.samples.truth import TrueBoxes

OVERLAPS: Final = np.linspace(0.5, 0.95, 10)
_RECALLS: Final = np.linspace(0, 1, 101)
_MAX_DETECTIONS: Final = 100
_EXACT: Final = 1 - 1e-10
_EPSILON: Final = np.spacing(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedBoxes:
    """K detections and G true boxes of one sample, matched at each of the T overlaps in `OVERLAPS`.

    Attributes:
        scores: The scores of the detections, float32 [K].
        classes: The classes of the detections, int64 [K].
        hits: Whether a detection matches a true box at an overlap, bool [T, K].
        ignored: Whether a detection is excluded from the score at an overlap, bool [T, K].
        truths: The classes of the true boxes, without ignored boxes, int64 [G].
    """

    scores: NDArray[np.float32]
    classes: NDArray[np.int64]
    hits: NDArray[np.bool_]
    ignored: NDArray[np.bool_]
    truths: NDArray[np.int64]


def match_boxes(boxes: Boxes, truth: TrueBoxes) -> MatchedBoxes:
    """Sort the detections of a sample by score, and match them with the true boxes."""
    order = np.argsort(-boxes.scores, kind="stable")
    ranked = boxes.take(order)
    chosen = np.zeros(len(ranked), np.bool_)
    hits = np.zeros((len(OVERLAPS), len(ranked)), np.bool_)
    ignored = np.zeros_like(hits)
    for kind in np.unique(ranked.classes):
        rows = np.flatnonzero(ranked.classes == kind)[:_MAX_DETECTIONS]
        chosen[rows] = True
        positions = np.flatnonzero(truth.classes == kind)
        if len(positions):
            hits[:, rows], ignored[:, rows] = _match_class(ranked.corners[rows], truth, positions)
    return MatchedBoxes(
        scores=ranked.scores[chosen],
        classes=ranked.classes[chosen],
        hits=hits[:, chosen],
        ignored=ignored[:, chosen],
        truths=truth.classes[~truth.ignored],
    )


def _match_class(
    corners: NDArray[np.float32], truth: TrueBoxes, positions: NDArray[np.intp]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return hits and ignored detections of one class, each bool [overlaps, K].

    Args:
        corners: [K, 4], the best first.
        truth: all true boxes of the sample.
        positions: the true boxes of the class.
    """
    crowds, leaves = truth.crowds[positions], truth.ignored[positions]
    overlaps = _find_overlaps(corners.astype(np.float64), truth.corners[positions], crowds)
    free = np.ones((len(OVERLAPS), len(positions)), np.bool_)
    limits = np.minimum(OVERLAPS, _EXACT)[:, None]
    rows = np.arange(len(OVERLAPS))
    hits = np.zeros((len(OVERLAPS), len(corners)), np.bool_)
    ignored = np.zeros_like(hits)
    for index in np.flatnonzero((overlaps >= OVERLAPS[0]).any(axis=1)):
        allowed = (overlaps[index] >= limits) & (free | crowds)
        # One that counts goes before one that is ignored, and of equal overlaps the last.
        ranks = np.where(allowed, overlaps[index] - 2 * leaves, -np.inf)[:, ::-1]
        best = len(positions) - 1 - ranks.argmax(axis=1)
        is_match = allowed[rows, best]
        hits[:, index] = is_match & ~leaves[best]
        ignored[:, index] = is_match & leaves[best]
        free[rows[is_match], best[is_match]] = False
    return hits, ignored


def _find_overlaps(
    corners: NDArray[np.float64], others: NDArray[np.float64], crowds: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return intersections [K, G] over unions, in a crowd over the detection's own area."""
    sides = np.minimum(corners[:, None, 2:], others[:, 2:]) - np.maximum(corners[:, None, :2], others[:, :2])
    inside = np.clip(sides, 0, None).prod(axis=2)
    areas, other_areas = ((box[:, 2:] - box[:, :2]).prod(axis=1) for box in (corners, others))
    union = areas[:, None] + np.where(crowds, 0, other_areas - inside)
    return np.asarray(inside / np.maximum(union, 1e-30))


def mean_precisions(matches: Sequence[MatchedBoxes]) -> NDArray[np.float64]:
    """Return the average precision at each of `OVERLAPS`, which is the mean over all classes with true boxes.

    Raises:
        DataError: There is no true box.
    """
    kinds, counts = np.unique(np.concatenate([match.truths for match in matches]), return_counts=True)
    if not len(kinds):
        raise DataError("no sample has a box that counts")
    classes = np.concatenate([match.classes for match in matches])
    scores = np.concatenate([match.scores for match in matches])
    order = np.lexsort((-scores, classes))  # stable
    order = order[np.isin(classes[order], kinds)]
    ranks = np.searchsorted(kinds, classes[order])
    hits = np.concatenate([match.hits for match in matches], axis=1)[:, order]
    counted = ~np.concatenate([match.ignored for match in matches], axis=1)[:, order]
    hit_counts = _sums_in_classes(hits, ranks)
    precisions = hit_counts / (_sums_in_classes(counted, ranks) + _EPSILON)
    # The best of this and all later precisions of the class: other classes lie lower, or are passed.
    offsets = 2.0 * ranks
    best = np.maximum.accumulate((precisions - offsets)[:, ::-1], axis=1)[:, ::-1] + offsets
    weights = [_recall_weights(int(count)) for count in counts]
    starts = np.cumsum([0, *(len(weight) for weight in weights[:-1])])
    table = np.concatenate(weights)
    shares = hits * table[starts[ranks] + hit_counts] * best
    is_first = np.append(True, ranks[1:] != ranks[:-1])[: len(ranks)]
    shares[:, is_first] += table[starts[ranks[is_first]]] * best[:, is_first]
    return np.asarray(shares.sum(axis=1) / (len(_RECALLS) * len(kinds)))


def _sums_in_classes(flags: NDArray[np.bool_], ranks: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return running sums [overlaps, K] that begin anew with each class."""
    sums = np.cumsum(flags, axis=1)
    firsts = np.searchsorted(ranks, ranks)  # where each one's class begins
    return np.asarray(sums - (sums - flags)[:, firsts], np.int64)


@lru_cache(maxsize=4096)
def _recall_weights(count: int) -> NDArray[np.float64]:
    """Return how many of the recalls need 0, 1, ... `count` hits, float64 [count + 1]."""
    needed = np.searchsorted(np.arange(count + 1) / count, _RECALLS)
    return np.bincount(needed, minlength=count + 1).astype(np.float64)
