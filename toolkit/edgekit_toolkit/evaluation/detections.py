"""The metric `detections`: boxes of a candidate against boxes of the float source model.

It reads decoded boxes: [N, A, 4] with scores [N, A] or [N, A, C] (and classes [N, A], and their count), or
all in one output: [N, A, 4 + C] or [N, 4 + C, A], or the rows of an end-to-end detector in one of the orders
`_ORDERS`. Without the axis N, there are as many boxes as the model finds. The layout is found once, by the
source model's outputs on several samples: a batch in which few classes occur looks like another layout. It
knows no anchors, so it cannot read raw offsets. If ground truth is available, a metric of your own (mAP)
says more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Outputs = Mapping[str, Array]

CONFIDENT: Final = 0.25
OVERLAP: Final = 0.5  # overlap of two boxes that count as one, within a model and between two
_MOST_BOXES: Final = 300  # best boxes of each sample
_LEAST_ANCHORS: Final = 16  # boxes with a score for each class: with fewer, axes cannot be told apart
# Coordinates in pixels reach at least as far; raw offsets do not.
_MIN_EXTENT: Final = 16
_ROUNDING: Final = 1e-3


@dataclass(frozen=True, slots=True)
class _ColumnOrder:
    """Columns of an end-to-end detector's row: the first of the box's four, the score, the class."""

    width: int
    box: int
    score: int
    label: int


_ORDERS: Final = (
    _ColumnOrder(6, box=0, score=4, label=5),  # YOLOv10, YOLO26, most others
    _ColumnOrder(6, box=0, score=5, label=4),
    _ColumnOrder(6, box=2, score=1, label=0),  # PaddleDetection
    _ColumnOrder(7, box=1, score=6, label=5),  # YOLOv7: number of the image, box, class, score
    _ColumnOrder(7, box=1, score=5, label=6),
    _ColumnOrder(7, box=3, score=2, label=1),  # Caffe: number of the image, class, score, box
)


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

    def confident(self) -> Array:
        """Return the places of the boxes that count, [K, 4]."""
        return self.places[self.scores >= CONFIDENT].astype(np.float64)


_Read = Callable[[Outputs], _Boxes]


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """Where the boxes are in a model's outputs.

    Attributes:
        read: reads the boxes of a batch.
        has_corners: whether a box is two corners; otherwise it is the centre and the size.
    """

    read: _Read
    has_corners: bool

    def detects_nothing(self, runs: Sequence[Outputs]) -> bool:
        return not any(len(self.read(run).confident()) for run in runs)

    def score(self, outputs: Outputs, reference: Outputs) -> NDArray[np.float64]:
        """Return the F1 score of each sample's boxes, with the source model's boxes as the truth.

        Boxes of a score of 0.25 or more count, after suppression of boxes that overlap a better one of their
        class by half or more (IoU). Two boxes match if they have the same class and overlap as much. No box
        on both sides is NaN: such a sample shows nothing.
        """
        theirs = self.read(reference)
        try:
            ours = self.read(outputs)
        except (IndexError, ValueError):  # a form whose outputs have other axes
            return np.zeros(len(theirs.places))
        if len(ours.places) != len(theirs.places):
            return np.zeros(len(theirs.places))
        samples = range(len(theirs.places))
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            return np.array(
                [
                    _f1(self._detected(ours, candidate), self._detected(theirs, candidate))
                    for candidate in samples
                ]
            )

    def _detected(self, boxes: _Boxes, sample: int) -> tuple[Array, Array]:
        """Return the boxes [K, 4] of a sample that count, as corners, the best first, and their classes."""
        scores = boxes.scores[sample]
        order = np.argsort(-scores, kind="stable")[:_MOST_BOXES]
        corners = _corners(boxes.places[sample][order].astype(np.float64), self.has_corners)
        sides = _sides(corners)
        # A box without an area would not overlap itself; NaN compares false.
        counts = (scores[order] >= CONFIDENT) & (sides > 0).all(axis=1) & (sides.prod(axis=1) > 0)
        limited, classes = corners[counts], boxes.classes[sample][order][counts]
        chosen: list[int] = []
        for position, box in enumerate(limited):
            alike = [index for index in chosen if classes[index] == classes[position]]
            if not alike or _overlaps(box, limited[alike]).max() < OVERLAP:
                chosen.append(position)
        return limited[chosen], classes[chosen]


def find_layout(runs: Sequence[Outputs], *, rows_are_samples: bool = True) -> BoxLayout | None:
    """Return where the boxes are if outputs look like decoded boxes with scores, otherwise None.

    Args:
        runs: outputs of the source model for several samples, or for a batch.
        rows_are_samples: whether a row of a matrix belongs to a sample, so that the rows are no boxes.
    """
    if len(runs[0]) > 1:
        readings: Iterator[_Read] = _column_readings(runs, 3 - (not rows_are_samples))
    else:
        readings = _row_readings([next(iter(run.values())) for run in runs], 3 - (not rows_are_samples))
    for read in readings:
        boxes = [read(run) for run in runs]
        sure = np.concatenate([part.confident() for part in boxes])
        every = np.concatenate([part.places.reshape(-1, 4) for part in boxes]).astype(np.float64)
        for has_corners in (True, False):
            sides = _sides(_corners(sure if len(sure) else every, has_corners))
            # Raw offsets are negative as often as not.
            if (sides >= -_ROUNDING * np.abs(sides).max(initial=0)).all():
                return BoxLayout(read, has_corners)
        if not len(sure):
            return BoxLayout(read, has_corners=False)
    return None


def _row_readings(values: Sequence[Array], min_rank: int) -> Iterator[_Read]:
    """Yield the layouts of a single output that its values allow."""
    if values[0].dtype.kind != "f" or not min_rank <= values[0].ndim <= 4:
        return
    for is_turned in (False, True):
        try:
            rows = [_rows(value, is_turned) for value in values]
            flat = np.concatenate([part.reshape(-1, part.shape[-1]) for part in rows]).astype(np.float64)
        except ValueError:  # the last axis is that of the boxes
            continue
        for order in _ORDERS:
            if flat.shape[1] == order.width and _fits_order(flat, order):
                yield partial(_read_ordered, is_turned=is_turned, order=order)
        if max(part.shape[1] for part in rows) >= max(_LEAST_ANCHORS, flat.shape[1] + 1) and _fits_scores(
            flat
        ):
            yield partial(_read_scored, is_turned=is_turned)


def _rows(value: Array, is_turned: bool) -> Array:
    """Return an output as rows of boxes, [N, A, values].

    Raises:
        ValueError: it has other axes.
    """
    if value.ndim == 4 and value.shape[1] == 1:  # [N, 1, A, 7]
        value = value[:, 0]
    if value.ndim == 2:
        value = value[np.newaxis]
    if value.ndim != 3:
        raise ValueError(f"boxes cannot lie in an output {list(value.shape)}")
    return value.transpose(0, 2, 1) if is_turned else value


def _fits_order(rows: Array, order: _ColumnOrder) -> bool:
    """Whether the columns for score and class hold shares and whole numbers."""
    scores, whole = rows[:, order.score], rows[:, order.label]
    if order.width == 7:
        whole = np.concatenate([whole, rows[:, 0]])
    return bool(
        len(rows)
        and (whole == np.round(whole)).all()
        and whole.min() >= -1
        and (scores >= 0).all()
        and scores.max() <= 1 + 1e-3
        and (scores != np.round(scores)).any()
    )


def _read_ordered(outputs: Outputs, *, is_turned: bool, order: _ColumnOrder) -> _Boxes:
    rows = _rows(next(iter(outputs.values())), is_turned)
    labels = np.nan_to_num(rows[..., order.label]).round().astype(np.int64)
    return _Boxes(rows[..., order.box : order.box + 4], rows[..., order.score], labels)


def _fits_scores(rows: Array) -> bool:
    """Whether the columns are those of a box in pixels and a score for each class.

    Probabilities over time have this shape too, but no pixels.
    """
    corners, scores = rows[:, :4], rows[:, 4:]
    return bool(scores.size and scores.min() >= 0 and scores.max() <= 1 and corners.max() >= _MIN_EXTENT)


def _read_scored(outputs: Outputs, *, is_turned: bool) -> _Boxes:
    rows = _rows(next(iter(outputs.values())), is_turned)
    return _Boxes(rows[..., :4], *_best(rows[..., 4:]))


def _best(scores: Array) -> tuple[Array, Array]:
    """Return each box's best score and its class."""
    scores = np.nan_to_num(scores, nan=-np.inf)
    return scores.max(axis=2), scores.argmax(axis=2)


