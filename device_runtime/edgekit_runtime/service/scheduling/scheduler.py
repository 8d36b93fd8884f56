"""Schedules the calls of one model.

Fast models run immediately on the event loop. Other models run on the thread pool, where waiting calls can
share a batch. Each call is answered exactly once. The scheduler does not open or close sessions.
"""

import functools
import logging
import math
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from edgekit_runtime.errors import BackendError, DataError, DeadlineError, EdgekitError, UnavailableError
from edgekit_runtime.service.observability.crash_names import name_frame
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.options.model import SchedulingLimits
from edgekit_runtime.service.scheduling.batch import Batch, find_kind
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane
from edgekit_runtime.service.scheduling.fair_pool import Pool
from edgekit_runtime.service.scheduling.outcomes import cancel, miss, refuse, reply, shed
from edgekit_runtime.service.scheduling.placement import RunPlacements, move_mean
from edgekit_runtime.service.scheduling.priority_queue import PriorityQueue, Queued
from edgekit_runtime.service.scheduling.run_memory import RunMemory
from edgekit_runtime.service.scheduling.timer import TIMER_S, Alarm
from edgekit_runtime.sessions.row_independence import has_free_rows
from edgekit_runtime.sessions.session import Session, share_session
from edgekit_runtime.tensors import Array, Shapes, find_shapes, input_bytes

_MAX_STOPS: Final = 8  # checks of the pool, about 2 s, until an engine must stop
_LONG_S: Final = 1.0  # others then get the place of a run that may be endless

_logger = logging.getLogger(__name__)


