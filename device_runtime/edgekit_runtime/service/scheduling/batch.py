"""Runs several calls in one batch. Finds matching calls, merges their inputs and splits the outputs.

No row of a batch may affect the outputs of other rows. The first dimension of all inputs and outputs must be
free, and a test (`rows_are_independent`) or the owner of the model must confirm that rows are independent.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

from edgekit_runtime.errors import DataError, DeadlineError, EdgekitError
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.scheduling.priority_queue import Queued
from edgekit_runtime.sessions.row_independence import concatenate
from edgekit_runtime.sessions.session import Session, cancel_runs
from edgekit_runtime.tensors import Array


def find_kind(session: Session, inputs: Mapping[str, Array]) -> tuple[Hashable | None, int]:
    """Return the kind of a call and its number of rows. A batch contains only calls of one kind.

    If the inputs have no rows or different numbers of rows, the kind is None and the number is 1. Such a call
    is not batched.

    Raises:
        DataError: The inputs do not match the session. In a batch, they would make other calls fail too.
    """
    if inputs.keys() != {spec.name for spec in session.inputs}:
        raise DataError(f"got inputs {sorted(inputs)}, expected {sorted(s.name for s in session.inputs)}")
    for spec in session.inputs:
        spec.check(inputs[spec.name])
    counts = {len(array) for array in inputs.values()}
    if len(counts) != 1 or 0 in counts:
        return None, 1
    return tuple(inputs[spec.name].shape[1:] for spec in session.inputs), counts.pop()


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of running a batch.

    Attributes:
        answers: The outputs or the error of each call, in the order of the calls.
        began_s: The start time, on the scheduler's clock.
        merge_s: The seconds spent on merging the inputs, or on preparing the inputs in `Call.work`.
        infer_s: The seconds spent in the engine.
        split_s: The seconds spent on splitting the outputs, or on decoding the outputs in `Call.work`.
        is_apart: Whether the batch failed, so that its calls ran again one by one.
        is_refused: Whether the engine did not run, because the inputs are wrong or the run was stopped.
    """

    answers: tuple[Answer, ...]
    began_s: float
    merge_s: float
    infer_s: float
    split_s: float
    is_apart: bool = False
    is_refused: bool = False


RunOne: TypeAlias = Callable[[Session, Mapping[str, Array]], Answer]


class Batch:
    """Calls of one kind that run together in one session.

    Attributes:
        session: The session, which only this batch uses until it ends.
        estimate_s: The expected duration of the run.
        ran: The result of the run. It is set when `run` ends.
        stop_error: The error that answers the calls if the run is stopped, or None.
        stops: How often `stop` was called.
        is_abandoned: Whether the calls were answered with an error while the run continues.
    """

    __slots__ = (
        "_clock",
        "_run_one",
        "_trim",
        "estimate_s",
        "is_abandoned",
        "queued",
        "ran",
        "session",
        "stop_error",
        "stops",
    )

    def __init__(
        self,
        session: Session,
        queued: Sequence[Queued],
        estimate_s: float,
        clock: Callable[[], float],
        *,
        run_one: RunOne,
        trim: Callable[[Session], None] | None = None,
    ) -> None:
        """Create a batch that has not run.

        Args:
            session: The session to run.
            queued: The calls, which have the same kind. There is at least one.
            estimate_s: The expected duration of the run.
            clock: The clock of the deadlines.
            run_one: Returns the answer of a session to one call. It does not raise.
            trim: Frees the memory that the session keeps after a run of this size, or None.
        """
        self._run_one, self._trim = run_one, trim
        self.session, self.queued, self.estimate_s, self._clock = session, queued, estimate_s, clock
        self.ran: BatchResult
        self.stop_error: EdgekitError | None = None
        self.stops = 0
        self.is_abandoned = False

    def stop(self, error: EdgekitError) -> None:
        """Ask the engine to stop the run. Its calls are answered with `error`.

        Call this repeatedly on the event loop until the run has ended.
        """
        self.stop_error = self.stop_error or error
        self.stops += 1
        cancel_runs(self.session)

    @property
    def seconds(self) -> float:
        """The duration of the run."""
        return self.ran.merge_s + self.ran.infer_s + self.ran.split_s

    def run(self) -> None:
        """Run all calls, set `ran`, and free the extra memory of a large run. This does not raise."""
        self._run()
        if self._trim is not None:
            self._trim(self.session)

    def _run(self) -> None:
        """Run all calls together.

        If that fails, or the outputs do not have as many rows as the inputs, each call runs alone. So a call
        that the engine refuses does not make other calls fail.
        """
        clock, calls = self._clock, [queued.call for queued in self.queued]
        if len(calls) == 1:
            self.ran = self._run_alone(calls[0])
            return
        began_s = clock()
        try:
            merged = concatenate([call.inputs for call in calls])
            merged_s = clock()
            outputs = self._run_one(self.session, merged)
            ran_s = clock()
            rows = [queued.rows for queued in self.queued]
            answers = None if isinstance(outputs, EdgekitError) else _split(outputs, rows)
        except Exception:  # it is raised again below, with the call that it belongs to
            answers = None
        if answers is not None:
            self.ran = BatchResult(answers, began_s, merged_s - began_s, ran_s - merged_s, clock() - ran_s)
            return
        apart = tuple(self._run_in_time(call) for call in calls)
        self.ran = BatchResult(apart, began_s, 0.0, clock() - began_s, 0.0, is_apart=True)

    def _run_alone(self, call: Call) -> BatchResult:
        times_s = [self._clock()]

        def run(inputs: Mapping[str, Array]) -> Answer:
            if self.stop_error is not None:
                return self.stop_error
            times_s.append(self._clock())
            answer = self._run_one(self.session, inputs)
            times_s.append(self._clock())
            return answer

        answer = run(call.inputs) if call.work is None else call.work(run)
        if len(times_s) == 1:
            return BatchResult((answer,), times_s[0], self._clock() - times_s[0], 0.0, 0.0, is_refused=True)
        began_s, run_s, ended_s = times_s
        return BatchResult((answer,), began_s, run_s - began_s, ended_s - run_s, self._clock() - ended_s)

    def _run_in_time(self, call: Call) -> Answer:
        if self.stop_error is not None:
            return self.stop_error
        if call.deadline_s is not None and self._clock() >= call.deadline_s:
            return DeadlineError("the call had not begun by its deadline; give it more time")
        return self._run_one(self.session, call.inputs)


def _split(outputs: Mapping[str, Array], rows: Sequence[int]) -> tuple[Answer, ...] | None:
    """Return views of the outputs for each call, or None if the number of rows is wrong."""
    total = sum(rows)
    if any(array.ndim == 0 or len(array) != total for array in outputs.values()):
        return None
    answers, start = [], 0
    for count in rows:
        answers.append({name: array[start : start + count] for name, array in outputs.items()})
        start += count
    return tuple(answers)
