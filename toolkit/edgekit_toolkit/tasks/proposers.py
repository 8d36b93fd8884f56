"""Proposes a task for a model from the outputs of its source model on samples.

Each function in `PROPOSERS` gets the same evidence, and proposes its task only if there is no doubt:

    outputs [1, 84, 8400], boxes in pixels, 80 labels -> detection:layout=scored
    outputs [1, 56, 8400], 17 points in pixels        -> keypoints:form=poses
    outputs [1, 10], probabilities with a sum of 1    -> classification
    outputs [1, 10] of a model without labels         -> none, and a note
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tasks.kinds.detection import DetectionOptions
from edgekit_toolkit.evaluation.detections import find_layout
from edgekit_toolkit.evaluation.metrics import Probes, class_scores

_SUM_ERROR: Final = 1e-2
_MIN_DIMENSIONS: Final = 16  # of an embedding
_MIN_PLACES: Final = 16  # of poses
_MIN_POINTS: Final = 3
_MOVENET_POINTS: Final = 17
_MIN_EXTENT: Final = 16  # pixels, which shares do not reach
_MARGIN: Final = 0.5  # by which points beyond the picture and trained maps leave 0 to 1
_MAX_EVENTS: Final = 32
_POINTS: Final = re.compile(r"(?i)key_?point|kpt|heat_?map|landmark|joints|(?<!ex)(?<!com)(?<!trans)pose")
_VOICES: Final = re.compile(r"(?i)speech|(?<!in)voice|vad(?![a-z])")
_SCORES: Final = re.compile(r"(?i)logit|class|prob|score")
_EMBEDDINGS: Final = re.compile(r"(?i)embed|descriptor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts from which a task is proposed.

    Attributes:
        probes: The outputs of the source model on some samples.
        labels: The class names, empty if they are unknown.
        labelled: Whether the samples have class numbers as labels.
        placement: The placement of an image that fills the input, or None if the input is not an image.
        is_sound: Whether the samples are recordings.
        metadata: The metadata that an exporter wrote to the ONNX file, as a dict from key to text.
    """

    probes: Probes
    labels: tuple[str, ...] = ()
    labelled: bool = False
    placement: Placement | None = None
    is_sound: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> tuple[str, NDArray[Any]]:
        """The name and values of the first output. Its first axis has a row for each sample."""
        return next(iter(self.probes.stacked.items()))

    @property
    def is_alone(self) -> bool:
        """Whether all outputs after the first have at most one element, such as an overall score."""
        return all(value.size <= 1 for value in [*self.probes.runs[0].values()][1:])


def _propose_detection(evidence: Evidence) -> TaskChoice | None:
    probes = evidence.probes
    layout = find_layout(
        probes.runs,
        rows_are_samples=probes.rows_are_samples,
        input_size=None if evidence.placement is None else evidence.placement.input_size,
        classes=len(evidence.labels),
    )
    if layout is None or layout.detects_nothing(probes.runs):
        return None  # boxes without an object in them may be anything
    options, plain = layout.options, DetectionOptions()
    # End-to-end detectors and sets have no two boxes of one object.
    is_final = options.layout in ("rows", "listed") or options.background == "last"
    stated = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name not in ("min_score", "overlap", "max_boxes")
        and (getattr(options, field.name) != getattr(plain, field.name) or field.name in ("layout", "boxes"))
    }
    if options.layout == "grid":
        del stated["boxes"]
    return TaskChoice("detection", {**_to_json(stated), **({"overlap": 1.0} if is_final else {})})


def _propose_classification(evidence: Evidence) -> TaskChoice | None:
    name = class_scores(evidence.probes)
    if name is None:
        return None
    scores = evidence.probes.stacked[name].astype(np.float64)
    classes, labels = scores.shape[1], len(evidence.labels)
    if not scores.size or not np.isfinite(scores).all():
        return None
    if not (evidence.labelled or _are_whole(scores) or labels in (classes, classes - 1)):
        return None
    options: dict[str, JsonValue] = {"scores": _score_kind(scores, "softmax")}
    if labels == classes - 1:
        options["background"] = 1
    return TaskChoice("classification", options)


