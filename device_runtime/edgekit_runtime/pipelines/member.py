"""One model of a pipeline, which turns images or sound into answers."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import EdgekitError, PackageError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.preprocessing.rules import MediaRules
from edgekit_runtime.sessions.backends import open_preferred
from edgekit_runtime.sessions.row_independence import concatenate, rows_are_independent
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.tasks.answerer import Answerer, Media, Prepared, open_answerer
from edgekit_runtime.tasks.outputs import MAX_ENTRIES
from edgekit_runtime.tasks.task import Decoded, Outputs, Task
from edgekit_runtime.tensors import find_shapes

MAX_BATCH: Final = 16
"""The most crops that run together. More would take memory and save no time."""

_ALL_ENTRIES: Final[Mapping[str, JsonValue]] = {"top": MAX_ENTRIES, "min_score": 0}


class PipelineMember:
    """The preprocessing, session and task of one stage."""

    __slots__ = ("_answerer", "_batches", "_whole_answerer", "rules", "session", "task")

    def __init__(self, answerer: Answerer, session: Session, *, batches: bool) -> None:
        """Create a member. `batches` says whether samples in a batch get the same answers as alone."""
        self._answerer, self.session, self._batches = answerer, session, batches
        if answerer.rules is None or answerer.task is None:
            lack = "task" if answerer.task is None else "preprocessing"
            raise PackageError(f"its package states no {lack}; package it with --{lack}")
        self.rules: MediaRules = answerer.rules
        self.task: Task = answerer.task
        option_names = self.task.options.__dataclass_fields__
        self._whole_answerer = answerer.with_options(
            {name: value for name, value in _ALL_ENTRIES.items() if name in option_names}
        )

    def with_session(self, session: Session) -> "PipelineMember":
        """Return a copy of this member that uses another session of the same model."""
        return PipelineMember(self._answerer, session, batches=self._batches)

    def answer(
        self, media: Iterable[tuple[Media, tuple[int, int]]], *, all_entries: bool = False
    ) -> list[Decoded]:
        """Return the answer for each image or sound.

        Args:
            media: Images or sounds, each with the (x, y) of its upper left corner in the source image. Use
                (0, 0) for sounds.
            all_entries: Whether to include entries that the task's options would leave out.

        Raises:
            DataError: An image or sound does not fit the model, or an output does not fit the task.
            BackendError: The engine failed.
        """
        answerer = self._whole_answerer if all_entries else self._answerer
        remaining = iter(media)
        answers: list[Decoded] = []
        while prepared := [
            self._answerer.prepare_decoded(sample, origin)
            for sample, origin in itertools.islice(remaining, MAX_BATCH if self._batches else 1)
        ]:
            for _, group in itertools.groupby(prepared, key=lambda sample: find_shapes(sample.inputs)):
                samples = list(group)
                answers += [
                    answerer.answer(outputs, sample.placement)
                    for outputs, sample in zip(self._run(samples), samples, strict=True)
                ]
        return answers

    def _run(self, samples: Sequence[Prepared]) -> list[Outputs]:
        if len(samples) == 1:
            return [self.session.run(samples[0].inputs)]
        batch = self.session.run(concatenate([sample.inputs for sample in samples]))
        return [
            {name: values[row : row + 1] for name, values in batch.items()} for row in range(len(samples))
        ]


def open_member(name: str, package: OpenedPackage, threads: int | None = None) -> PipelineMember:
    """Open the model of a package as the member `name` of a pipeline. Errors name the stage.

    Raises:
        EdgekitError: `open_preferred` or `open_answerer` failed, or the task or preprocessing is missing.
    """
    with naming_stage(name):
        answerer = open_answerer(package)
        session = open_preferred(package, threads)[1]
        try:
            batches = rows_are_independent(session, read_golden_inputs(package))
            return PipelineMember(answerer, session, batches=batches)
        except BaseException:
            session.close()
            raise


@contextmanager
def naming_stage(name: str) -> Iterator[None]:
    """Prefix the messages of errors raised in the block with the name of a stage."""
    try:
        yield
    except EdgekitError as error:
        error.args = (f"stage '{name}': {error}",)
        raise