def _column_readings(runs: Sequence[Outputs], min_rank: int) -> Iterator[_Read]:
    """Yield the layout of boxes, scores, classes and their count in outputs of their own, if it is one."""
    first = runs[0]
    boxes = next(
        (name for name, value in first.items() if value.shape[-1:] == (4,) and min_rank <= value.ndim <= 3),
        None,
    )
    if boxes is None:
        return
    rank = first[boxes].ndim
    others = {name: value for name, value in first.items() if name != boxes}
    each_box = [name for name in others if all(_belongs(run[name], run[boxes]) for run in runs)]
    wide = [name for name in each_box if first[name].ndim == rank and first[name].dtype.kind == "f"]
    flat = [name for name in each_box if first[name].ndim == rank - 1]
    whole = [name for name in flat if all((run[name] == np.round(run[name])).all() for run in runs)]
    rated = [name for name in flat if name not in whole]
    # Where nothing is detected, scores may be whole numbers too: 0.
    rated = rated or [name for name in flat if first[name].dtype.kind == "f"]
    labels = next((name for name in whole if name not in rated[:1]), None)
    counts = [name for name in others if name not in each_box and _counts(runs, name, boxes)]
    count = counts[0] if counts else None
    if wide:
        values = np.concatenate([run[wide[0]].reshape(-1, run[wide[0]].shape[-1]) for run in runs]).astype(
            np.float64
        )
        are_shares = bool(not values.size or (values.min() >= 0 and values.max() <= 1))
        # A softmax, whose first class is the background.
        has_background = are_shares and values.shape[1] > 1 and np.allclose(values.sum(axis=1), 1, atol=1e-3)
        yield partial(
            _read_wide, boxes=boxes, scores=wide[0], are_shares=are_shares, skipped=int(has_background)
        )
    elif rated:
        yield partial(_read_flat, boxes=boxes, scores=rated[0], labels=labels, count=count)


