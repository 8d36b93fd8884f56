"""Scores of a model on evaluation samples, all in 0..1 with 1 the best; an output that is NaN scores 0.

`top1` and `top5` need labels. The others compare with the outputs of the float source model, which says how
much packaging changed, not how good the model is. One's own are in `own_metrics`, boxes in `detections`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_toolkit.evaluation.detections import has_boxes, score_boxes

Outputs = Mapping[str, NDArray[Any]]
Labels = NDArray[np.int64] | None
# (outputs, outputs of the float source model, labels [samples] or None) -> scores [samples]
Score = Callable[[Outputs, Outputs, Labels], NDArray[np.float64]]
# The same for a whole set: one entry a sample, and one score in all.
SetScore = Callable[[Sequence[Outputs], Sequence[Outputs], Labels], float]

# Smaller maps are too coarse to be a picture.
_LEAST_MAP_SIDE: Final = 8
_COLOURS: Final = 3


@dataclass(frozen=True, slots=True)
class Metric:
    """A named score of single samples.

    Attributes:
        name: as the user gave it, or as `auto` chose.
        title: how messages and reports call it.
        score: the function.
        needs_labels: whether samples must be labelled.
    """

    name: str
    title: str
    score: Score
    needs_labels: bool = False


@dataclass(frozen=True, slots=True)
class SetMetric:
    """A named score of a whole set of samples, such as mAP or F1.

    Attributes:
        name: as the user gave it.
        title: how messages and reports call it.
        score: the function.
    """

    name: str
    title: str
    score: SetScore


def find_metric(name: str, outputs: Outputs, labelled: bool) -> Metric | SetMetric:
    """Return the metric called `name`.

    Args:
        name: `auto`, a key of `METRICS`, or `FILE.py:FUNCTION` for one's own.
        outputs: outputs of the source model on one batch; `auto` decides by their shapes.
        labelled: whether the evaluation samples have labels.

    Raises:
        DataError: no such metric, it needs labels that are not there, or it does not suit the outputs.
    """
    if name not in METRICS and ":" in name:
        from edgekit_toolkit.evaluation.user_metric import load_metric

        return load_metric(name)
    if name == "auto":
        name = _choose(outputs, labelled)
    if name not in METRICS:
        raise DataError(f"metric {name!r}: expected auto, {', '.join(METRICS)} or FILE.py:FUNCTION")
    metric = METRICS[name]
    if metric.needs_labels and not labelled:
        raise DataError(
            f"metric {name!r} needs labels: add an int64 array `y` [samples] to the evaluation data"
        )
    needed, is_suited = _NEEDED[name]
    if not is_suited(outputs):
        shapes = {key: list(value.shape) for key, value in outputs.items()}
        raise DataError(f"metric {name!r} needs {needed}; the outputs are {shapes}")
    return metric


def _choose(outputs: Outputs, labelled: bool) -> str:
    if class_scores(outputs) is not None:
        return "top1" if labelled else "agreement"
    if has_boxes(list(outputs.values())):
        return "detections"
    channels = _channels(outputs) if len(outputs) == 1 else 0
    if channels == 1 and _are_shares(next(iter(outputs.values()))):
        return "mask_overlap"
    # Three channels may be colours, and the largest of them says nothing.
    return "pixel_agreement" if channels > 1 and channels != _COLOURS else "similarity"


def class_scores(outputs: Outputs) -> str | None:
    """Name of the first output, where it looks like class scores [samples, classes >= 2]; otherwise None."""
    name, first = next(iter(outputs.items()))
    return name if first.ndim == 2 and first.shape[1] >= 2 and first.dtype.kind == "f" else None


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
    got, want = next(iter(outputs.values())), next(iter(reference.values()))
    return np.asarray((got.argmax(axis=1) == want.argmax(axis=1)) & _is_decided(got), np.float64)


def _is_decided(scores: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each sample's scores have a best one: NaN has no order."""
    decided: NDArray[np.bool_] = ~np.isnan(scores).any(axis=1)
    return decided


