"""Infers where a detector's outputs contain boxes, and compares boxes with those of the source model.

The layouts are defined in `edgekit_runtime.tasks.kinds.detection`. The layout is inferred from the shapes,
names and values of the source model's outputs. Several samples are needed, because the layout of a single
batch can be ambiguous. If ground truth is available, a metric such as mAP is more meaningful.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tasks.boxes import Boxes, find_overlaps
from edgekit_runtime.tasks.kinds.detection import Columns, DetectionOptions, Size, find_boxes, read_boxes
from edgekit_runtime.tasks.task import read_task

Array = NDArray[Any]
Outputs = Mapping[str, Array]

CONFIDENT: Final = 0.25
OVERLAP: Final = 0.5  # overlap of two boxes that count as one, within a model and between two
_MOST_BOXES: Final = 300  # best boxes of each sample
_LEAST_ANCHORS: Final = 16  # boxes with a score for each class: with fewer, axes cannot be told apart
# Coordinates in pixels reach at least as far. Raw offsets do not.
_MIN_EXTENT: Final = 16
_MAX_SHARE: Final = 2.0  # boxes in shares of the input reach no further
_ROUNDING: Final = 1e-3
_UNIT: Final = (1, 1)  # size of the input where it is not known
_BLAZE_FACE: Final[Mapping[str, Any]] = {
    "aspects": (1.0,),
    "reduced": False,
    "unit_anchors": True,
    "divisors": (0.0, 0.0, 0.0, 0.0),
    "sizes": "linear",
}
# Anchors that are tried where offsets are raw: of BlazeFace and palms (near, far, all ranges), and of SSD.
_ANCHORS: Final[tuple[Mapping[str, Any], ...]] = (
    {**_BLAZE_FACE, "strides": (8, 16, 16, 16)},
    {**_BLAZE_FACE, "strides": (16, 32, 32, 32)},
    {**_BLAZE_FACE, "strides": (4,), "interpolated": 0.0},
    {"strides": (16, 32, 64, 128, 256, 512), "boxes": "centre-yx"},
)


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """The layout of the boxes in a model's outputs.

    Attributes:
        options: The options of the task `detection` for these outputs.
        input_size: The height and width of the input.
        labels: The number of labels, which distinguishes class scores from other columns, or None.
    """

    options: DetectionOptions
    input_size: Size = _UNIT
    labels: int | None = None

    def read(self, outputs: Outputs) -> list[Boxes]:
        """Return the boxes of each sample of a batch after suppression, best first."""
        return [
            find_boxes(sample, self.options, self.input_size, self.labels)
            for sample in self._samples(outputs)
        ]

    def detects_nothing(self, runs: Sequence[Outputs]) -> bool:
        return not any(map(len, self.candidates(runs)))

    def candidates(self, runs: Sequence[Outputs]) -> list[Boxes]:
        """Return the boxes of each sample of all runs, including overlapping boxes."""
        return [
            read_boxes(sample, self.options, self.input_size, self.labels)
            for run in runs
            for sample in self._samples(run)
        ]

    def score(self, outputs: Outputs, reference: Outputs) -> NDArray[np.float64]:
        """Return the F1 score of each sample. The boxes in `reference` are the ground truth.

        Boxes match if they have the same class and an IoU of at least 0.5. A layout from `judging_layout`
        ignores boxes with a score below 0.25, and boxes with an IoU above 0.5 with a better box of the same
        class. The score is NaN if neither model finds a box. All scores are 0 if `outputs` do not have the
        axes of this layout.
        """
        theirs = self.read(reference)
        try:
            ours = self.read(outputs)
        except DataError:  # a form whose outputs have other axes
            return np.zeros(len(theirs))
        if len(ours) != len(theirs):
            return np.zeros(len(theirs))
        return np.array([_f1(*pair) for pair in zip(ours, theirs, strict=True)])

    def _samples(self, outputs: Outputs) -> Iterator[Outputs]:
        first = outputs[self.options.output or next(iter(outputs))]
        count = len(first) if first.ndim > 2 else 1
        if count == 1:
            yield outputs
            return
        for index in range(count):
            yield {
                name: value[index : index + 1] if value.shape[:1] == (count,) else value
                for name, value in outputs.items()
            }


def judging_layout(options: DetectionOptions, input_size: Size | None, labels: int = 0) -> BoxLayout:
    """Return the layout of `options`, restricted to the boxes that count in `BoxLayout.score`.

    `input_size` is the height and width of the input, or None if boxes are not in pixels of the input.
    """
    limits = replace(options, min_score=CONFIDENT, overlap=OVERLAP, max_boxes=_MOST_BOXES)
    return BoxLayout(limits, input_size or _UNIT, labels or None)


def layout_of_task(
    choice: TaskChoice | None, placement: Placement | None, labels: int = 0
) -> BoxLayout | None:
    """Return the layout of the boxes from the task of a package, or None if the task is not `detection`.

    Args:
        choice: The task, or None.
        placement: The position of a picture that fills the whole input, or None if the input is no picture.
        labels: The number of labelled classes, or 0.

    Raises:
        DataError: There is no such task or option.
    """
    options = None if choice is None else read_task(choice, DataError)[1]
    if not isinstance(options, DetectionOptions):
        return None
    return judging_layout(options, None if placement is None else placement.input_size, labels)


def find_layout(
    runs: Sequence[Outputs],
    *,
    rows_are_samples: bool = True,
    input_size: Size | None = None,
    classes: int = 0,
) -> BoxLayout | None:
    """Infer the layout of boxes with scores from outputs, or return None for other outputs.

    Args:
        runs: The outputs of the source model for several samples, or for a batch.
        rows_are_samples: Whether each row of a matrix is the output of one sample. Otherwise, rows may be
            boxes.
        input_size: The height and width of the input. If it is None, grids and anchors are not recognised.
        classes: The number of classes with known names, or 0.
    """
    min_rank = 3 - (not rows_are_samples)
    if len(runs[0]) > 1:
        decoded = _find_apart(runs, min_rank)
    else:
        decoded = _find_joined(runs, min_rank, input_size, classes)
    for options in decoded:
        if options.layout == "grid":
            return judging_layout(options, input_size, classes)
        form = _find_form(options, runs, input_size, classes)
        if form is not None:
            return form
    return None if input_size is None else _find_anchors(runs, input_size)


def _find_form(
    options: DetectionOptions, runs: Sequence[Outputs], input_size: Size | None, labels: int
) -> BoxLayout | None:
    """Return the layout with the form of its boxes; None if no form fits."""
    forms: tuple[Literal["corners", "centre"], ...] = ("corners", "centre")
    for form in forms:
        stated = replace(options, boxes=form)
        boxes = judging_layout(stated, None, labels).candidates(runs)
        if not any(map(len, boxes)):
            boxes = BoxLayout(replace(stated, min_score=0.0), labels=labels or None).candidates(runs)
        corners = np.concatenate([part.corners for part in boxes]).astype(np.float64)
        sides = corners[:, 2:] - corners[:, :2]
        # Raw offsets are negative as often as not.
        is_box = bool((sides >= -_ROUNDING * np.abs(sides).max(initial=0)).all())
        if is_box:
            is_share = bool(np.abs(corners).max(initial=0) <= _MAX_SHARE)
            if is_share and form == "corners" and _follows_tensorflow(options, runs[0]):
                stated = replace(stated, boxes="corners-yx")
            unit: Literal["shares", "pixels"] = "shares" if is_share else "pixels"
            return judging_layout(replace(stated, unit=unit), input_size, labels)
    return None


def _follows_tensorflow(options: DetectionOptions, run: Outputs) -> bool:
    """Whether a list of boxes is that of TensorFlow, whose corners have the vertical value first."""
    counts = run.get(options.count_output)
    return options.output.startswith("detection_boxes") or (counts is not None and counts.dtype.kind == "f")


def _find_joined(
    runs: Sequence[Outputs], min_rank: int, input_size: Size | None, classes: int
) -> Iterator[DetectionOptions]:
    """Yield the layouts of a single output that its values allow."""
    values = [next(iter(run.values())) for run in runs]
    if values[0].dtype.kind != "f" or not min_rank <= values[0].ndim <= 4:
        return
    for is_turned in (False, True):
        try:
            rows = [_rows(value, is_turned) for value in values]
            flat = np.concatenate([part.reshape(-1, part.shape[-1]) for part in rows]).astype(np.float64)
        except ValueError:  # the last axis is that of the boxes
            continue
        for columns in get_args(Columns):
            if _fits_columns(flat, columns.split("-")):
                yield DetectionOptions(layout="rows", columns=columns)
        count = max(part.shape[1] for part in rows)
        # Labels for all classes tell which axis counts the boxes, else it is the longer one.
        is_labelled = classes > 0 and flat.shape[1] - classes in (4, 5)
        if count < (1 if is_labelled else max(_LEAST_ANCHORS, flat.shape[1] + 1)):
            continue
        if not _are_shares(flat[:, 4:]):
            continue
        grid = DetectionOptions(layout="grid")
        if input_size is not None and flat.shape[1] > 5:
            cells = sum((input_size[0] // stride) * (input_size[1] // stride) for stride in grid.strides)
            if cells == count and (flat[:, 2:4] < 0).any():  # logarithms, where sizes are never negative
                yield grid
        # Probabilities over time have this shape too, but no pixels.
        if flat[:, :4].max() >= _MIN_EXTENT:
            has_objects = _has_objectness(flat[:, 4:], classes, is_turned=is_turned)
            yield DetectionOptions(layout="objectness" if has_objects else "scored")


def _has_objectness(scores: Array, classes: int, *, is_turned: bool) -> bool:
    """Whether the first score is objectness: rows in which it is high have a high class score, too."""
    if scores.shape[1] < 2 or classes == scores.shape[1]:
        return False
    if classes == scores.shape[1] - 1:
        return True
    objects = scores[scores[:, 0] >= OVERLAP, 1:]
    return bool(not is_turned and len(objects) and np.median(objects.max(axis=1)) >= OVERLAP)


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


def _fits_columns(rows: Array, columns: Sequence[str]) -> bool:
    """Whether the columns for score and class, and for the image, hold shares and whole numbers."""
    if not len(rows) or rows.shape[1] != len(columns) + 3:
        return False
    # After the box, columns are three further to the right.
    starts = {name: index + 3 * ("box" in columns[:index]) for index, name in enumerate(columns)}
    scores = rows[:, starts["score"]]
    whole = rows[:, [starts[name] for name in ("batch", "class") if name in starts]]
    return bool(
        (whole == np.round(whole)).all()
        and whole.min() >= -1
        and _are_shares(scores)
        and (scores != np.round(scores)).any()
    )


def _are_shares(values: Array) -> bool:
    return bool(values.size and values.min() >= 0 and values.max() <= 1 + _ROUNDING)


def _are_distributions(values: Array) -> bool:
    """Whether each row holds the probabilities of classes that exclude each other."""
    return _are_shares(values) and np.allclose(values.sum(axis=-1), 1, atol=1e-3)


def _find_apart(runs: Sequence[Outputs], min_rank: int) -> Iterator[DetectionOptions]:
    """Yield the layouts of boxes, scores, classes and their count in outputs of their own."""
    for name, value in runs[0].items():
        if value.shape[-1:] != (4,) or not min_rank <= value.ndim <= 3:
            continue
        if not all(_are_distributions(run[name]) for run in runs):
            yield from _find_around(runs, name)


def _find_around(runs: Sequence[Outputs], boxes: str) -> Iterator[DetectionOptions]:
    """Yield the layout of boxes in an output of this name, if the outputs of scores and classes fit it."""
    first = runs[0]
    rank = first[boxes].ndim
    others = {name: value for name, value in first.items() if name != boxes}
    each_box = [name for name in others if all(_belongs(run[name], run[boxes]) for run in runs)]
    wide = [name for name in each_box if first[name].ndim == rank and first[name].dtype.kind == "f"]
    flat = [name for name in each_box if first[name].ndim == rank - 1]
    whole = [name for name in flat if all((run[name] == np.round(run[name])).all() for run in runs)]
    rated = [name for name in flat if name not in whole]
    # Where nothing is detected, scores may be whole numbers too: 0.
    rated = rated or [name for name in flat if first[name].dtype.kind == "f"]
    labels = next((name for name in whole if name not in rated[:1]), "")
    counts = [name for name in others if name not in each_box and _counts(runs, name, boxes)]
    if wide:
        yield replace(_score_kind(runs, wide[0]), layout="apart", output=boxes, scores_output=wide[0])
    elif rated:
        yield DetectionOptions(
            layout="listed",
            output=boxes,
            scores_output=rated[0],
            classes_output=labels,
            count_output=counts[0] if counts else "",
        )


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


def _score_kind(runs: Sequence[Outputs], name: str) -> DetectionOptions:
    """Return options that say what scores for each class are, and which class is the background."""
    values = np.concatenate([run[name].reshape(-1, run[name].shape[-1]) for run in runs]).astype(np.float64)
    if values.size and not _are_shares(values):
        shares = np.exp(values - values.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        is_background = (shares > OVERLAP).mean(axis=0) >= OVERLAP  # most places have no object
        if values.shape[1] > 1 and (is_background[0] or is_background[-1]):
            return DetectionOptions(scores="softmax", background="first" if is_background[0] else "last")
        return DetectionOptions(scores="sigmoid")
    if values.shape[1] < 2 or not _are_distributions(values):
        return DetectionOptions()
    means = values.mean(axis=0)
    return DetectionOptions(background="first" if means[0] >= means[-1] else "last")


def _find_anchors(runs: Sequence[Outputs], input_size: Size) -> BoxLayout | None:
    """Return the layout of raw offsets, if the number of anchors is that of a well-known detector."""
    floats = {name: value for name, value in runs[0].items() if value.dtype.kind == "f" and value.ndim == 3}
    boxes = next((name for name, value in floats.items() if value.shape[2] in (4, 16, 18)), None)
    scores = next((name for name in floats if name != boxes), None)
    if boxes is None or scores is None or len(floats) != 2:
        return None
    for anchors in _ANCHORS:
        options = replace(
            _score_kind(runs, scores), layout="anchors", output=boxes, scores_output=scores, **anchors
        )
        layout = judging_layout(options, input_size)
        try:
            layout.candidates(runs)
        except DataError:  # another number of anchors
            continue
        return layout
    return None


def _f1(ours: Boxes, theirs: Boxes) -> float:
    """Return the F1 score of boxes and their classes; NaN if there are none."""
    if not len(theirs) and not len(ours):
        return float("nan")
    overlaps = find_overlaps(ours.corners, theirs.corners) * (ours.classes[:, None] == theirs.classes)
    matches = 0
    for row in overlaps:
        if len(row) and row.max() >= OVERLAP:
            overlaps[:, row.argmax()] = 0
            matches += 1
    return 2 * matches / (len(theirs) + len(ours))
