"""Scores of a model on evaluation samples. All scores are in 0..1, and 1 is the best.

Metrics with `truth` need labels and measure how good a model is. The others compare with the outputs of the
float source model and measure the effect of packaging. A NaN output scores 0. A sample has the score NaN if
neither model finds anything in it. See `detections` and `average_precision` for boxes, and `task_scores` for
masks and texts.

A metric of the user is FILE.py:FUNCTION. The file runs with the permissions of the user. The function takes
the outputs of a batch and returns a score for each sample. With `FUNCTION.whole_set = True`, it takes lists
of the outputs of all samples and returns one score.
"""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.package.row_sets import row_similarity
from edgekit_runtime.tasks.kinds.detection import DETECTION, DetectionOptions, find_boxes
from edgekit_runtime.tasks.task import read_task
from edgekit_toolkit.evaluation.average_precision import OVERLAPS, MatchedBoxes, match_boxes, mean_precisions
from edgekit_toolkit.evaluation.detections import BoxLayout, find_layout
from edgekit_toolkit.evaluation.task_scores import (
    count_edits,
    count_pixels,
    edit_distance,
    mean_overlap,
    share_of_characters,
)
from edgekit_toolkit.samples.truth import TrueBoxes, TrueMask, TrueSteps, TrueText, Truth

Outputs = Mapping[str, NDArray[Any]]
# Class numbers, int64 [samples], or objects [samples] of a record of `samples.truth`.
Labels = NDArray[Any] | None
# Takes outputs, those of the float source model, and labels [samples] or None. Returns scores [samples].
Score = Callable[[Outputs, Outputs, Labels], NDArray[np.float64]]
# The same for a whole set: one entry of `SetMetric.reduce` for each sample, and one score in all.
SetScore = Callable[[Sequence[Any], Sequence[Any], Labels], float]

# Boxes of lower scores change no average precision that is worth a look. More than 100 do not count in COCO.
_LEAST_SCORE: Final = 0.001
_MOST_BOXES: Final = 100
# Smaller maps are too coarse to be pictures.
_LEAST_MAP_SIDE: Final = 8
_COLOURS: Final = 3
# With fewer rows, nothing tells class scores from coordinates.
_MIN_ROWS: Final = 8
# Coordinates differ by place far more than by sample, class scores do not.
_LAYOUT_RATIO: Final = 4.0
# A value that varies less than this share of the others' variance counts as if it varied as much.
_MIN_VARIANCE: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Probes:
    """Outputs of the source model on some samples. A metric infers from them what the outputs mean.

    Attributes:
        runs: The outputs of each run.
        samples: The number of samples in each run. None if it is the first dimension of the first output.
        axes: A dict from the name of each output with a data-dependent number of rows to the index of the
            axis of the rows.
        stated_layout: The layout of the boxes from the task of the package, or None to infer it.
    """

    runs: Sequence[Outputs]
    samples: int | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    stated_layout: BoxLayout | None = None

    @property
    def stacked(self) -> Outputs:
        """The outputs of all runs, joined along the first axis.

        If the shapes differ between runs or an output is a scalar, these are the outputs of the first run.
        """
        shapes = {tuple((name, value.shape) for name, value in run.items()) for run in self.runs}
        if len(shapes) > 1 or not all(value.ndim for value in self.runs[0].values()):
            return self.runs[0]
        return {name: np.concatenate([run[name] for run in self.runs]) for name in self.runs[0]}

    @property
    def rows_are_samples(self) -> bool:
        """Whether the first output has a row for each sample."""
        firsts = [next(iter(run.values())) for run in self.runs]
        return self.samples is None or all(first.shape[:1] == (self.samples,) for first in firsts)

    @property
    def are_stackable(self) -> bool:
        """Whether each output has a row for each sample, so that several samples can be in one run."""
        return self.samples is None or all(
            value.shape[:1] == (self.samples,) and value.shape == self.runs[0][name].shape
            for run in self.runs
            for name, value in run.items()
        )

    @property
    def layout(self) -> BoxLayout | None:
        """The layout of the boxes in the outputs of a detector, or None for another model."""
        return self.stated_layout or find_layout(self.runs, rows_are_samples=self.rows_are_samples)


