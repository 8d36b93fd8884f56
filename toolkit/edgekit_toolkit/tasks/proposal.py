"""The task of a package: `--task`, or what the source model's outputs on samples mean.

Each row of `PROPOSERS` looks at the same evidence and proposes its task only if the outputs leave no doubt:

    outputs [1, 84, 8400], boxes in pixels, 80 labels -> detection:layout=scored
    outputs [1, 10], shares that sum up to 1          -> classification
    outputs [1, 10] of a model without labels         -> none, and a note
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tasks.kinds.detection import DetectionOptions
from edgekit_runtime.tasks.task import Context, Outputs, load_tasks, read_task
from edgekit_toolkit.evaluation.detections import find_layout
from edgekit_toolkit.evaluation.metrics import Probes, class_scores

AUTO: Final = "auto"
NONE: Final = "none"
_SUM_ERROR: Final = 1e-2
_MIN_DIMENSIONS: Final = 16  # of an embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a task is told by.

    Attributes:
        probes: outputs of the source model on some samples.
        labels: names of the classes, or none.
        labelled: whether the samples state a class.
        placement: that of a picture that fills the input; None if the input is no picture.
    """

    probes: Probes
    labels: tuple[str, ...] = ()
    labelled: bool = False
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class TaskDecision:
    """The task of a package.

    Attributes:
        choice: as the manifest has it; None if there is none.
        reason: why, as the end of a sentence.
    """

    choice: TaskChoice | None
    reason: str

    def describe(self) -> str:
        """Return one line for people: the task, the reason, and how to change it."""
        if self.choice is None:
            return f"no task: {self.reason}; --task NAME[:KEY=VALUE,...] states one"
        listed = f" ({', '.join(_write_options(self.choice))})" if self.choice.options else ""
        return f"{self.choice.name}{listed}, {self.reason}; --task changes it, --task none leaves it out"


def parse_task(text: str) -> TaskChoice | None:
    """Return the task that `NAME[:KEY=VALUE,…]` states; values are JSON or plain words. None for `none`.

    Raises:
        DataError: it is malformed, or there is no such task or option.
    """
    if text == NONE:
        return None
    name, _, listed = text.partition(":")
    options: dict[str, JsonValue] = {}
    for part in _split(listed):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise DataError(f"--task {text}: '{part}' is no KEY=VALUE")
        try:
            options[key.strip()] = json.loads(value)
        except ValueError:
            options[key.strip()] = value
    if name not in load_tasks():
        known = ", ".join((AUTO, NONE, *sorted(load_tasks())))
        raise DataError(f"--task {text}: there is no task '{name}', expected one of {known}")
    choice = TaskChoice(name, options)
    read_task(choice, DataError)
    return choice


def _split(listed: str) -> list[str]:
    """Return the parts between commas that are in no brackets."""
    parts, depth = [""], 0
    for character in listed:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part]


def write_task(choice: TaskChoice) -> str:
    """Return a task as `--task` takes it."""
    return ":".join([choice.name, *filter(None, [",".join(_write_options(choice))])])


def _write_options(choice: TaskChoice) -> list[str]:
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for key, value in choice.options.items()
    ]


def decide_task(requested: str, evidence: Evidence) -> TaskDecision:
    """Return the task of a package.

    Args:
        requested: `auto`, `none`, or a task as for `parse_task`.
        evidence: what the source model shows.

    Raises:
        DataError: the requested task is unknown or cannot read the outputs; the message says what can.
    """
    proposal = _propose(evidence)
    if requested == AUTO:
        if proposal is None:
            return TaskDecision(None, "the outputs do not tell for certain what they mean")
        return TaskDecision(proposal, "proposed by the outputs")
    choice = parse_task(requested)
    if choice is None:
        return TaskDecision(None, "as requested")
    if proposal is not None and proposal.name == choice.name:
        layout = proposal.options.get("layout")
        if choice.options.get("layout", layout) == layout:
            choice = TaskChoice(choice.name, {**proposal.options, **choice.options})
    try:
        _try(choice, evidence)
    except DataError as error:
        fitting = "no task is certain" if proposal is None else f"--task {write_task(proposal)} fits"
        shapes = {name: list(value.shape) for name, value in evidence.probes.runs[0].items()}
        raise DataError(f"--task {requested}: {error}; the outputs are {shapes}; {fitting}") from error
    return TaskDecision(choice, "as requested")


def _propose(evidence: Evidence) -> TaskChoice | None:
    for propose in PROPOSERS.values():
        choice = propose(evidence)
        if choice is not None:
            return choice
    return None


def _try(choice: TaskChoice, evidence: Evidence) -> None:
    """Decode the outputs of a sample.

    Raises:
        DataError: they are not those of the task.
    """
    task, options = read_task(choice, DataError)
    sample = first_row(evidence.probes.runs[0], evidence.probes.samples or 1)
    try:
        task.decode(sample, options, Context(labels=evidence.labels, placement=evidence.placement))
    except (KeyError, IndexError, ValueError) as error:  # of a decoder that presumes shapes
        raise DataError(f"task {choice.name} cannot read the outputs ({error})") from error


def first_row(outputs: Outputs, count: int) -> Outputs:
    """Return the outputs of the first of `count` samples that were run at once."""
    if count == 1:
        return outputs
    return {name: value[:1] if value.shape[:1] == (count,) else value for name, value in outputs.items()}


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
    maps = next(iter(evidence.probes.stacked.values()))
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
    labels, frames = evidence.labels, next(iter(evidence.probes.stacked.values()))
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
    """Vectors of length 1 in any direction."""
    vectors = next(iter(evidence.probes.stacked.values()))
    if vectors.ndim != 2 or vectors.shape[1] < _MIN_DIMENSIONS or not np.isfinite(vectors).all():
        return None
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    has_length = bool(np.allclose(lengths, 1, atol=_SUM_ERROR)) and bool((vectors < 0).any(axis=1).all())
    return TaskChoice("embedding", {}) if has_length else None


def _are_whole(scores: NDArray[Any]) -> bool:
    """Whether the values of the last axis are shares that sum up to 1."""
    return bool(scores.min() >= 0 and np.allclose(scores.sum(axis=-1, dtype=np.float64), 1, atol=_SUM_ERROR))


def _score_kind(scores: NDArray[Any], logits: str) -> str:
    return "probabilities" if scores.min() >= 0 and scores.max() <= 1 else logits


def _to_json(options: Mapping[str, Any]) -> dict[str, JsonValue]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


PROPOSERS: Final[dict[str, Callable[[Evidence], TaskChoice | None]]] = {
    "detection": _propose_detection,
    "segmentation": _propose_segmentation,
    "text": _propose_text,
    "embedding": _propose_embedding,
    "classification": _propose_classification,
}
"""Task -> proposes its options, or None where the outputs may be something else; the first one counts."""