def _similarity(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
    """1 - |error| / |reference| of each sample, at least 0, the mean over float outputs.

    An output of another shape (a number of detections, say) scores 0. Outputs that do not share their first
    axis give one score in all. Where no output is float, it is the share of equal values.
    """
    if all(want.dtype.kind != "f" for want in reference.values()):
        parts = [_equal_values(outputs[name], want) for name, want in reference.items() if want.size]
        return _mean_of_outputs(parts)
    parts = []
    for name, want in reference.items():
        if want.dtype.kind != "f" or not want.size:
            continue
        flat = want.reshape(want.shape[0] if want.ndim else 1, -1).astype(np.float64)
        if outputs[name].shape != want.shape:
            parts.append(np.zeros(len(flat)))
            continue
        with np.errstate(invalid="ignore"):  # infinity less or through infinity
            error = outputs[name].reshape(flat.shape).astype(np.float64) - flat
            ratio = np.linalg.norm(error, axis=1) / np.maximum(np.linalg.norm(flat, axis=1), 1e-12)
        parts.append(np.nan_to_num(np.clip(1 - ratio, 0, 1), nan=0.0))
    return _mean_of_outputs(parts)


def _equal_values(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.float64]:
    """Share of equal values of each sample; 0 where the shapes differ."""
    samples = want.shape[0] if want.ndim else 1
    if got.shape != want.shape:
        return np.zeros(samples)
    return np.asarray((got == want).reshape(samples, -1).mean(axis=1), np.float64)


def _mean_of_outputs(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Mean score of each sample over the outputs; one in all where they do not share their first axis."""
    if not parts:
        return np.ones(1)
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


def _detections(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
    return score_boxes(list(outputs.values()), list(reference.values()))


def _pixel_agreement(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
    """Share of the pixels of each sample with the class of the source model: the channel that is largest."""
    got, want = next(iter(outputs.values())), next(iter(reference.values()))
    axis = _channel_axis(want)
    if axis is None or got.shape != want.shape:
        return np.zeros(len(want))
    same = (got.argmax(axis=axis) == want.argmax(axis=axis)) & ~np.isnan(got).any(axis=axis)
    return np.asarray(same.reshape(len(want), -1).mean(axis=1), np.float64)


def _mask_overlap(outputs: Outputs, reference: Outputs, _labels: Labels) -> NDArray[np.float64]:
    """Intersection over union of the pixels above 0.5, of each sample; two empty masks are the same."""
    got, want = next(iter(outputs.values())), next(iter(reference.values()))
    if got.shape != want.shape:
        return np.zeros(len(want))
    ours, theirs = (maps.reshape(len(want), -1) > 0.5 for maps in (got, want))
    union = (ours | theirs).sum(axis=1)
    overlap = (ours & theirs).sum(axis=1) / np.maximum(union, 1)
    finite = ~np.isnan(got.reshape(len(want), -1)).any(axis=1)
    return np.asarray(np.where(union == 0, 1.0, overlap) * finite, np.float64)


METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric("top1", "top-1 accuracy", _top(1), needs_labels=True),
        Metric("top5", "top-5 accuracy", _top(5), needs_labels=True),
        Metric("agreement", "agreement with the float model", _agreement),
        Metric("pixel_agreement", "pixels that agree with the float model", _pixel_agreement),
        Metric("mask_overlap", "mask overlap (IoU) with the float model", _mask_overlap),
        Metric("detections", "detections (F1) in common with the float model", _detections),
        Metric("similarity", "similarity to the float model's outputs", _similarity),
    )
}
_CLASSES: Final = ("class scores [samples, classes]", lambda outputs: class_scores(outputs) is not None)
# Metric -> what its outputs must be, in words and as a test.
_NEEDED: Final[Mapping[str, tuple[str, Callable[[Outputs], bool]]]] = {
    "top1": _CLASSES,
    "top5": _CLASSES,
    "agreement": _CLASSES,
    "pixel_agreement": ("maps [N, C, H, W] of 2 classes or more", lambda outputs: _channels(outputs) > 1),
    "mask_overlap": ("masks [N, 1, H, W]", lambda outputs: _channels(outputs) == 1),
    "detections": (
        "decoded boxes [N, A, 4] with scores [N, A, C], or both in one [N, 4 + C, A] in pixels",
        lambda outputs: has_boxes(list(outputs.values())),
    ),
    "similarity": ("outputs", bool),
}