def _propose_segmentation(evidence: Evidence) -> TaskChoice | None:
    """Maps in the size of the input that have a channel for each label, or shares of all classes."""
    _, maps = evidence.first
    count, placement = len(evidence.labels), evidence.placement
    if placement is None or not maps.size or not np.isfinite(maps).all():
        return None
    size = (placement.input_height, placement.input_width)
    if maps.dtype.kind in "iu" and maps.shape[1:] in (size, (1, *size), (*size, 1)):
        return TaskChoice("segmentation", {}) if maps.min() >= 0 and maps.max() < count else None
    for layout, axis in (("NCHW", 1), ("NHWC", 3)):
        if (
            maps.ndim != 4
            or maps.dtype.kind != "f"
            or np.delete(maps.shape, [0, axis]).tolist() != list(size)
        ):
            continue
        options: dict[str, JsonValue] = {} if axis == 1 else {"layout": layout}
        if maps.shape[axis] == 1 and count in (1, 2):
            return TaskChoice("segmentation", options | {"scores": _score_kind(maps, "sigmoid")})
        if maps.shape[axis] > 1 and (maps.shape[axis] == count or _are_whole(np.moveaxis(maps, axis, -1))):
            return TaskChoice("segmentation", options)
    return None


def _propose_text(evidence: Evidence) -> TaskChoice | None:
    """Frames of single characters, of which the blank is the most frequent."""
    labels, (_, frames) = evidence.labels, evidence.first
    are_characters = len(labels) > 1 and sum(len(label) <= 1 for label in labels) > 0.9 * len(labels)
    if frames.ndim != 3 or not are_characters or not frames.size or not np.isfinite(frames).all():
        return None
    for layout, axis in (("NTC", 2), ("NCT", 1)):
        characters = frames.shape[axis]
        if characters - len(labels) not in (0, 1, 2):
            continue
        scores = np.moveaxis(frames, axis, -1)
        frequent = int(np.bincount(scores.argmax(axis=-1).ravel()).argmax())
        if frequent not in (0, characters - 1):
            return None
        options = {"blank": "last" if frequent else "first", "scores": _score_kind(scores, "softmax")}
        return TaskChoice("text", {**options, **({} if axis == 2 else {"layout": layout})})
    return None


def _propose_embedding(evidence: Evidence) -> TaskChoice | None:
    """Vectors of length 1 in any direction, or of an output with that name."""
    name, vectors = evidence.first
    if vectors.ndim != 2 or vectors.shape[1] < _MIN_DIMENSIONS or not np.isfinite(vectors).all():
        return None
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    has_length = bool(np.allclose(lengths, 1, atol=_SUM_ERROR)) and bool((vectors < 0).any(axis=1).all())
    return TaskChoice("embedding", {}) if has_length or _EMBEDDINGS.search(name) else None


def _are_whole(scores: NDArray[Any]) -> bool:
    """Whether the values of the last axis are shares that sum up to 1."""
    return bool(scores.min() >= 0 and np.allclose(scores.sum(axis=-1, dtype=np.float64), 1, atol=_SUM_ERROR))


def _score_kind(scores: NDArray[Any], logits: str) -> str:
    return "probabilities" if scores.min() >= 0 and scores.max() <= 1 else logits


def _to_json(options: Mapping[str, Any]) -> dict[str, JsonValue]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _propose_keypoints(evidence: Evidence) -> TaskChoice | None:
    """Poses by their columns, or points and maps of an output with such a name."""
    name, values = evidence.first
    if evidence.placement is None or values.dtype.kind != "f" or not values.size or not evidence.is_alone:
        return None
    if not np.isfinite(values).all():
        return None
    if (options := _find_poses(evidence, values)) is not None:
        return TaskChoice("keypoints", options)
    if not _POINTS.search(name):
        return None
    if values.ndim == 4 and min(values.shape[1:]) > 1:
        return _propose_heatmaps(values)
    points = values.reshape(len(values), *[size for size in values.shape[1:] if size != 1])
    if points.ndim == 2 and len(evidence.labels) > 1 and points.shape[1] % len(evidence.labels) == 0:
        points = points.reshape(len(points), len(evidence.labels), -1)
    if points.ndim != 3 or points.shape[2] not in (2, 3):
        return None
    if points.shape[1] == points.shape[2] != len(evidence.labels):
        return None  # a rotation
    row = "xy"
    is_share = _is_within(points[..., :2], -_MARGIN, 1 + _MARGIN)
    if points.shape[2] == 3:
        has_scores = _is_within(points[..., 2], 0, 1)
        if has_scores and is_share and points.shape[1] != _MOVENET_POINTS:
            return None  # which value comes first is not certain
        row = ("yxs" if is_share else "xys") if has_scores else "xyz"
    return TaskChoice("keypoints", {"row": row, **({"unit": "shares"} if is_share else {})})


