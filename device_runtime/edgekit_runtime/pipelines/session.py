"""Runs a pipeline as one session. The input is an image or sound, the output is one answer as JSON bytes.

    image uint8 [1, H, W, 3] -> detector -> crops -> kind, one batch -> answer_json uint8 [bytes]

The stages run one after the other in the thread that calls `run`, and pass images in memory. Each stage has a
list of items. An item holds an image and the answer for this image. If a stage takes crops, each of its items
comes from one box in an answer of its input stage.
"""

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import BackendError, DataError, PackageError
from edgekit_runtime.package.pipeline import SOURCE, Condition, Pipeline, Stage
from edgekit_runtime.pipelines.member import PipelineMember, naming_stage
from edgekit_runtime.preprocessing.audio import AudioRules
from edgekit_runtime.preprocessing.images import take_image
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.session import Session, cancel_runs, share_session
from edgekit_runtime.tasks.answerer import Media
from edgekit_runtime.tasks.task import Decoded, Task
from edgekit_runtime.tensors import Array, TensorSpec

IMAGE: Final = TensorSpec("image", "uint8", (1, "height", "width", 3))
SOUND: Final = TensorSpec("sound", "float32", (1, "samples"))
ANSWER: Final = TensorSpec("answer_json", "uint8", ("bytes",))

_SHOWN_CLASSES: Final = 5  # in an answer, as in `classification`

_Entry: TypeAlias = dict[str, Any]
_Area: TypeAlias = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One picture or piece of sound with the answer to it.

    Attributes:
        area: left, top, right and bottom of the picture in the source; None for all of it.
        holder: where the answer stands: an entry, or the answer of the stage before.
    """

    area: _Area
    holder: Decoded
    answer: Decoded


class PipelineSession:
    """A session that runs a pipeline.

    Attributes:
        inputs: `IMAGE` or `SOUND`.
        outputs: `ANSWER`.
        sessions: A dict from the name of each stage with a model to its session.
        sample_rate: The sample rate of the sound in Hz, or None for images.
        is_concurrent: Whether several threads may call `run`.
    """

    def __init__(self, pipeline: Pipeline, members: Mapping[str, PipelineMember]) -> None:
        """Create a session that owns the members from now on.

        Raises:
            PackageError: Tasks or preprocessing do not fit the links between stages.
        """
        self._pipeline, self._members = pipeline, members
        self._stops = 0
        self._tasks: dict[str, Task] = {}
        for stage in pipeline.stages:
            with naming_stage(stage.name):
                self._tasks[stage.name] = self._check_stage(stage)
        self._combined = {name for stage in pipeline.stages for name in stage.stages}
        of_source = [stage.name for stage in pipeline.stages if stage.input == SOURCE]
        self._output_names = [name for name in of_source if name in pipeline.output]
        rates = {
            member.rules.sample_rate if isinstance(member.rules, AudioRules) else None
            for member in members.values()
        }
        if len(rates) > 1:
            raise PackageError("the members take pictures and sound, or sound of several sample rates")
        (self.sample_rate,) = rates
        self.inputs: tuple[TensorSpec, ...] = (IMAGE if self.sample_rate is None else SOUND,)
        self.outputs: tuple[TensorSpec, ...] = (ANSWER,)
        self.is_concurrent = all(
            getattr(session, "is_concurrent", False) for session in self.sessions.values()
        )

    @property
    def sessions(self) -> dict[str, Session]:
        return {name: member.session for name, member in self._members.items()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        (spec,) = self.inputs
        if inputs.keys() != {spec.name}:
            raise DataError(f"got inputs {sorted(inputs)}, expected ['{spec.name}']")
        array = inputs[spec.name]
        spec.check(array)
        if not array.size:
            raise DataError(f"tensor '{spec.name}': is empty, {list(array.shape)}")
        answer = self._answer(take_image(array[0]) if self.sample_rate is None else array[0])
        try:
            return {ANSWER.name: np.frombuffer(encode_json(answer), np.uint8)}
        except ValueError as cause:
            raise BackendError(f"backend 'pipeline': the answer holds NaN or infinity: {cause}") from cause

    def share(self) -> "PipelineSession":
        """Return a second session with the same models. `cancel_runs` on one does not affect the other."""
        shared = copy.copy(self)
        shared._members = {
            name: member.with_session(share_session(member.session)) for name, member in self._members.items()
        }
        return shared

    def cancel_runs(self) -> None:
        """Make runs in progress fail. Later runs are not affected."""
        self._stops += 1
        for session in self.sessions.values():
            cancel_runs(session)

    def interrupt(self) -> None:
        """Make runs in progress fail. If an engine implements `interrupt`, later runs fail as well."""
        self._stops += 1
        for session in self.sessions.values():
            interrupt: Callable[[], None] = getattr(session, "interrupt", lambda: None)
            interrupt()

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()

    def _check_stage(self, stage: Stage) -> Task:
        """Return the task of a stage, whose input stands before it."""
        if stage.input != SOURCE:
            before = self._tasks[stage.input]
            if stage.crop and not before.has_boxes:
                raise PackageError(f"takes crops, but '{stage.input}' ({before.title}) gives no boxes")
            if stage.when and not before.entries:
                raise PackageError(f"needs labels, but '{stage.input}' ({before.title}) gives none")
        if stage.ensemble is None:
            return self._members[stage.name].task
        tasks = {name: self._tasks[name] for name in stage.stages}
        first = next(iter(tasks.values()))
        if any(task is not first for task in tasks.values()) or first.has_boxes or not first.entries:
            titles = ", ".join(f"'{name}' is {task.title}" for name, task in tasks.items())
            raise PackageError(f"combines classes of one task, but {titles}")
        return first

    def _answer(self, source: Media) -> Decoded:
        root: Decoded = {}
        items = {SOURCE: [_Item(None, {}, root)]}
        selected: dict[tuple[object, ...], list[_Item]] = {}
        for stage in self._pipeline.stages:
            with naming_stage(stage.name):
                if stage.selection not in selected:
                    selected[stage.selection] = _select(
                        stage, items[stage.input], self._tasks, getattr(source, "size", (0, 0))
                    )
                pictures = selected[stage.selection]
                if stage.ensemble is None:
                    answers = self._run_member(stage, source, [item.area for item in pictures])
                else:
                    answers = self._combine(stage, items)
            items[stage.name] = [
                _Item(item.area, item.holder, answer) for item, answer in zip(pictures, answers, strict=True)
            ]
        for name in self._pipeline.output:
            for item in items[name]:
                item.holder[name] = item.answer
        alone: Any = root[self._output_names[0]]
        return root if len(self._output_names) > 1 else alone

    def _combine(self, stage: Stage, items: Mapping[str, Sequence[_Item]]) -> list[Decoded]:
        parts = [[item.answer for item in items[name]] for name in stage.stages]
        entries, how = self._tasks[stage.name].entries, stage.ensemble or ""
        return [_combine_answers(answers, entries, how) for answers in zip(*parts, strict=True)]

    def _run_member(self, stage: Stage, source: Media, areas: Sequence[_Area]) -> list[Decoded]:
        cuts = self._cut_all(source, areas)
        return self._members[stage.name].answer(cuts, all_entries=stage.name in self._combined)

    def _cut_all(self, source: Media, areas: Sequence[_Area]) -> Iterator[tuple[Media, tuple[int, int]]]:
        """Yield one crop after the other, so that the run can be stopped: each may be the whole picture."""
        stops = self._stops
        for area in areas:
            if self._stops != stops:
                raise BackendError("the run was stopped between two crops")
            yield _cut(source, area)


def _cut(source: Media, area: _Area) -> tuple[Media, tuple[int, int]]:
    """Return the picture of an area, or all of the source, and its position."""
    if area is None or area == (0, 0, *getattr(source, "size", ())):
        return source, (0, 0)
    return source.crop(area), area[:2]  # type: ignore[union-attr]  # sound has no areas


def _select(
    stage: Stage, inputs: Sequence[_Item], tasks: Mapping[str, Task], size: tuple[int, int]
) -> list[_Item]:
    """Return the pictures that a stage takes, without answers; `size` is that of the source's picture."""
    chosen: list[tuple[_Entry, _Item]] = []
    if stage.crop or stage.when:
        field = tasks[stage.input].entries
        pairs = ((entry, item) for item in inputs for entry in _read_entries(item.answer, field))
        chosen = [(entry, item) for entry, item in pairs if _meets(entry, stage.when)]
    if not stage.crop:
        # Each picture once, for whichever of its entries.
        passed = {id(item): item for _, item in chosen}.values() if stage.when else inputs
        return [_Item(item.area, item.answer, {}) for item in passed]
    chosen.sort(key=lambda pair: -pair[0]["score"])
    areas = (
        (_find_area(entry["box"], stage.margin, item.area or (0, 0, *size)), entry) for entry, item in chosen
    )
    crops = (_Item(area, entry, {}) for area, entry in areas if area is not None)
    return list(itertools.islice(crops, stage.max_crops))


