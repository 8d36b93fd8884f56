"""A loop, a clock, threads and sessions of which a test decides when anything happens."""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.options.model import SchedulingLimits
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.scheduling.fair_pool import Pool
from edgekit_runtime.service.scheduling.scheduler import Scheduler
from edgekit_runtime.tensors import TensorSpec


class Handle:
    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback, self.args, self.is_cancelled = callback, args, False

    def cancel(self) -> None:
        self.is_cancelled = True

    def run(self) -> None:
        if not self.is_cancelled:
            self.callback(*self.args)


class FakeLoop:
    """An event loop whose time passes when it is told to, and by `tick_s` whenever it is read."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self.tick_s = 100.0, tick_s
        self._soon: list[Handle] = []
        self._timers: list[tuple[float, int, Handle]] = []
        self._count = itertools.count()

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle:
        handle = Handle(callback, args)
        self._soon.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        assert delay >= 0
        handle = Handle(callback, args)
        heapq.heappush(self._timers, (self.now_s + delay, next(self._count), handle))
        return handle

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        raise NotImplementedError

    def remove_reader(self, fd: int) -> bool:
        raise NotImplementedError

    def turn(self) -> None:
        """Run what is ready, not what that makes ready."""
        while self._timers and self._timers[0][0] <= self.now_s:
            self._soon.append(heapq.heappop(self._timers)[2])
        ready, self._soon = self._soon, []
        for handle in ready:
            handle.run()

    @property
    def is_busy(self) -> bool:
        """Whether there is a next turn already."""
        return bool(self._soon)

    def pass_s(self, seconds: float) -> None:
        """Let time pass in steps of a tenth of a millisecond at most, with a turn after each."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 1e-4)
            self.turn()
        self.turn()


class FakeThreads:
    """Threads whose jobs end when a test says so, and run then too, or as soon as they are started."""

    def __init__(self, count: int, is_eager: bool) -> None:
        self.count, self.is_eager = count, is_eager
        self.jobs: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def start(self, work: Callable[[], None], finish: Callable[[], None]) -> None:
        assert len(self.jobs) < self.count
        self.jobs.append((work, finish))
        if self.is_eager:
            work()

    def end(self, index: int = 0) -> None:
        work, finish = self.jobs.pop(index)
        if not self.is_eager:
            work()
        finish()


class FakeSession:
    """y = 2 * x, with free rows; a row that holds -1 fails its run."""

    has_fixed_work = True

    def __init__(self, loop: FakeLoop | None = None, seconds: float = 0.0, rows: int | str = "N") -> None:
        self.inputs = (TensorSpec("x", "float32", (rows, "width")),)
        self.outputs = (TensorSpec("y", "float32", (rows, "width")),)
        self.loop, self.seconds = loop, seconds
        self.runs: list[list[float]] = []  # first value of each row

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        x = inputs["x"]
        self.runs.append([float(row[0]) for row in x])
        if self.loop is not None:
            self.loop.now_s += self.seconds
        if np.any(x == -1):
            raise EdgekitError("minus one")
        return {"y": 2 * x}

    def close(self) -> None:
        pass


class Client:
    """Keeps what its calls were answered."""

    def __init__(self) -> None:
        self.answers: dict[float, list[Answer]] = {}

    def call(self, value: float, rows: int = 1, width: int = 2, **fields: Any) -> Call:
        self.answers[value] = []
        return Call({"x": np.full((rows, width), value, np.float32)}, self.answers[value].append, **fields)

    def value(self, name: float) -> Any:
        (answer,) = self.answers[name]
        assert not isinstance(answer, EdgekitError)
        return answer["y"]

    def error(self, name: float) -> EdgekitError:
        (answer,) = self.answers[name]
        assert isinstance(answer, EdgekitError)
        return answer


class Bench:
    """A lane with everything fake around it."""

    def __init__(
        self,
        *,
        threads: int = 1,
        instances: int = 1,
        seconds: float = 0.0,
        is_eager: bool = False,
        tick_s: float = 0.0,
        **limits: Any,
    ) -> None:
        self.loop, self.threads, self.client = FakeLoop(tick_s), FakeThreads(threads, is_eager), Client()
        self.session = FakeSession(self.loop, seconds)
        self.pool = Pool(self.threads, self.loop)
        self.metrics = LaneMetrics("model", "1")
        self.lane = self.add_lane((self.session,) * instances, self.metrics, **limits)

    def add_lane(
        self,
        instances: tuple[FakeSession, ...],
        metrics: LaneMetrics,
        max_batch_bytes: float = math.inf,
        **limits: Any,
    ) -> Scheduler:
        return Scheduler(
            instances,
            SchedulingLimits(**{"short_s": 0.0, **limits}),
            pool=self.pool,
            loop=self.loop,
            metrics=metrics,
            max_batch_bytes=max_batch_bytes,
            clock=self.loop.clock,
        )

    def submit(self, value: float, rows: int = 1, width: int = 2, **fields: Any) -> None:
        self.lane.submit(self.client.call(value, rows, width, **fields))

    def finish(self) -> None:
        while self.threads.jobs:
            self.threads.end()
            self.loop.turn()
