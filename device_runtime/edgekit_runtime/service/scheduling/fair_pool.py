"""A pool of threads that all models share fairly.

Among the models with a waiting batch, the one that has used the least thread time runs next. A model
gets no advantage from the time in which it was idle.

Source: P. Goyal, H. M. Vin, H. Cheng, Start-time Fair Queuing, SIGCOMM 1996.
"""

import contextlib
import functools
import os
import queue
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.service.scheduling.batch import Batch

_NAME: Final = "edgekit-pool"
_LOOK_S: Final = 0.25  # between two looks at the runs under way


class Threads:
    """Threads that are started on first use.

    Attributes:
        count: The maximum number of functions that run at the same time.
    """

    def __init__(self, loop: AbstractEventLoop, count: int) -> None:
        """Create the queues between the event loop and the threads. No thread is started yet.

        Args:
            loop: The running event loop.
            count: The number of threads, at least 1.
        """
        self.count = count
        self._loop = loop
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None]
        self._work = queue.SimpleQueue()
        self._done: deque[Callable[[], None]] = deque()
        self._under_way = 0
        self._threads: list[threading.Thread] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._event, self._collect)

    def start(self, work: Callable[[], None], finish: Callable[[], None]) -> None:
        """Run `work` on a thread, then call `finish` on the event loop. `work` must not raise."""
        if self._under_way == len(self._threads) < self.count:
            thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._under_way += 1
        self._work.put((work, finish))

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the running work and end the threads. The object cannot be used afterwards.

        Returns:
            True if all threads ended within `timeout_s`. A thread that hangs ends with the process.
        """
        for _ in self._threads:
            self._work.put(None)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        self._collect()
        self._loop.remove_reader(self._event)
        if any(thread.is_alive() for thread in self._threads):
            return False  # and the event stays open: the number could be another file's when it is written to
        os.close(self._event)
        return True

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, finish = item
            work()
            self._done.append(finish)
            del item, work, finish  # else a version that has ended would stay until this thread's next work
            os.eventfd_write(self._event, 1)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        while self._done:
            self._under_way -= 1
            self._done.popleft()()


class Flow(Protocol):
    """A model that runs its batches on the pool. Start-time fair queueing calls this a flow.

    Attributes:
        used_s: The thread time used so far, in seconds. Only the pool changes it.
    """

    used_s: float

    def take(self) -> Batch | None:
        """Return the next batch to run, or None."""

    def finish(self, batch: Batch) -> Callable[[], None]:
        """Count a batch that has run, and return a function that answers its calls."""

    def look(self, batch: Batch, seconds: float) -> bool:
        """Stop a batch that runs too long or has no clients. `seconds` is its run time so far.

        Return True if the pool should add a thread, because the run may not end.
        """


class Pool:
    """Assigns threads to the models that have work, and stops long runs.

    If a run does not stop, the pool adds a thread until the run ends. Otherwise a few hostile requests could
    occupy all threads.

    Attributes:
        on_abandoned: Called when a run cannot be stopped and its calls were answered with an error.
    """

    def __init__(self, threads: Threads, loop: AbstractEventLoop) -> None:
        """Create a pool on `threads`, which no other object uses."""
        self._threads, self._loop = threads, loop
        self._idle = threads.count
        self._ready: list[Flow] = []
        self._floor_s = 0.0
        # Runs under way, each with how often it was looked at. That is counted instead of time, which also
        # passes while the whole process is stopped.
        self._running: dict[Batch, tuple[Flow, int]] = {}
        self._replaced: set[Batch] = set()
        self._is_looking = False
        self.on_abandoned: Callable[[], None] = _do_nothing

    def enlist(self, flow: Flow) -> None:
        """Run batches of `flow` until `flow.take` returns None. Call this again when there is new work."""
        if flow not in self._ready:
            flow.used_s = max(flow.used_s, self._floor_s)
            self._ready.append(flow)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._idle and self._ready:
            flow = min(self._ready, key=_used)
            batch = flow.take()
            if batch is None:
                self._ready.remove(flow)
                continue
            self._floor_s = flow.used_s
            flow.used_s += batch.estimate_s
            self._idle -= 1
            self._running[batch] = (flow, 0)
            if not self._is_looking:
                self._is_looking = True
                self._loop.call_later(_LOOK_S, self._look)
            self._threads.start(batch.run, functools.partial(self._finish, flow, batch))

    def stop(self) -> None:
        """Stop all running batches, because the service ends."""
        for batch in self._running:
            batch.stop(UnavailableError("the service ends"))

    def _look(self) -> None:
        for batch, (flow, looks) in list(self._running.items()):
            self._running[batch] = (flow, looks + 1)
            if flow.look(batch, (looks + 1) * _LOOK_S) and batch not in self._replaced:
                self._replaced.add(batch)
                self._threads.count += 1
                self._idle += 1
        self._is_looking = bool(self._running)
        if self._is_looking:
            self._loop.call_later(_LOOK_S, self._look)
        self._dispatch()

    def _finish(self, flow: Flow, batch: Batch) -> None:
        del self._running[batch]
        if batch in self._replaced:
            self._replaced.discard(batch)
            self._threads.count -= 1
        else:
            self._idle += 1
        flow.used_s += batch.seconds - batch.estimate_s
        answer = flow.finish(batch)
        self._dispatch()  # first, so that a thread works while the answers are written
        answer()


def _do_nothing() -> None:
    pass


def _used(flow: Flow) -> float:
    return flow.used_s