def _read_entries(answer: Decoded, field: str) -> list[_Entry]:
    entries: Any = answer[field]
    return list(entries)


def _meets(entry: _Entry, condition: Condition | None) -> bool:
    if condition is None:
        return True
    is_named = not condition.label or entry["label"] in condition.label
    return is_named and bool(entry["score"] >= condition.min_score)


def _find_area(
    box: Sequence[float], margin: float, within: tuple[int, int, int, int]
) -> tuple[int, int, int, int] | None:
    """Return the whole pixels of a box and its margin within an area; None if nothing is left."""
    left, top, right, bottom = map(float, box)
    x, y = margin * (right - left), margin * (bottom - top)
    sides = (left - x, top - y, right + x, bottom + y)
    if not all(map(math.isfinite, sides)) or right <= left or bottom <= top:
        return None
    begin_x, begin_y = max(within[0], math.floor(sides[0])), max(within[1], math.floor(sides[1]))
    end_x, end_y = min(within[2], math.ceil(sides[2])), min(within[3], math.ceil(sides[3]))
    return (begin_x, begin_y, end_x, end_y) if begin_x < end_x and begin_y < end_y else None


def _combine_answers(answers: Sequence[Decoded], field: str, how: str) -> Decoded:
    """Return one answer for those of several classifiers: the mean of their scores, or the share of votes.

    `field` is their list of labels and scores, the best first; `how` is one of `ENSEMBLES`.
    """
    scores: dict[tuple[str, int], float] = defaultdict(float)
    for answer in answers:
        entries: Any = answer[field]
        for entry in entries[:1] if how == "vote" else entries:
            scores[entry["label"], entry["index"]] += (1.0 if how == "vote" else entry["score"]) / len(
                answers
            )
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    return {
        field: [
            {"label": label, "index": index, "score": round(score, 6)}
            for (label, index), score in ranked[:_SHOWN_CLASSES]
        ]
    }
