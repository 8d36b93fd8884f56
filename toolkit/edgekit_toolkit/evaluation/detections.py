"""The metric `detections`: boxes of a candidate against boxes of the float source model.

It reads decoded boxes: [N, A, 4] with scores [N, A] or [N, A, C] (and classes [N, A]), or both in one output
[N, 4 + C, A] or [N, A, 4 + C] in pixels. It knows no anchors, so it cannot read raw offsets. If ground truth
is available, a metric of your own (mAP) says more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CONFIDENT: Final = 0.25
OVERLAP: Final = 0.5  # overlap of two boxes that count as one, within a model and between two
_MOST_BOXES: Final = 300  # best boxes of each sample
_LEAST_ANCHORS: Final = 16  # boxes in one output: with fewer, its axes cannot be told apart


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Boxes of a batch.

    Attributes:
        places: float [N, A, 4], corners or centre and size.
        scores: float [N, A], 0..1.
        classes: int [N, A].
    """

    places: Array
    scores: Array
    classes: Array


def has_boxes(outputs: Sequence[Array]) -> bool:
    """Return whether outputs look like decoded boxes with scores.

    Args:
        outputs: outputs of one batch, in order.
    """
    found = _read(outputs, outputs)
    if found is None:
        return False
    sure = found.places[found.scores >= CONFIDENT]
    return len(sure) == 0 or bool((_corners(sure, sure)[:, 2:] > _corners(sure, sure)[:, :2]).all())


def score_boxes(outputs: Sequence[Array], reference: Sequence[Array]) -> NDArray[np.float64]:
    """Return the F1 score of each sample's boxes, with the source model's boxes as the truth.

    Boxes of a score of 0.25 or more count, after suppression of boxes that overlap a better one of their
    class by half or more (IoU). Two boxes match if they have the same class and overlap as much. No box on
    both sides is a score of 1.
    """
    theirs, ours = _read(reference, reference), _read(outputs, reference)
    if theirs is None:
        return np.zeros(1)
    if ours is None or len(ours.places) != len(theirs.places):
        return np.zeros(len(theirs.places))
    return np.array([_f1(ours, theirs, sample) for sample in range(len(theirs.places))])


def _read(outputs: Sequence[Array], reference: Sequence[Array]) -> _Boxes | None:
    """Return the boxes, with the layout that the reference has."""
    if len(reference) == 1:
        return _read_one(outputs[0], reference[0])
    place = next((i for i, one in enumerate(reference) if one.ndim == 3 and one.shape[2] == 4), None)
    if place is None:
        return None
    size = reference[place].shape[:2]
    others = [i for i, one in enumerate(reference) if i != place and one.shape[:2] == size]
    wide = [i for i in others if reference[i].ndim == 3 and reference[i].dtype.kind == "f"]
    flat = [i for i in others if reference[i].ndim == 2]
    if wide:
        scores, classes = _best(outputs[wide[0]], reference[wide[0]])
        return _Boxes(outputs[place], scores, classes)
    whole = [i for i in flat if (reference[i] == np.round(reference[i])).all() and reference[i].size]
    rated = [i for i in flat if i not in whole] or flat
    if not rated:
        return None
    named = [i for i in whole if i not in rated]
    classes = outputs[named[0]] if named else np.zeros(outputs[place].shape[:2])
    return _Boxes(outputs[place], outputs[rated[0]], np.nan_to_num(classes).astype(np.int64))


def _read_one(output: Array, reference: Array) -> _Boxes | None:
    if reference.ndim != 3 or reference.dtype.kind != "f" or output.ndim != 3:
        return None
    rows, columns = reference.shape[1:]
    if max(rows, columns) < _LEAST_ANCHORS or min(rows, columns) < 5 or rows == columns:
        return None
    if rows < columns:
        output, reference = output.transpose(0, 2, 1), reference.transpose(0, 2, 1)
    shares, pixels = reference[..., 4:], reference[..., :4]
    # Probabilities over time have this shape too, but no pixels.
    if shares.min() < 0 or shares.max() > 1 or pixels.max() <= 1:
        return None
    scores, classes = _best(output[..., 4:], shares)
    return _Boxes(output[..., :4], scores, classes)


def _best(scores: Array, reference: Array) -> tuple[Array, Array]:
    """Return each box's best score, 0..1, and its class."""
    wanted = reference.astype(np.float64)
    scores = np.nan_to_num(scores.astype(np.float64), nan=-np.inf)
    if wanted.size and (wanted.min() < 0 or wanted.max() > 1):
        scores = 1 / (1 + np.exp(-np.clip(scores, -60, 60)))
    elif wanted.shape[2] > 1 and np.allclose(wanted.sum(axis=2), 1, atol=1e-3):
        scores = scores[..., 1:]  # a softmax, whose first class is the background
    return scores.max(axis=2), scores.argmax(axis=2)


def _f1(ours: _Boxes, theirs: _Boxes, sample: int) -> float:
    wanted, wanted_classes = _kept(theirs, sample, theirs.places[sample])
    found, found_classes = _kept(ours, sample, theirs.places[sample])
    if not len(wanted) and not len(found):
        return 1.0
    free = np.ones(len(wanted), np.bool_)
    matches = 0
    for box, kind in zip(found, found_classes, strict=True):
        overlaps = _overlaps(box, wanted) * (free & (wanted_classes == kind))
        if len(overlaps) and overlaps.max() >= OVERLAP:
            free[overlaps.argmax()] = False
            matches += 1
    return 2 * matches / (len(wanted) + len(found))


def _kept(boxes: _Boxes, sample: int, reference: Array) -> tuple[Array, Array]:
    """Return the boxes [K, 4] of a sample that count, as corners, the best first, and their classes."""
    scores = boxes.scores[sample]
    order = np.argsort(-scores, kind="stable")[:_MOST_BOXES]
    order = order[scores[order] >= CONFIDENT]
    places, classes = _corners(boxes.places[sample], reference)[order], boxes.classes[sample][order]
    kept: list[int] = []
    for place, box in enumerate(places):
        alike = [one for one in kept if classes[one] == classes[place]]
        if not alike or _overlaps(box, places[alike]).max() < OVERLAP:
            kept.append(place)
    return places[kept], classes[kept]


def _corners(boxes: Array, reference: Array) -> Array:
    """Return boxes [K, 4] as corners; in the reference, corners have the larger ones last."""
    boxes = boxes.astype(np.float64)
    if (reference[:, 2:] >= reference[:, :2]).all():
        return boxes
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _overlaps(box: Array, others: Array) -> Array:
    """Return the intersection over union of a box [4] and others [K, 4]; 0 if a box is not finite."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    inside = np.clip(sides, 0, None).prod(axis=1)
    areas = np.clip(others[:, 2:] - others[:, :2], 0, None).prod(axis=1)
    union = np.clip(box[2:] - box[:2], 0, None).prod() + areas - inside
    return np.asarray(np.nan_to_num(inside / np.maximum(union, 1e-12), nan=0.0))