class Scheduler(Lane):
    """The lane that runs calls in the sessions of one version. Use it on the event loop only.

    Attributes:
        metrics: The counts and durations of the calls.
        used_s: See `Flow`.
    """

    def __init__(
        self,
        instances: Sequence[Session],
        limits: SchedulingLimits,
        *,
        pool: Pool,
        loop: AbstractEventLoop,
        metrics: LaneMetrics,
        memory: RunMemory | None = None,
        max_batch_bytes: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a lane that accepts calls.

        Args:
            instances: The sessions. Each runs one batch at a time, see `open_instances`.
            limits: The scheduling options.
            pool: The thread pool of all models.
            loop: The event loop.
            metrics: The metrics of the version.
            memory: The memory of runs, which decides whether a session is trimmed after a run. None disables
                this.
            max_batch_bytes: The size limit of the inputs of a batch.
            clock: The clock of the deadlines.
        """
        self._memory = memory
        self._session = instances[0]
        self._shares = _share(instances)
        self._idle, self._instances = list(self._shares or instances), len(instances)
        self._lost = 0  # instances whose run cannot be stopped
        self._stops_alone = len(set(map(id, self._idle))) == self._instances
        has_fixed_work = getattr(instances[0], "has_fixed_work", None)
        self._has_fixed_work = has_fixed_work is True
        self._may_hang = has_fixed_work is False and not hasattr(instances[0], "cancel_runs")
        self._limits, self._pool, self._loop, self._clock = limits, pool, loop, clock
        self.metrics = metrics
        self._run_one = name_frame(run_one, f"inference of {metrics.model} {metrics.version}")
        # Without fixed work no measurement says how long the next run takes: it is never on the loop.
        # By the shapes of the inputs: as many values in another shape may take 10,000 times as long.
        self._placements = RunPlacements(limits.short_s if self._has_fixed_work else 0.0)
        self._waiting = PriorityQueue(limits.levels, limits.max_passes, max_batch_bytes)
        self._has_rows = has_free_rows(self._session)
        self._batches = limits.max_batch > 1 and self._has_rows
        self._max_rows = limits.max_batch if self._batches else 1
        # Calls wait for others, so none runs at once.
        self._is_held = self._batches and limits.max_delay_s > 0
        self._late: list[Queued] = []
        self._unwanted: list[Queued] = []
        self._answering = 0
        self._is_replying = False  # a reply must not start another run inside this one
        self._per_call_s = self._per_run_s = 0.0
        self._is_open = True
        self._drained: Callable[[], None] | None = None
        self._alarm = Alarm(loop)
        self.used_s = 0.0

    def submit(self, call: Call) -> None:
        """Accept `call` and answer it with its `reply`. This does not raise."""
        answer = None
        if call.work is None and (call.deadline_s is None or self._clock() < call.deadline_s):
            answer = self.attempt(call.inputs)
        if answer is None:
            self._enqueue(call)
            return
        self._is_replying = True
        reply(call, answer)
        self._is_replying = False

    def attempt(self, inputs: Mapping[str, Array]) -> "Answer | None":
        """Run a fast model on this thread and return its answer.

        Return None if the model is not fast, or if calls are waiting or running.
        """
        if self._is_replying or self._waiting.rows or self._is_held or not (self._idle and self._is_open):
            return None
        placement = self._placements[find_shapes(inputs)]
        if not placement.short:
            return None
        began_s = self._clock()
        answer = self._run_one(self._idle[-1], inputs)
        now_s = self._clock()
        seconds = now_s - began_s
        placement.note_on_loop(seconds)
        if isinstance(answer, EdgekitError):
            self.metrics.note_failure(seconds, now_s)
        else:
            self.metrics.note_lone(seconds, now_s, self._count_rows(inputs))
        return answer

    def takes_work(self, inputs: Mapping[str, Array]) -> bool:
        """Return True if a thread is free, so that the call's `work` does not delay other calls."""
        is_free = bool(self._idle) and self._is_open and not (self._batches or self._waiting.rows)
        return is_free and not self._placements[find_shapes(inputs)].short

    def learn(self, shapes: Shapes, seconds: float) -> None:
        """Count a run that was measured before the first request, see `warm_up`."""
        self._placements[shapes].note_on_thread(seconds)

    def limit_batch(self, rows: int) -> None:
        """Limit the following batches to `rows` rows. The option `max_batch` still applies."""
        self._max_rows = max(1, min(rows, self._limits.max_batch)) if self._batches else 1

    def drain(self, done: Callable[[], None]) -> None:
        """Accept no more calls, run the waiting calls without delay, and call `done` when all are answered.

        If no call is waiting or running, `done` is called before this method returns.
        """
        self._is_open = self._is_held = False
        self._drained = done
        self._pump()
        self._check_drained()

    @property
    def is_idle(self) -> bool:
        """Whether no call is waiting, running or being answered."""
        is_running = len(self._idle) < self._instances or self._answering
        return not (is_running or self._waiting.rows or self._late or self._unwanted)

    def _enqueue(self, call: Call) -> None:
        now_s, limits = self._clock(), self._limits
        if not self._is_open:
            reason = f"{self.metrics.model}: this version is being unloaded; try again"
            refuse(call, UnavailableError(reason, 0.0), self.metrics)
            return
        if self._lost == self._instances:
            refuse(call, self._make_lost_error(), self.metrics)
            return
        if call.deadline_s is not None and now_s >= call.deadline_s:
            miss(call, self.metrics)
            return
        level = min(call.priority, limits.levels) if call.priority >= 1 else limits.default_level
        try:
            kind, rows = find_kind(self._session, call.inputs) if self._batches else (None, 1)
        except DataError as error:
            refuse(call, error, self.metrics)
            return
        displaced = None
        if len(self._waiting) >= limits.max_waiting:
            self._drop_unwanted(self._waiting.sweep())
        if len(self._waiting) >= limits.max_waiting:
            displaced = self._waiting.displace(level)
            if displaced is None:
                shed(call, self.metrics, self.metrics.waiting, self._wait_s())
                return
        self._waiting.push(
            Queued(
                call=call,
                since_s=now_s,
                level=level,
                rows=rows,
                size_bytes=input_bytes(call.inputs),
                kind=kind,
            )
        )
        self._pump()
        if displaced is not None:
            shed(displaced.call, self.metrics, self.metrics.waiting, self._wait_s())

    def _pump(self) -> None:
        """Run the batches that may run now, and set the alarm for the others."""
        is_delayed = False
        if self._idle and self._waiting.rows:
            if not self._is_due():
                is_delayed = True
            elif not self._is_next_short():
                self._pool.enlist(self)
            elif self._is_replying:
                self._loop.call_soon(self._pump)
            else:
                self._run_batch_here()
        self._set_alarm(is_delayed)
        self.metrics.waiting = len(self._waiting)

    def _is_next_short(self) -> bool:
        chosen = self._waiting.choose(self._max_rows)
        return chosen[0].call.work is None and self._placements[_merge_shapes(chosen)].short

    def _run_batch_here(self) -> None:
        batch = self.take()
        if batch is not None:
            batch.run()
            self._take_in(batch, on_loop=True)
            self._answer(batch)

    def take(self) -> Batch | None:
        """Return the next batch to run, or None.

        Calls without a client or past their deadline are refused.
        """
        if late := self._waiting.expire(self._clock()):
            # Not from here: whom they answer may submit more, in the middle of what the pool decides.
            self._late += late
            self._loop.call_soon(self._answer_dropped)
        if not (self._idle and self._waiting.rows):
            return None
        if not self._is_due():
            self._set_alarm(is_delayed=True)
            return None
        chosen = self._choose()
        self.metrics.waiting = len(self._waiting)
        if not chosen:
            return None
        self._answering += 1
        size_bytes = sum(queued.size_bytes for queued in chosen)
        memory = self._memory
        trims = memory is not None and memory.should_trim(size_bytes, self._limits.max_batch)
        return Batch(
            self._idle.pop(),
            chosen,
            self._per_run_s,
            self._clock,
            run_one=self._run_one,
            trim=memory.trim if trims and memory is not None else None,
        )

    def _choose(self) -> list[Queued]:
        """Remove the next batch from the queue, without calls whose clients have disconnected."""
        while self._waiting.rows:
            chosen = self._waiting.choose(self._max_rows)
            self._waiting.remove(chosen)
            batch = [queued for queued in chosen if not queued.call.is_unwanted()]
            self._drop_unwanted([queued for queued in chosen if queued not in batch])
            if batch:
                return batch
        return []

    def _drop_unwanted(self, unwanted: list[Queued]) -> None:
        if unwanted:
            self._unwanted += unwanted
            self._loop.call_soon(self._answer_dropped)  # later, for the same reason as what is late

    def look(self, batch: Batch, seconds: float) -> bool:
        """Stop a batch that runs too long or whose clients have disconnected.

        The pool calls this several times a second. `seconds` is the run time of the batch so far. If the
        batch has not stopped after about 2 s, its calls are refused while it continues to run.

        Returns:
            True if the run may never end. The pool then adds a thread.
        """
        if batch.is_abandoned:
            return True
        limit_s = self._limits.max_run_s * len(batch.queued)  # calls that share a batch wait for one another
        is_late = 0 < limit_s <= seconds
        if is_late:
            reason = f"a run took longer than {self._limits.max_run_s:g} s a call (max_run_s) and was stopped"
            batch.stop(DeadlineError(f"{self.metrics.model}: {reason}; send inputs that take less time"))
        elif batch.stop_error is not None or (
            self._stops_alone and all(queued.call.is_unwanted() for queued in batch.queued)
        ):
            batch.stop(UnavailableError(f"{self.metrics.model}: the client went before the run had ended"))
        if batch.stops > _MAX_STOPS and (is_late or self._may_hang):
            self._abandon(batch)
        return batch.is_abandoned or (seconds >= _LONG_S and not self._has_fixed_work)

    def _abandon(self, batch: Batch) -> None:
        """Answer the calls of a batch that cannot be stopped. If it ends later, its session is used again."""
        _logger.error("%s, but its engine cannot be stopped", batch.stop_error)
        batch.is_abandoned = True
        self._lost += 1
        for queued in batch.queued:
            refuse(queued.call, batch.stop_error or self._make_lost_error(), self.metrics)
        while self._lost == self._instances and (waiting := self._choose()):
            for queued in waiting:
                refuse(queued.call, self._make_lost_error(), self.metrics)
        self._pool.on_abandoned()

    def _make_lost_error(self) -> UnavailableError:
        return UnavailableError(
            f"{self.metrics.model}: a run does not end, as its engine cannot be stopped; restart the service,"
            " and isolate this model"
        )

    def finish(self, batch: Batch) -> Callable[[], None]:
        """Count a batch that has run, and return a function that answers its calls.

        The pool calls this method first, then the returned function.
        """
        self._lost -= batch.is_abandoned
        self._take_in(batch, on_loop=False)
        if self._idle and self._waiting.rows and self._is_due() and not self._is_next_short():
            self._pool.enlist(self)
        return functools.partial(self._answer, batch)

    def _take_in(self, batch: Batch, *, on_loop: bool) -> None:
        ran, count = batch.ran, len(batch.queued)
        rows = [self._count_rows(queued.call.inputs) for queued in batch.queued]
        self._idle.append(batch.session)
        self._per_run_s = move_mean(self._per_run_s, batch.seconds)
        self._per_call_s = move_mean(self._per_call_s, batch.seconds / count)
        if ran.is_refused:
            return
        placement = self._placements[_merge_shapes(batch.queued)]
        if on_loop:
            placement.note_on_loop(ran.infer_s)
        else:
            placement.note_on_thread(ran.infer_s)
        if ran.is_apart:
            for rows_of_one in rows:
                self.metrics.note_run(1, rows_of_one, 0.0, ran.infer_s / count, 0.0)
            if not any(isinstance(answer, EdgekitError) for answer in ran.answers):
                _logger.warning("%s runs single calls but no batches; batching is off", self.metrics.model)
                self._max_rows, self._batches, self._is_held = 1, False, False
            return
        self.metrics.note_run(count, sum(rows), ran.merge_s, ran.infer_s, ran.split_s)

    def _answer(self, batch: Batch) -> None:
        ran, metrics, now_s = batch.ran, self.metrics, self._clock()
        self._is_replying = True
        queued_calls = () if batch.is_abandoned else batch.queued  # then they were answered before
        for queued, result in zip(queued_calls, ran.answers, strict=False):
            answer = (batch.stop_error or result) if isinstance(result, EdgekitError) else result
            total_s = now_s - queued.since_s
            if isinstance(answer, DeadlineError):
                metrics.late += 1
            elif answer is batch.stop_error:  # nobody waits for it, or the service ends
                metrics.cancelled += 1
            elif ran.is_refused:
                metrics.refused += 1
            elif isinstance(answer, EdgekitError):
                metrics.note_failure(total_s, now_s)
            else:
                rows = self._count_rows(queued.call.inputs)
                metrics.note_success(ran.began_s - queued.since_s, ran.infer_s, total_s, now_s, rows)
            reply(queued.call, answer)
        self._is_replying = False
        self._answering -= 1
        if self._waiting.rows:
            self._loop.call_soon(self._pump)  # not at once: others want a turn of the loop between
        self._check_drained()

    def _is_due(self) -> bool:
        if not self._is_held or self._waiting.rows >= self._max_rows:
            return True
        return self._clock() >= self._due_s()

    def _due_s(self) -> float:
        """Return the time at which the waiting calls must run, even without a full batch."""
        # A timer may be a millisecond late.
        in_time_s = self._waiting.next_deadline_s - self._per_run_s - TIMER_S
        return min(self._waiting.oldest_s + self._limits.max_delay_s, in_time_s)

    def _set_alarm(self, is_delayed: bool) -> None:
        """Set the alarm for the next deadline, and for the end of the delay if calls wait for it."""
        deadline_s = self._waiting.next_deadline_s
        wake_s = min(deadline_s, self._due_s()) if is_delayed and self._waiting.rows else deadline_s
        if wake_s < math.inf:
            self._alarm.set(self._wake, wake_s, self._clock(), is_exact=is_delayed)

    def _wake(self) -> None:
        self._late += self._waiting.expire(self._clock())
        self._answer_dropped()
        self._pump()

    def _answer_dropped(self) -> None:
        self.metrics.waiting = len(self._waiting)
        while self._late:
            miss(self._late.pop(0).call, self.metrics)
        while self._unwanted:
            cancel(self._unwanted.pop(0).call, self.metrics)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._drained is not None and self.is_idle:
            done, self._drained = self._drained, None
            self._alarm.cancel()
            for session in self._shares:
                session.close()
            done()

    def _count_rows(self, inputs: Mapping[str, Array]) -> int:
        if self._has_rows:
            for array in inputs.values():  # the first; faster than next(iter(...)), before every inference
                return len(array)
        return 1

    def _wait_s(self) -> float:
        """Estimate how long the waiting calls will take, from the mean duration of earlier calls."""
        return self._per_call_s * len(self._waiting) / self._instances


def _merge_shapes(queued: Sequence[Queued]) -> Shapes:
    """Return the shapes of the inputs of calls that run together."""
    shapes = find_shapes(queued[0].call.inputs)
    if len(queued) == 1:
        return shapes
    rows = sum(call.rows for call in queued)
    return tuple([(rows, *shape[1:]) for shape in shapes])


def _share(instances: Sequence[Session]) -> list[Session]:
    """Return separate sessions if the instances are one session, so that each can be stopped alone.

    Otherwise return an empty list.
    """
    is_same = len(instances) > 1 and instances[0] is instances[1]
    shared = [share_session(session) for session in instances] if is_same else []
    return [session for session in shared if session is not instances[0]]


def run_one(session: Session, inputs: Mapping[str, Array]) -> Answer:
    """Return the outputs of one call. Errors are returned as `EdgekitError`, not raised."""
    try:
        return session.run(inputs)
    except EdgekitError as error:
        return error
    except Exception as cause:  # of a third party's backend; the service must outlive it
        failure = BackendError(f"the backend failed with {type(cause).__name__}: {cause}")
        failure.__cause__ = cause
        return failure
