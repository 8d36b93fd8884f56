"""Lanes, clients and a clock that tests of canaries and of the response cache drive by hand."""

import functools
import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgekit_runtime.errors import BackendError, EdgekitError
from edgekit_runtime.service.rollout.comparison import Compare
from edgekit_runtime.service.rollout.paired_runs import TakePair, run_pair
from edgekit_runtime.service.scheduling.call import Answer, Call

Compute = Callable[[Mapping[str, Any]], Answer]


def scores(*values: float) -> dict[str, Any]:
    return {"y": np.array([values], np.float32)}


def inputs(*values: float) -> dict[str, Any]:
    return {"x": np.array([values], np.float32)}


def double(given: Mapping[str, Any]) -> Answer:
    return {"y": given["x"] * 2}


def fail(_given: Mapping[str, Any]) -> Answer:
    return BackendError("broken")


def nan(given: Mapping[str, Any]) -> Answer:
    return {"y": np.full_like(given["x"], np.nan)}


@dataclass
class Clock:
    """Time that passes when told to; what was deferred happens then."""

    now_s: float = 100.0
    _later: list[Any] = field(default_factory=list)
    _count: int = 0

    def __call__(self) -> float:
        return self.now_s

    def defer(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._later, (self.now_s + seconds, self._count, call))

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._later and self._later[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._later)
            call()
        self.now_s = end_s


@dataclass
class FakeLane:
    """Answers at once, after `latency_s` of the clock; or, when held, when the test says so."""

    compute: Compute = double
    clock: Clock | None = None
    latency_s: float = 0.0
    held: bool = False
    calls: list[Call] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        if self.held:
            self.waiting.append(call)
            return
        if self.clock is not None:
            self.clock.now_s += self.latency_s
        call.reply(self.compute(call.inputs))

    def release(self, index: int = 0) -> None:
        call = self.waiting.pop(index)
        call.reply(self.compute(call.inputs))

    def refuse_all(self) -> None:
        while self.waiting:
            self.waiting.pop(0).reply(BackendError("closed"))


@dataclass
class FakePairs:
    """Pairs that are made at once, by what the lanes behind a canary compute."""

    current: FakeLane
    candidate: FakeLane
    clock: Clock
    compare: Compare
    is_free: bool = True
    made: int = 0
    given: list[Mapping[str, Any]] = field(default_factory=list)
    _flip: Callable[[], int] = field(default_factory=lambda: functools.partial(random.Random(1).randrange, 2))

    def may_start(self) -> bool:
        return self.is_free

    def start(self, inputs: Mapping[str, Any], done: TakePair) -> None:
        self.given.append(inputs)
        sessions: list[Any] = [FakeSession(lane, self.clock) for lane in (self.current, self.candidate)]
        pair = run_pair(*sessions, inputs, self.compare, flip=self._flip, clock=self.clock)
        self.made += pair is not None
        done(pair)


@dataclass
class FakeSession:
    """What a lane has behind it."""

    lane: FakeLane
    clock: Clock

    def run(self, given: Mapping[str, Any]) -> Any:
        self.clock.now_s += self.lane.latency_s
        answer = self.lane.compute(given)
        if isinstance(answer, EdgekitError):
            raise answer
        return answer


@dataclass
class Client:
    """Sends calls and keeps every answer to each."""

    answers: list[list[Answer]] = field(default_factory=list)

    def call(self, given: Mapping[str, Any], deadline_s: float | None = None) -> Call:
        mine: list[Answer] = []
        self.answers.append(mine)
        return Call(given, mine.append, deadline_s=deadline_s)

    @property
    def failures(self) -> int:
        return sum(isinstance(answer, EdgekitError) for mine in self.answers for answer in mine)