def _unfitted(*_: Any) -> NDArray[np.float64]:
    raise DataError("a metric that is fitted to outputs comes from find_metric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A named score of single samples.

    Attributes:
        name: The name from the user or from `auto`.
        title: The name in messages and reports.
        score: Takes outputs, outputs of the source model and labels. Returns the score of each sample, 0..1.
        truth: The type of the labels: `int` for classes, a record of `samples.truth`, or None without labels.
        outputs: A description of suitable outputs.
        suits: Returns whether outputs suit the metric.
        fit: Creates `score` from the source model's outputs on some samples. None if `score` is given.
        against_source: Whether the metric compares with the source model, whose own score is then 1.
        reads_classes: Whether the metric reads the first output as class scores.
        note: The reason why the choice by `auto` is uncertain, as text for the user.
    """

    name: str
    title: str
    score: Score = _unfitted
    truth: type[Truth] | None = None
    outputs: str = "outputs"
    suits: Callable[[Probes], bool] = lambda _probes: True
    fit: Callable[[Probes], Score] | None = None
    against_source: bool = True
    reads_classes: bool = False
    note: str | None = None


def _whole_outputs(outputs: Outputs, _label: Truth | None) -> Any:
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMetric:
    """A named score of a whole set of samples, such as mAP or F1.

    Attributes:
        name, title, truth, outputs, suits: See `Metric`.
        score: Takes the results of `reduce` for the candidate and for the source model, and the labels.
            Returns the score of the set.
        reduce: Takes the outputs of a sample and its label. Returns the value that `score` needs.
        fit: Takes the options of the task and the number of labelled classes. Returns `reduce`. None if
            `reduce` is given.
        task: The name of the task whose outputs the metric reads, or empty for any.
        weighs_copies: Whether a sample that occurs twice counts twice, so that samples can have weights.
    """

    name: str
    title: str
    score: SetScore
    truth: type[Truth] | None = None
    reduce: Callable[[Outputs, Any], Any] = _whole_outputs
    fit: Callable[[Any, int], Callable[[Outputs, Any], Any]] | None = None
    task: str = ""
    outputs: str = "outputs"
    suits: Callable[[Probes], bool] = lambda _probes: True
    reads_classes: bool = False
    weighs_copies: bool = False


def find_metric(
    name: str,
    probes: Probes | Outputs,
    labelled: bool,
    *,
    is_generated: bool = False,
    truth: type[Truth] = int,
    task: TaskChoice | None = None,
    labels: int = 0,
) -> Metric | SetMetric:
    """Return the metric called `name`.

    Args:
        name: `auto`, a key of `METRICS`, or `FILE.py:FUNCTION` for a metric of the user.
        probes: The outputs of the source model on some samples or on a batch. `auto` decides by their shapes
            and values.
        labelled: Whether the evaluation samples have labels.
        is_generated: Whether the samples were generated, so that the values of outputs have no meaning.
        truth: The type of the labels, if there are any: `int` for classes or a record of `samples.truth`.
        task: The task of the model, if it is known.
        labels: The number of labelled classes, or 0.

    Raises:
        DataError: There is no such metric, its labels are missing, or it does not suit the outputs.
    """
    if name not in METRICS and ":" in name:
        return _load_metric(name)
    probes = probes if isinstance(probes, Probes) else Probes([probes])
    note = None
    own_truth = truth if labelled else None
    if name == "auto":
        name, note = _choose(probes, own_truth, is_generated, task)
    if name not in METRICS:
        raise DataError(f"metric {name!r}: expected auto, {', '.join(METRICS)} or FILE.py:FUNCTION")
    metric = METRICS[name]
    if metric.truth not in (None, own_truth):
        raise DataError(f"metric {name!r} needs {_TRUTHS[metric.truth]}")
    if not metric.suits(probes):
        shapes = {key: list(value.shape) for key, value in probes.stacked.items()}
        raise DataError(f"metric {name!r} needs {metric.outputs}; the outputs are {shapes}")
    if isinstance(metric, SetMetric):
        return _fit_to_task(metric, task, labels)
    return replace(metric, score=metric.score if metric.fit is None else metric.fit(probes), note=note)


_TRUTHS: Final[Mapping[Any, str]] = {
    int: "labels: add an int64 array `y` [samples] to the evaluation data",
    TrueBoxes: "true boxes: give --eval a data set in the format of YOLO, COCO or Pascal VOC",
    TrueMask: "true masks: give --eval a folder with `images` and `masks`, a PNG of class numbers each",
    TrueSteps: "events: give --eval a list of recordings with columns file_name, begin_s, end_s and label",
    TrueText: "texts: give --eval a list with a column `text`, and --labels with a character a line",
}


_NOUNS: Final[Mapping[Any, str]] = {TrueBoxes: "boxes", TrueMask: "masks", TrueText: "texts"}


def _fit_to_task(metric: SetMetric, task: TaskChoice | None, labels: int) -> SetMetric:
    """Return a metric that reads outputs as the task says.

    Raises:
        DataError: there is no such task, or its options are wrong.
    """
    if metric.fit is None:
        return metric
    if task is None or task.name != metric.task:
        raise DataError(
            f"metric {metric.name!r} reads the outputs of a model for {metric.task}; say how they are laid"
            f" out: --task {metric.task}:layout=..."
        )
    return replace(metric, reduce=metric.fit(read_task(task, DataError)[1], labels))


def _choose(
    probes: Probes, truth: type[Truth] | None, is_generated: bool, task: TaskChoice | None
) -> tuple[str, str | None]:
    """Return the metric, and a note where the outputs do not tell which is right."""
    unread = None
    metric = next((metric for metric in _RECORDS if metric.truth is truth), None)
    if isinstance(metric, SetMetric) and truth is TrueSteps:
        return metric.name, None
    if isinstance(metric, SetMetric) and metric.task:
        if task is not None and task.name == metric.task:
            return metric.name, None
        layout = ":layout=..." if truth is TrueBoxes else ""
        unread = (
            f"the samples have {_NOUNS[truth]}, but nothing says how those of the model are laid out, so they"
            f" judge nothing: give --task {metric.task}{layout}"
        )
    name, note = _choose_by_outputs(probes, truth is int, is_generated)
    return name, unread or note


def _choose_by_outputs(probes: Probes, labelled: bool, is_generated: bool) -> tuple[str, str | None]:
    """Return the metric for outputs of an unknown task, and a note where they do not tell which is right."""
    outputs = probes.stacked
    layout = probes.layout
    # Generated inputs show no objects, but outputs that differ are seen in them too.
    if layout is not None and not (is_generated and layout.detects_nothing(probes.runs)):
        return "detections", None
    name = class_scores(probes)
    if name is not None:
        if labelled:
            return "top1", None
        if is_generated or _are_probabilities(outputs[name], axis=1):
            return "agreement", None
        if len(outputs) > 1 or _have_layout(outputs[name]):
            metric = "r2" if _vary(probes) else "similarity"
            return metric, _doubt(outputs, metric, "class scores", "agreement")
        return "agreement", _doubt(outputs, "agreement", "coordinates or features", "r2")
    channels = _channels(outputs) if len(outputs) == 1 else 0
    if channels == 1 and _are_shares(next(iter(outputs.values()))):
        return "mask_overlap", None
    # Three channels may be colours, of which the largest means nothing.
    if channels > 1 and channels != _COLOURS:
        return "pixel_agreement", None
    if _is_sequence(outputs) and not probes.axes:
        if _class_axis(next(iter(outputs.values()))) is not None:
            return "sequence", None
        if not is_generated:
            return "similarity", _doubt(outputs, "similarity", "class scores over time", "sequence")
    return "similarity", None


def _doubt(outputs: Outputs, metric: str, other: str, better: str) -> str:
    name, first = next(iter(outputs.items()))
    return (
        f"output '{name}' {list(first.shape[1:])} was judged by {METRICS[metric].title}, since its values do"
        f" not tell what it is; if it holds {other}, give --metric {better} (--metric {metric} settles it)"
    )


def _are_probabilities(values: NDArray[Any], axis: int) -> bool:
    """Whether values, or their exponentials, are 0..1 and sum up to 1 along an axis."""
    values = values.astype(np.float64)
    if not values.size or not np.isfinite(values).all():
        return False
    shares = values if values.min() >= 0 else np.exp(np.minimum(values, 1))
    return bool(shares.max() <= 1 + 1e-3 and np.allclose(shares.sum(axis=axis), 1, atol=1e-2))


def _have_layout(rows: NDArray[Any]) -> bool:
    """Whether columns differ far more than samples, as the coordinates of an object would."""
    if len(rows) < _MIN_ROWS:
        return False
    rows = rows.astype(np.float64)
    return bool(rows.mean(axis=0).var() > _LAYOUT_RATIO * rows.var(axis=0).mean())


def _float_rows(outputs: Outputs) -> dict[str, NDArray[np.float64]]:
    """Return float outputs as [samples, values]."""
    return {
        name: value.reshape(len(value), -1).astype(np.float64)
        for name, value in outputs.items()
        if value.ndim and value.dtype.kind == "f" and value.size
    }


def _vary(probes: Probes) -> bool:
    rows = _float_rows(probes.stacked)
    return bool(rows) and all(np.isfinite(row).all() and row.var(axis=0).any() for row in rows.values())


def _r2(probes: Probes) -> Score:
    """Return a score: 1 less the squared error over the variance of each value among samples, at least 0."""
    variances = {}
    for name, rows in _float_rows(probes.stacked).items():
        variance = rows.var(axis=0)
        variances[name] = np.maximum(variance, _MIN_VARIANCE * variance.mean())

    def score(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
        parts = []
        for name, variance in variances.items():
            want = reference[name].reshape(len(reference[name]), -1).astype(np.float64)
            if outputs[name].shape != reference[name].shape or want.shape[1] != len(variance):
                parts.append(np.zeros(len(want)))
                continue
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                error = ((outputs[name].reshape(want.shape) - want) ** 2 / variance).mean(axis=1)
            parts.append(np.nan_to_num(np.clip(1 - error, 0, 1), nan=0.0))
        return _mean_of_outputs(parts)

    return score


def _is_sequence(outputs: Outputs) -> bool:
    first = next(iter(outputs.values()))
    is_float = first.ndim == 3 and first.dtype.kind == "f" and min(first.shape[1:]) >= 2
    return len(outputs) == 1 and is_float


def _class_axis(scores: NDArray[Any]) -> int | None:
    """Return the axis along which scores [N, T, C] or [N, C, T] are probabilities or their logarithms."""
    return next((axis for axis in (2, 1) if _are_probabilities(scores, axis)), None)


def _sequence(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
    """Return 1 less the edit distance of the best classes over time, over the longer one's length.

    Repetitions and the most frequent class of the sample, which is the blank of CTC, do not count.
    """
    output, want = next(iter(outputs.values())), next(iter(reference.values()))
    if output.shape != want.shape:
        return np.zeros(len(want))
    axis = _class_axis(want) or 2
    ours, theirs = output.argmax(axis=axis), want.argmax(axis=axis)
    decided = ~np.isnan(output).any(axis=(1, 2))
    shares = []
    for decoded, expected in zip(ours, theirs, strict=True):
        blank = np.bincount(expected).argmax()
        texts = [row[np.append(True, row[1:] != row[:-1]) & (row != blank)] for row in (decoded, expected)]
        shares.append(1 - edit_distance(*texts) / max(*map(len, texts), 1))
    return np.asarray(shares, np.float64) * decided


def class_scores(probes: Probes) -> str | None:
    """Return the name of the first output if it looks like class scores, or None.

    Class scores are floats [samples, classes] with at least two classes.
    """
    name, first = next(iter(probes.stacked.items()))
    is_scores = first.ndim == 2 and first.shape[1] >= 2 and first.dtype.kind == "f"
    return name if is_scores and probes.rows_are_samples else None


def _top(count: int) -> Score:
    def score(outputs: Outputs, _reference: Outputs, labels: Labels) -> NDArray[np.float64]:
        scores = next(iter(outputs.values()))
        if labels is None:
            raise DataError(f"metric 'top{count}' needs labels")
        if labels.shape != scores.shape[:1]:
            raise DataError(f"labels have shape {list(labels.shape)}, expected [{len(scores)}], one a sample")
        wrong = labels[(labels < 0) | (labels >= scores.shape[1])]
        if wrong.size:
            raise DataError(
                f"label {wrong[0]} is outside the model's {scores.shape[1]} classes, expected"
                f" 0..{scores.shape[1] - 1}: number the labels in the order of the model's outputs"
            )
        best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        return np.asarray((best == labels[:, None]).any(axis=1) & _is_decided(scores), np.float64)

    return score


def _agreement(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
    output, want = next(iter(outputs.values())), next(iter(reference.values()))
    return np.asarray((output.argmax(axis=1) == want.argmax(axis=1)) & _is_decided(output), np.float64)


def _is_decided(scores: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each sample has a best score: NaN has no order."""
    decided: NDArray[np.bool_] = ~np.isnan(scores).any(axis=1)
    return decided


def _similarity(probes: Probes) -> Score:
    """Return a score: 1 - |error| / |reference| of each sample, at least 0, the mean over float outputs.

    Where no output is float, it is the share of equal values. Outputs whose number of rows depends on the
    data are compared as sets, with one score in all; so are outputs that do not share their first axis.
    Otherwise an output of another shape scores 0.
    """
    axes = probes.axes

    def score(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
        floats = [name for name, want in reference.items() if want.dtype.kind == "f"]
        names = [name for name in floats or reference if reference[name].size or outputs[name].size]
        sets = row_similarity(outputs, reference, {name: axes[name] for name in names if name in axes})
        parts = [
            np.array([sets[name]]) if name in sets else _value_similarity(outputs[name], reference[name])
            for name in names
        ]
        return _mean_of_outputs(parts)

    return score


def _value_similarity(output: NDArray[Any], want: NDArray[Any]) -> NDArray[np.float64]:
    """Return how alike an output is for each sample, value by value; 0 if the shapes differ."""
    flat = want.reshape(want.shape[0] if want.ndim else 1, -1)
    if output.shape != want.shape:
        return np.zeros(len(flat))
    if want.dtype.kind != "f":
        return np.asarray((output == want).reshape(flat.shape).mean(axis=1), np.float64)
    flat, values = flat.astype(np.float64), output.reshape(flat.shape).astype(np.float64)
    finite = np.isfinite(flat)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        error = np.where(values == flat, 0.0, values - flat)
        sizes = np.linalg.norm(np.where(finite, flat, 0.0), axis=1)
        ratio = np.linalg.norm(error, axis=1) / np.maximum(sizes, 1e-12)
    return np.asarray(np.nan_to_num(np.clip(1 - ratio, 0, 1), nan=0.0))


def _mean_of_outputs(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Mean score of each sample over the outputs; a single score if the first axes differ.

    It is NaN without outputs: no model gave a value.
    """
    if not parts:
        return np.full(1, np.nan)
    if len({len(part) for part in parts}) == 1:
        return np.asarray(np.mean(parts, axis=0), np.float64)
    return np.asarray([np.mean([part.mean() for part in parts])])


def _channels(outputs: Outputs) -> int:
    """Return the channels of the first output, where it looks like maps; otherwise 0."""
    first = next(iter(outputs.values()))
    return 0 if _channel_axis(first) is None else first.shape[_channel_axis(first) or 0]


def _channel_axis(maps: NDArray[Any]) -> int | None:
    """Return 1 for float maps [N, C, H, W], 3 for [N, H, W, C], where C is the smallest; otherwise None."""
    if maps.ndim != 4 or maps.dtype.kind != "f":
        return None
    for axis, sides in ((1, maps.shape[2:]), (3, maps.shape[1:3])):
        if min(sides) >= _LEAST_MAP_SIDE and maps.shape[axis] < min(sides):
            return axis
    return None


def _are_shares(maps: NDArray[Any]) -> bool:
    return bool(maps.size and maps.min() >= 0 and maps.max() <= 1)


def _detections(probes: Probes) -> Score:
    layout = probes.layout

    def score(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
        return np.full(1, np.nan) if layout is None else layout.score(outputs, reference)

    return score


def _first_values(outputs: Outputs, _label: Truth | None) -> NDArray[np.float64]:
    return next(iter(outputs.values())).reshape(-1).astype(np.float64)


def _auc(rows: Sequence[NDArray[np.float64]], _reference: Sequence[Any], labels: Labels) -> float:
    """Return the chance that a sample of a class has a higher score for it than another, a mean over classes.

    Ties count half. A single output is the score of class 1.

    Raises:
        DataError: there are no samples of two classes.
    """
    scores = np.nan_to_num(np.stack(rows), nan=-np.inf)
    classes = range(scores.shape[1]) if scores.shape[1] > 1 else (1,)
    areas = []
    for column, kind in enumerate(classes):
        is_class = np.asarray(labels) == kind
        count, others = int(is_class.sum()), int((~is_class).sum())
        if count and others:
            values = np.sort(scores[~is_class, column])
            below = np.searchsorted(values, scores[is_class, column], "left")
            up_to = np.searchsorted(values, scores[is_class, column], "right")
            areas.append((below + up_to).sum() / (2 * count * others))
    if not areas:
        raise DataError("an area under the ROC curve needs samples of two of the model's classes")
    return float(np.mean(areas))


def _sounding_steps(outputs: Outputs, truth: TrueSteps) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the scores of all steps of a recording, and which classes sound in each."""
    values = next(iter(outputs.values()))
    if len(values) % len(truth.active):  # as of a model that takes several at once, and leaves out the rest
        raise DataError(
            f"metric 'auc_steps': the model gives {len(values)} rows of scores for {len(truth.active)} steps"
        )
    scores = values.reshape(len(truth.active), -1).astype(np.float64)
    if scores.shape[1] not in (truth.active.shape[1], truth.active.shape[1] + 1):
        raise DataError(
            f"metric 'auc_steps': the model gives {scores.shape[1]} scores in a step, and the events have"
            f" {truth.active.shape[1]} classes"
        )
    return scores[:, -truth.active.shape[1] :], truth.active


def _auc_of_steps(rows: Sequence[Any], _reference: Sequence[Any], _labels: Labels) -> float:
    """Return the area of each class over the steps of all samples, the mean over classes, see `_auc`.

    Raises:
        DataError: no class sounds in some steps and not in others.
    """
    scores, active = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    areas = [
        _auc(list(scores[:, [column]]), (), active[:, column].astype(np.int64))
        for column in range(scores.shape[1])
        if 0 < active[:, column].sum() < len(active)
    ]
    if not areas:
        raise DataError("an area under the ROC curve needs steps with and without an event of a class")
    return float(np.mean(areas))


def _recall_at_one(rows: Sequence[NDArray[np.float64]], _reference: Sequence[Any], labels: Labels) -> float:
    """Return the share of samples whose nearest neighbour by cosine has the same class.

    Samples of a class of their own do not count.

    Raises:
        DataError: no two samples have the same class.
    """
    kinds = np.asarray(labels)
    has_other = (kinds[:, None] == kinds).sum(axis=1) > 1
    if not has_other.any():
        raise DataError("recall@1 needs two samples of a class")
    values = np.stack(rows)
    values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
    alike = np.nan_to_num(values @ values.T, nan=-2.0)
    np.fill_diagonal(alike, -np.inf)
    is_hit = (kinds[alike.argmax(axis=1)] == kinds) & np.isfinite(values).all(axis=1)
    return float(is_hit[has_other].mean())


def _detect(options: DetectionOptions, labels: int) -> Callable[[Outputs, TrueBoxes], MatchedBoxes]:
    """Return a step that reduces outputs to matches: of all boxes worth a rank, whatever users ask."""
    options = replace(options, min_score=_LEAST_SCORE, max_boxes=_MOST_BOXES)

    def reduce(outputs: Outputs, truth: TrueBoxes) -> MatchedBoxes:
        return match_boxes(find_boxes(outputs, options, truth.input_size, labels or None), truth)

    return reduce


def _mean_precision(overlaps: int) -> SetScore:
    def score(matches: Sequence[MatchedBoxes], _reference: Sequence[MatchedBoxes], _labels: Labels) -> float:
        return float(mean_precisions(matches)[:overlaps].mean())

    return score


def _pixel_agreement(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
    """Share of each sample's pixels with the source model's class, which is the largest channel."""
    output, want = next(iter(outputs.values())), next(iter(reference.values()))
    axis = _channel_axis(want)
    if axis is None or output.shape != want.shape:
        return np.zeros(len(want))
    same = (output.argmax(axis=axis) == want.argmax(axis=axis)) & ~np.isnan(output).any(axis=axis)
    return np.asarray(same.reshape(len(want), -1).mean(axis=1), np.float64)


def _mask_overlap(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
    """Intersection over union of the pixels above 0.5, of each sample; two empty masks are the same."""
    output, want = next(iter(outputs.values())), next(iter(reference.values()))
    if output.shape != want.shape:
        return np.zeros(len(want))
    ours, theirs = (maps.reshape(len(want), -1) > 0.5 for maps in (output, want))
    union = (ours | theirs).sum(axis=1)
    overlap = (ours & theirs).sum(axis=1) / np.maximum(union, 1)
    finite = ~np.isnan(output.reshape(len(want), -1)).any(axis=1)
    return np.asarray(np.where(union == 0, 1.0, overlap) * finite, np.float64)


def _load_metric(name: str) -> Metric | SetMetric:
    """Return the metric `FILE.py:FUNCTION`.

    Raises:
        DataError: there is no such file or function, or the file cannot be imported.
    """
    file, _, function_name = name.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise DataError(f"metric {name!r}: there is no Python file {file}")
    title = f"{path.name}:{function_name}"
    stated = f"{title} (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"
    function = _import(name, path, function_name)

    def call(*arguments: Any) -> NDArray[np.float64]:
        try:
            with redirect_stdout(sys.stderr):  # standard output belongs to --json
                return np.asarray(function(*arguments), np.float64)
        except (Exception, SystemExit) as error:  # whatever the user's function raises
            raise DataError(f"metric {name!r} failed: {error!r}{_place(error, path)}") from error

    def score(outputs: Outputs, reference: Outputs, labels: Labels) -> NDArray[np.float64]:
        # Copies: a metric that works in place must not change the reference of the next candidate.
        copies = ({key: value.copy() for key, value in original.items()} for original in (outputs, reference))
        scores = np.atleast_1d(call(*copies, _copy(labels)))
        _check(name, scores, "shape [samples]")
        return scores

    def score_set(outputs: Sequence[Outputs], reference: Sequence[Outputs], labels: Labels) -> float:
        total = call(outputs, reference, _copy(labels))
        if total.ndim:
            raise DataError(f"metric {name!r} returned shape {list(total.shape)}; expected one score 0..1")
        _check(name, total[np.newaxis], "one for the whole set")
        return float(total)

    if getattr(function, "whole_set", False):
        return SetMetric(name=stated, title=title, score=score_set)
    return Metric(name=stated, title=title, score=score, against_source=False)


def _copy(labels: Labels) -> Labels:
    return None if labels is None else labels.copy()


def _import(name: str, path: Path, function: str) -> Callable[..., Any]:
    module_name = f"edgekit_metric_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise DataError(f"metric {name!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
        loaded: Callable[..., Any] = getattr(module, function)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise DataError(f"metric {name!r}: {error!r}{_place(error, path)} while loading {path}") from error
    return loaded


def _check(name: str, scores: NDArray[np.float64], expected: str) -> None:
    is_share = scores.size and np.isfinite(scores).all() and scores.min() >= 0 and scores.max() <= 1
    if scores.ndim != 1 or not is_share:
        extent = f", values {scores.min()}..{scores.max()}" if scores.size else ""
        raise DataError(
            f"metric {name!r} returned shape {list(scores.shape)}{extent}; expected scores 0..1, {expected}"
        )


def _place(error: BaseException, path: Path) -> str:
    """Return file and line of the user's file where an error came from, or nothing."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f" at {path}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) in (path, path.absolute())
    ]
    return f" at {path}:{lines[-1]}" if lines else ""


def _scores_classes(probes: Probes) -> bool:
    return class_scores(probes) is not None


_CLASSES: Final = "class scores [samples, classes]"
_RECORDS: Final[tuple[Metric | SetMetric, ...]] = (
    *(
        Metric(
            name=f"top{count}",
            title=f"top-{count} accuracy",
            score=_top(count),
            truth=int,
            outputs=_CLASSES,
            suits=_scores_classes,
            against_source=False,
            reads_classes=True,
        )
        for count in (1, 5)
    ),
    Metric(
        name="agreement",
        title="agreement with the float model",
        score=_agreement,
        outputs=_CLASSES,
        suits=_scores_classes,
        reads_classes=True,
    ),
    Metric(
        name="pixel_agreement",
        title="pixels that agree with the float model",
        score=_pixel_agreement,
        outputs="maps [N, C, H, W] of 2 classes or more",
        suits=lambda probes: _channels(probes.stacked) > 1,
    ),
    Metric(
        name="mask_overlap",
        title="mask overlap (IoU) with the float model",
        score=_mask_overlap,
        outputs="masks [N, 1, H, W]",
        suits=lambda probes: _channels(probes.stacked) == 1,
    ),
    Metric(
        name="detections",
        title="detections (F1) in common with the float model",
        outputs="decoded boxes [N, A, 4] with scores [N, A, C], or all in [N, 4 + C, A] or [N, A, 6]",
        suits=lambda probes: probes.layout is not None,
        fit=_detections,
    ),
    Metric(
        name="r2",
        title="R² against the float model's outputs",
        outputs="float outputs that vary from sample to sample, on 2 samples or more",
        suits=_vary,
        fit=_r2,
    ),
    Metric(
        name="sequence",
        title="decoded sequence in common with the float model",
        score=_sequence,
        outputs="one output of class scores over time [N, T, C] or [N, C, T]",
        suits=lambda probes: _is_sequence(probes.stacked),
    ),
    Metric(name="similarity", title="similarity to the float model's outputs", fit=_similarity),
    SetMetric(
        name="auc",
        title="area under the ROC curve",
        weighs_copies=True,
        score=_auc,
        truth=int,
        reduce=_first_values,
        outputs="class scores [samples, classes], or one score for class 1",
        suits=lambda probes: probes.rows_are_samples and next(iter(probes.stacked.values())).ndim == 2,
        reads_classes=True,
    ),
    SetMetric(
        name="auc_steps",
        title="area under the ROC curve of steps",
        weighs_copies=True,
        score=_auc_of_steps,
        truth=TrueSteps,
        reduce=_sounding_steps,
        outputs="scores of classes in each step",
    ),
    SetMetric(
        name="recall1",
        title="recall@1 of the nearest other sample",
        score=_recall_at_one,
        truth=int,
        reduce=_first_values,
        outputs="embeddings [samples, values]",
        suits=lambda probes: probes.rows_are_samples and next(iter(probes.stacked.values())).ndim == 2,
    ),
    *(
        SetMetric(
            name=name,
            title=title,
            score=_mean_precision(overlaps),
            truth=TrueBoxes,
            weighs_copies=True,
            fit=_detect,
            task=DETECTION.name,
        )
        for name, title, overlaps in (("map50_95", "mAP50-95", len(OVERLAPS)), ("map50", "mAP50", 1))
    ),
    SetMetric(
        name="miou",
        title="mean overlap of classes (mIoU)",
        weighs_copies=True,
        score=mean_overlap,
        truth=TrueMask,
        fit=lambda options, _labels: count_pixels(options),
        task="segmentation",
    ),
    SetMetric(
        name="characters",
        title="right characters (1 - CER)",
        weighs_copies=True,
        score=share_of_characters,
        truth=TrueText,
        fit=lambda options, _labels: count_edits(options),
        task="text",
    ),
)
METRICS: Final = {metric.name: metric for metric in _RECORDS}
"""A dict from names to metrics. For a new metric, add a record to `_RECORDS`."""
