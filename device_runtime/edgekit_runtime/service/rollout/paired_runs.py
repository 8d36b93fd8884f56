"""Runs both versions of a model on the same inputs to compare their answers and latencies.

The calls of a canary alone do not show which version is slower, because queues, caches and other work differ
from call to call. Here, both versions run on one thread in random order, one directly after the other, so
that disturbances affect both equally. The runs delay no client and do not count as requests.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from asyncio import TimerHandle
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.rollout.comparison import Compare, Outputs, all_finite
from edgekit_runtime.service.scheduling.call import Answer
from edgekit_runtime.service.scheduling.scheduler import run_one
from edgekit_runtime.sessions.session import Session, cancel_runs, share_session
from edgekit_runtime.tensors import Array

# If both runs together take less, they are repeated and only the repetition counts: the version with fewer
# calls is no longer in the processor's caches, which makes up much of a short run.
_SHORT_S: Final = 0.002

_STOP_AGAIN_S: Final = 0.25

_NO_LOCK: Final = contextlib.nullcontext()  # for sessions whose runs do not wait for one another

_logger = logging.getLogger(__name__)

Inputs: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Pair:
    """The result of running both versions on the same inputs.

    Attributes:
        agreement: The agreement of the two answers, 0 to 1.
        current_s: The duration of the current version's run in seconds.
        candidate_s: The duration of the candidate's run in seconds.
    """

    agreement: float
    current_s: float
    candidate_s: float


TakePair: TypeAlias = Callable[[Pair | None], None]


def run_pair(
    current: Session,
    candidate: Session,
    inputs: Inputs,
    compare: Compare,
    *,
    flip: Callable[[], int],
    clock: Callable[[], float] = time.perf_counter,
) -> Pair | None:
    """Run both versions in random order. Return None if a run fails or returns NaN or infinity.

    If both runs together take less than 2 ms, they are repeated, and the first results are discarded.

    Args:
        current: The session of the version in use.
        candidate: The session of the version on trial.
        inputs: The inputs of both runs.
        compare: Returns the agreement of two answers, 0 to 1.
        flip: Returns 0 or 1 at random, to choose the order.
        clock: Returns the time in seconds.
    """
    sessions = (current, candidate)
    answers, times_s = _run_both(sessions, inputs, flip, clock)
    if sum(times_s) < _SHORT_S:
        answers, times_s = _run_both(sessions, inputs, flip, clock)
    first, second = answers
    if first is None or second is None or not (all_finite(first) and all_finite(second)):
        return None
    return Pair(compare(first, second), *times_s)


def _run_both(
    sessions: tuple[Session, Session], inputs: Inputs, flip: Callable[[], int], clock: Callable[[], float]
) -> tuple[list[Outputs | None], list[float]]:
    answers: list[Outputs | None] = [None, None]
    times_s = [0.0, 0.0]
    first = flip()
    for arm in (first, 1 - first):
        # Real calls more often wait for one version than for the other: waiting is no part of its time.
        with getattr(sessions[arm], "alone", _NO_LOCK):
            begin_s = clock()
            answer: Answer | None = run_one(sessions[arm], inputs)
            times_s[arm] = clock() - begin_s
        if isinstance(answer, EdgekitError):
            answer = None  # its traceback leads back here: with it, nothing of this would be freed
        answers[arm] = answer
    return answers, times_s


def _flip() -> int:
    return os.urandom(1)[0] & 1  # the module `random` takes a megabyte


class PairedRuns:
    """Runs pairs one after the other on its own thread. Call its methods on the event loop."""

    def __init__(
        self,
        current: Session,
        candidate: Session,
        compare: Compare,
        call_soon: Callable[..., object],
        *,
        is_busy: Callable[[], bool],
        defer: Callable[[float, Callable[[], None]], TimerHandle],
        max_run_s: float,
        complete: Callable[[Inputs], Inputs] = lambda inputs: inputs,
    ) -> None:
        """Prepare the runs. The first pair starts the thread.

        Args:
            current: The session of the version in use.
            candidate: The session of the version on trial.
            compare: Returns the agreement of two answers, 0 to 1.
            call_soon: For example, `loop.call_soon_threadsafe`.
            is_busy: Returns whether real calls need the processors. `may_start` then returns False.
            defer: For example, `loop.call_later`.
            max_run_s: The time limit of a pair in seconds, or 0 for no limit.
            complete: Adds missing states to inputs, as at the start of a sequence.
        """
        self._complete = complete
        self._sessions: tuple[Session, ...] = (share_session(current), share_session(candidate))
        # Their runs are stopped without those of calls.
        self._own = tuple(session for session in self._sessions if session not in (current, candidate))
        self._compare, self._defer, self._max_run_s = compare, defer, max_run_s
        self._is_running = False
        self._alarm: TimerHandle | None = None
        self._call_soon, self._is_busy = call_soon, is_busy
        self._queue: queue.SimpleQueue[tuple[Inputs, TakePair] | None] = queue.SimpleQueue()
        self._has_thread = self._is_over = False

    def may_start(self) -> bool:
        """Return whether real calls leave enough processor time for a pair now.

        Earlier results are ignored, because a choice by them would bias the comparison.
        """
        return not self._is_busy()

    def start(self, inputs: Inputs, done: TakePair) -> None:
        """Queue a pair of runs. After `close`, this does nothing.

        Args:
            inputs: The inputs of both runs. The arrays must not be changed any more.
            done: Called on the event loop with the pair, or with None if a run failed. It is not called after
                `close`.
        """
        if self._is_over:
            return
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._work, name="edgekit-pairs", daemon=True).start()
        self._queue.put((self._complete(inputs), done))
        self._is_running = True
        if self._max_run_s:
            self._alarm = self._defer(self._max_run_s, self._stop)

    def close(self) -> None:
        """Stop the running pair without reporting it, drop the queued pairs, and end the thread."""
        self._is_over = True
        self._queue.put(None)
        self._stop()
        if not self._has_thread:
            self._sessions = self._own = ()

    def _stop(self) -> None:
        """Stop the running pair. This is repeated, because a second run may follow the first.

        After the trial, only the runs of its own sessions are stopped, because other sessions also run calls.
        """
        if self._is_running:
            for session in self._own if self._is_over else self._sessions:
                cancel_runs(session)
            if self._alarm is not None:
                self._alarm.cancel()  # the loop would hold the models until then
            self._alarm = self._defer(_STOP_AGAIN_S, self._stop)

    def _work(self) -> None:
        current, candidate = self._sessions
        while (item := self._queue.get()) is not None:
            inputs, done = item
            pair = None
            try:
                pair = run_pair(current, candidate, inputs, self._compare, flip=_flip)
            except Exception:  # of a third party's backend that returned what is no tensor
                _logger.exception("two versions cannot be compared")
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._call_soon(self._finish, pair, done)
        self._sessions = self._own = ()  # so that the models can be freed

    def _finish(self, pair: Pair | None, done: TakePair) -> None:
        self._is_running = False
        if self._alarm is not None:
            self._alarm.cancel()
        if not self._is_over:
            done(pair)
