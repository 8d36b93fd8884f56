"""Several calls in one run of a model: which fit together, how they are merged, and how the answer is parted.

A batch is a promise that no row changes the answer of another. It is kept only for a model whose inputs and
outputs all have a free first dimension, and that was seen to keep it (`rows_are_independent`), or whose owner
says so.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.errors import BackendError, DataError, DeadlineError, EdgekitError
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.scheduling.priority_queue import Queued
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.tensors import Array

_ROUNDING: Final = 1e-3  # share of a row's largest value by which kernels for other sizes may differ
_EPSILONS: Final = 16.0  # of a dtype: what sums of some hundred such values in another order differ by
# To either side of the given row: beside a row of 16 times its size, the 256 steps of one 8-bit scale leave
# it 8 or 16, and its answer is some per cent off.
_FACTOR: Final = 16.0


def has_free_rows(session: Session) -> bool:
    """Return whether the first dimension of every input and output is free."""
    return all(spec.shape and isinstance(spec.shape[0], str) for spec in (*session.inputs, *session.outputs))


def rows_are_independent(session: Session, inputs: Mapping[str, Array], seed: int = 0) -> bool:
    """Return whether a session answers rows beside much larger and smaller ones as it answers each alone.

    Rows of another size are what shows a scale, a norm or an extreme that is taken over the whole batch.
    Integers and bools stay within the values that the given rows hold, as they may be indices. Float outputs
    may differ by 0.1 % of the largest value of their own row, since engines choose other kernels for other
    numbers of rows; integers may not.

    Args:
        session: to try; it runs four times.
        inputs: input name -> array of one row or more; the first row of each is judged, at most two others
            run beside it.
        seed: of the order in which a row's values are mixed.

    Raises:
        DataError: the inputs do not fit.
    """
    if not has_free_rows(session) or any(len(array) == 0 for array in inputs.values()):
        return False
    judged, company = _vary(inputs, np.random.default_rng(seed))
    # On both sides, so that what is carried from row to row shows whichever way it goes.
    half = len(company) // 2
    rows = [*company[:half], *judged, *company[half:]]
    try:
        together = session.run(_concatenate(rows))
    except BackendError:
        return False
    usual: dict[str, Array] = {}
    for index, row in enumerate(judged, half):
        for name, alone in session.run(row).items():
            if len(alone) != 1 or len(together[name]) != len(rows):
                return False
            if not _agree(alone, together[name][index : index + 1], usual.setdefault(name, alone)):
                return False
    return True


_Row: TypeAlias = dict[str, Array]


def _vary(
    inputs: Mapping[str, Array], random: "np.random.Generator"
) -> tuple[tuple[_Row, ...], tuple[_Row, ...]]:
    """Return rows to judge, the first of which is the given one, and rows to run beside them."""
    first = {name: array[:1] for name, array in inputs.items()}
    mixed = {name: random.permutation(a.reshape(-1)).reshape(a.shape) for name, a in first.items()}

    def scale(row: _Row, factor: float, pick: "Callable[[Array], Any] | None" = None) -> _Row:
        """Return a row of other size; `pick` returns what integers become, which else stay."""
        scaled = {}
        for name, array in row.items():
            if array.dtype.kind != "f":
                scaled[name] = array if pick is None else np.full_like(array, pick(inputs[name]))
                continue
            with np.errstate(over="ignore"):  # float16 ends at 65504; infinity is large, too
                scaled[name] = (array if array.any() else np.ones_like(array)) * array.dtype.type(factor)
        return scaled

    others = [{name: a[i : i + 1] for name, a in inputs.items()} for i in range(1, _fewest_rows(inputs))]
    judged = first, scale(mixed, 1 / _FACTOR), scale(first, 0.0, np.min)
    large = scale(first, _FACTOR, np.max), scale(mixed, -_FACTOR, np.min)
    return judged, (large[0], *others, large[1])


def _fewest_rows(inputs: Mapping[str, Array]) -> int:
    return min(3, *(len(array) for array in inputs.values()))


def _agree(alone: Array, together: Array, usual: Array) -> bool:
    """Whether one row is answered alike; `usual` is what the session answers to an ordinary one."""
    if alone.shape != together.shape:
        return False
    if alone.dtype.kind != "f":
        return bool(np.array_equal(alone, together))
    # A row whose answer is next to nothing has it as a difference of values of an ordinary row's size.
    reach = _ROUNDING * _largest(alone) + _EPSILONS * float(np.finfo(alone.dtype).eps) * _largest(usual)
    return bool(np.allclose(together, alone, rtol=0.0, atol=reach, equal_nan=True))


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))


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


RunOne: TypeAlias = Callable[[Session, Mapping[str, Array]], Answer]


class Batch:
    """Calls of one kind, and their run in one session.

    Attributes:
        session: to run, by nobody else meanwhile.
        queued: the calls.
        estimate_s: how long it is expected to take.
        ran: what the run brought, once it has been.
    """

    __slots__ = ("_clock", "_run_one", "_trim", "estimate_s", "queued", "ran", "session")

    def __init__(
        self,
        session: Session,
        queued: Sequence[Queued],
        estimate_s: float,
        clock: Callable[[], float],
        *,
        run_one: RunOne = run_one,
        trim: Callable[[Session], None] | None = None,
    ) -> None:
        """Make a batch that has not run.

        Args:
            session: to run.
            queued: calls of one kind, at least one.
            estimate_s: how long it is expected to take.
            clock: that of the calls' deadlines.
            run_one: the function of that name, or a copy of it.
            trim: gives back what the session keeps after a run as large as this one, or None.
        """
        self._run_one, self._trim = run_one, trim
        self.session, self.queued, self.estimate_s, self._clock = session, queued, estimate_s, clock
        self.ran: Ran

    @property
    def seconds(self) -> float:
        """How long the run took."""
        return self.ran.merge_s + self.ran.infer_s + self.ran.split_s

    def run(self) -> None:
        """Run all calls, and give back what a large run took; raises nothing."""
        self._run()
        if self._trim is not None:
            self._trim(self.session)

    def _run(self) -> None:
        """Run all calls together.

        Where that fails, or the outputs do not have the rows of the inputs, each call runs on its own, so
        that one which the engine refuses fails no other.
        """
        clock, calls = self._clock, [queued.call for queued in self.queued]
        began_s = clock()
        if len(calls) == 1:
            self.ran = Ran(
                (self._run_one(self.session, calls[0].inputs),), began_s, 0.0, clock() - began_s, 0.0
            )
            return
        try:
            merged = _concatenate([call.inputs for call in calls])
            merged_s = clock()
            outputs = self._run_one(self.session, merged)
            ran_s = clock()
            rows = [queued.rows for queued in self.queued]
            answers = None if isinstance(outputs, EdgekitError) else _split(outputs, rows)
        except Exception:  # whatever it is, it comes again below, with the call that it belongs to
            answers = None
        if answers is not None:
            self.ran = Ran(answers, began_s, merged_s - began_s, ran_s - merged_s, clock() - ran_s)
            return
        apart = tuple(self._run_in_time(call) for call in calls)
        self.ran = Ran(apart, began_s, 0.0, clock() - began_s, 0.0, is_apart=True)

    def _run_in_time(self, call: Call) -> Answer:
        if call.deadline_s is not None and self._clock() >= call.deadline_s:
            return DeadlineError("the call had not begun by its deadline; give it more time")
        return self._run_one(self.session, call.inputs)


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