def _belongs(value: Array, boxes: Array) -> bool:
    """Whether an output has an entry, or one for each class, for each box."""
    return value.shape[: boxes.ndim - 1] == boxes.shape[:-1] and value.ndim <= boxes.ndim


def _counts(runs: Sequence[Outputs], name: str, boxes: str) -> bool:
    """Whether an output tells how many of the boxes of each sample count."""
    return all(
        run[name].size == (len(run[boxes]) if run[boxes].ndim == 3 else 1)
        and (run[name] == np.round(run[name])).all()
        and run[name].min() >= 0
        and run[name].max() <= run[boxes].shape[-2]
        for run in runs
    )


def _read_wide(outputs: Outputs, *, boxes: str, scores: str, are_shares: bool, skipped: int) -> _Boxes:
    values = _rows(outputs[scores], is_turned=False).astype(np.float64)
    if not are_shares:
        values = 1 / (1 + np.exp(-np.clip(values, -60, 60)))
    return _Boxes(_rows(outputs[boxes], is_turned=False), *_best(values[..., skipped:]))


def _read_flat(outputs: Outputs, *, boxes: str, scores: str, labels: str | None, count: str | None) -> _Boxes:
    corners = _rows(outputs[boxes], is_turned=False)
    shape = corners.shape[:2]
    rated = np.array(outputs[scores], np.float64).reshape(shape)
    if count is not None:
        rated[np.arange(shape[1]) >= outputs[count].reshape(-1, 1)] = 0
    classes = np.zeros(shape) if labels is None else outputs[labels].reshape(shape)
    return _Boxes(corners, rated, np.nan_to_num(classes).round().astype(np.int64))


def _f1(ours: tuple[Array, Array], theirs: tuple[Array, Array]) -> float:
    """Return the F1 score of boxes and their classes; NaN if there are none."""
    (found, found_classes), (wanted, wanted_classes) = ours, theirs
    if not len(wanted) and not len(found):
        return float("nan")
    free = np.ones(len(wanted), np.bool_)
    matches = 0
    for box, kind in zip(found, found_classes, strict=True):
        overlaps = _overlaps(box, wanted) * (free & (wanted_classes == kind))
        if len(overlaps) and overlaps.max() >= OVERLAP:
            free[overlaps.argmax()] = False
            matches += 1
    return 2 * matches / (len(wanted) + len(found))


def _corners(boxes: Array, has_corners: bool) -> Array:
    """Return boxes [K, 4] as corners, the smaller ones first."""
    if has_corners:
        return boxes
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _sides(corners: Array) -> Array:
    return corners[..., 2:] - corners[..., :2]


def _overlaps(box: Array, others: Array) -> Array:
    """Return the intersection over union of a box [4] and others [K, 4], all with an area."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    inside = np.clip(sides, 0, None).prod(axis=1)
    return np.asarray(inside / (_sides(box).prod() + _sides(others).prod(axis=1) - inside))