def _find_poses(evidence: Evidence, values: NDArray[Any]) -> dict[str, JsonValue] | None:
    """Return the options of [N, 5 + points x 3, A]: a box in pixels, its score, and the points in pixels."""
    if values.ndim != 3 or max(values.shape[1:]) < _MIN_PLACES:
        return None
    rows = values if values.shape[1] > values.shape[2] else values.swapaxes(1, 2)
    rows = rows.reshape(-1, rows.shape[-1])
    width = next((width for width in (3, 2) if _states_points(evidence.metadata, rows.shape[1], width)), 0)
    if width:
        return {"form": "poses", "row": "xys"[:width]}
    is_pose = (
        rows.shape[1] >= 5 + 3 * _MIN_POINTS
        and (rows.shape[1] - 5) % 3 == 0
        and _is_within(rows[:, 4::3], 0, 1)
        and rows[:, :4].max() >= _MIN_EXTENT
        and all(rows[:, column::3].max(initial=0) >= _MIN_EXTENT for column in (5, 6))
    )
    return {"form": "poses", "row": "xys"} if is_pose else None


def _states_points(metadata: Mapping[str, str], values: int, width: int) -> bool:
    """Whether Ultralytics' exporter states points of so many numbers, which fill the rows."""
    points = re.fullmatch(r"\[(\d+), *(\d+)\]", metadata.get("kpt_shape", ""))
    return points is not None and int(points[2]) == width and 5 + int(points[1]) * width == values


def _propose_heatmaps(maps: NDArray[Any]) -> TaskChoice | None:
    axis = 1 if maps.shape[1] < min(maps.shape[2:]) else 3
    if maps.shape[axis] >= min(np.delete(maps.shape[1:], axis - 1)):
        return None
    options: dict[str, JsonValue] = {"form": "heatmaps", **({} if axis == 1 else {"layout": "NHWC"})}
    # Maps are trained towards 0 to 1 and may miss both ends by a little.
    is_score = _is_within(maps, -_MARGIN, 1 + _MARGIN)
    return TaskChoice("keypoints", options | ({} if is_score else {"scores": "sigmoid"}))


def _propose_sound_events(evidence: Evidence) -> TaskChoice | None:
    """Scores of a recording that need not sum up to 1, of one class or few, or of all labels."""
    name, scores = evidence.first
    if scores.ndim not in (2, 3) or scores.dtype.kind != "f" or not _is_within(scores, 0, 1):
        return None
    layouts = {"NTC": scores.shape[-1], "NCT": scores.shape[1]}
    # Labels tell the classes, else there are more frames than classes.
    layout = min(layouts, key=lambda layout: (layouts[layout] != len(evidence.labels), layouts[layout]))
    classes = layouts[layout]
    is_sound = evidence.is_sound or _VOICES.search(name) is not None
    if layout == "NCT" and classes == 1 != len(evidence.labels) and not _VOICES.search(name):
        return None  # a mask over frequencies looks like this
    is_few = classes <= _MAX_EVENTS or classes == len(evidence.labels)
    rows = scores if layout == "NTC" else np.moveaxis(scores, 1, -1)
    is_one_of = classes > 1 and (evidence.labelled or _are_whole(rows))
    if not is_sound or not is_few or is_one_of:
        return None
    return TaskChoice("sound_events", {} if layout == "NTC" else {"layout": layout})


def _propose_regression(evidence: Evidence) -> TaskChoice | None:
    """A single number that varies and is no score, of a model without classes."""
    name, values = evidence.first
    is_number = (
        values.dtype.kind == "f" and values.size == len(values) > 1 and len(evidence.probes.runs[0]) == 1
    )
    has_classes = evidence.labelled or len(evidence.labels) > 1 or _SCORES.search(name) is not None
    if not is_number or has_classes or not np.isfinite(values).all():
        return None
    return TaskChoice("regression", {}) if values.std() > 0 and not _is_within(values, 0, 1) else None


def _is_within(values: NDArray[Any], least: float, most: float) -> bool:
    return bool(values.size and values.min() >= least and values.max() <= most)


PROPOSERS: Final[tuple[Callable[[Evidence], TaskChoice | None], ...]] = (
    _propose_keypoints,
    _propose_detection,
    _propose_segmentation,
    _propose_text,
    _propose_sound_events,
    _propose_embedding,
    _propose_classification,
    _propose_regression,
)
"""Each function returns a task, or None if the outputs can mean something else. The first task counts."""
