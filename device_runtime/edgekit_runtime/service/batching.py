"""Several calls in one run of a model: which fit together, how they are merged, and how the answer is parted.

A batch is a promise that no row changes the answer of another. It is kept only for a model whose inputs and
outputs all have a free first dimension, and that was seen to keep it (`rows_are_independent`), or whose owner
says so.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgekit_runtime.errors import BackendError, DataError, DeadlineError, EdgekitError
from edgekit_runtime.service.call import Answer, Call
from edgekit_runtime.service.waiting import Queued
from edgekit_runtime.sessions.session import Array, Session

_ROUNDING: Final = 1e-3  # share of an output's largest value by which kernels for other sizes may differ


def has_free_rows(session: Session) -> bool:
    """Return whether the first dimension of every input and output is free."""
    return all(spec.shape and isinstance(spec.shape[0], str) for spec in (*session.inputs, *session.outputs))


def rows_are_independent(session: Session, inputs: Mapping[str, Array], seed: int = 0) -> bool:
    """Return whether a session answers rows that run together as it answers each alone.

    Further rows are the given ones with their values in another order, so that they stay within what the
    input may hold. Float outputs may differ by 0.1 % of the largest value, since engines choose other kernels
    for other sizes; integers may not.

    Args:
        session: to try; it runs four times.
        inputs: input name -> array of one row or more; the first row of each is used.
        seed: of the orders.

    Raises:
        DataError: the inputs do not fit.
    """
    if not has_free_rows(session) or any(len(array) == 0 for array in inputs.values()):
        return False
    orders = np.random.default_rng(seed)
    first = {name: array[:1] for name, array in inputs.items()}
    rows = [first, *({name: _shuffle(a, orders) for name, a in first.items()} for _ in range(2))]
    try:
        together = session.run(_concatenate(rows))
    except BackendError:
        return False
    for index, row in enumerate(rows):
        for name, alone in session.run(row).items():
            if len(alone) != 1 or len(together[name]) != len(rows):
                return False
            if not _agree(alone, together[name][index : index + 1]):
                return False
    return True


def _shuffle(array: Array, orders: "np.random.Generator") -> Array:
    shuffled: Array = orders.permutation(array.reshape(-1)).reshape(array.shape)
    return shuffled


def _agree(alone: Array, together: Array) -> bool:
    if alone.shape != together.shape:
        return False
    if alone.dtype.kind != "f":
        return bool(np.array_equal(alone, together))
    reach = _ROUNDING * float(np.max(np.abs(alone), initial=0.0))
    return bool(np.allclose(together, alone, rtol=0.0, atol=reach))


def find_kind(session: Session, inputs: Mapping[str, Array]) -> tuple[Hashable | None, int]:
    """Return what calls of one batch have in common, and the number of rows.

    The kind is None, which fits no other, where inputs disagree about the rows or have none.

    Args:
        session: with free rows.
        inputs: of one call.

    Raises:
        DataError: the inputs do not fit the session; in a batch they would fail the others' calls too.
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
class Ran:
    """What a run brought.

    Attributes:
        answers: one for each call.
        began_s: when it began, on the clock given.
        merge_s, infer_s, split_s: seconds in which the batch was made, in the engine, and in which the
            outputs were parted.
        is_apart: whether the calls of a batch ran one by one, since together they failed.
    """

    answers: tuple[Answer, ...]
    began_s: float
    merge_s: float
    infer_s: float
    split_s: float
    is_apart: bool = False


class Batch:
    """Calls of one kind, and their run in one session.

    Attributes:
        session: to run, by nobody else meanwhile.
        queued: the calls.
        estimate_s: how long it is expected to take.
        ran: what the run brought, once it has been.
    """

    __slots__ = ("_clock", "estimate_s", "queued", "ran", "session")

    def __init__(
        self, session: Session, queued: Sequence[Queued], estimate_s: float, clock: Callable[[], float]
    ) -> None:
        """Make a batch that has not run.

        Args:
            session: to run.
            queued: calls of one kind, at least one.
            estimate_s: how long it is expected to take.
            clock: that of the calls' deadlines.
        """
        self.session, self.queued, self.estimate_s, self._clock = session, queued, estimate_s, clock
        self.ran: Ran

    @property
    def seconds(self) -> float:
        """How long the run took."""
        return self.ran.merge_s + self.ran.infer_s + self.ran.split_s

    def run(self) -> None:
        """Run all calls together; raises nothing.

        Where that fails, or the outputs do not have the rows of the inputs, each call runs on its own, so
        that one which the engine refuses fails no other.
        """
        clock, calls = self._clock, [queued.call for queued in self.queued]
        began_s = clock()
        if len(calls) == 1:
            self.ran = Ran((run_one(self.session, calls[0].inputs),), began_s, 0.0, clock() - began_s, 0.0)
            return
        try:
            merged = _concatenate([call.inputs for call in calls])
            merged_s = clock()
            outputs = self.session.run(merged)
            ran_s = clock()
            answers = _split(outputs, [queued.rows for queued in self.queued])
        except Exception:  # whatever it is, it comes again below, with the call that it belongs to
            answers = None
        if answers is not None:
            self.ran = Ran(answers, began_s, merged_s - began_s, ran_s - merged_s, clock() - ran_s)
            return
        apart = tuple(_run_in_time(self.session, call, clock) for call in calls)
        self.ran = Ran(apart, began_s, 0.0, clock() - began_s, 0.0, is_apart=True)


def run_one(session: Session, inputs: Mapping[str, Array]) -> Answer:
    """Return what a session answers to one call; raises nothing."""
    try:
        return session.run(inputs)
    except EdgekitError as error:
        return error
    except Exception as cause:  # of a third party's backend; the service must outlive it
        failure = BackendError(f"the backend failed with {type(cause).__name__}: {cause}")
        failure.__cause__ = cause
        return failure


def _run_in_time(session: Session, call: Call, clock: Callable[[], float]) -> Answer:
    if call.deadline_s is not None and clock() >= call.deadline_s:
        return DeadlineError("the call had not begun by its deadline; give it more time")
    return run_one(session, call.inputs)


def _concatenate(rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _split(outputs: Mapping[str, Array], rows: Sequence[int]) -> tuple[Answer, ...] | None:
    """Return views of the outputs for each call, or None where the outputs have other rows."""
    total = sum(rows)
    if any(array.ndim == 0 or len(array) != total for array in outputs.values()):
        return None
    answers, start = [], 0
    for count in rows:
        answers.append({name: array[start : start + count] for name, array in outputs.items()})
        start += count
    return tuple(answers)
