"""A cache of responses, so that a version computes equal inputs only once.

The cache is off by default and only stores successful answers. If a call with equal inputs is already
running, later calls wait for its answer until their own deadlines pass. Each version has its own cache lane.
A canary lane is placed before the cache lanes. When a version is unloaded, its answers are dropped.
"""

import hashlib
import math
import os
import time
from asyncio import AbstractEventLoop
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.options.resources import CacheLimits
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane, Reused
from edgekit_runtime.service.scheduling.outcomes import miss, reply, shed
from edgekit_runtime.service.scheduling.timer import Alarm
from edgekit_runtime.tensors import Array

_KEY_BYTES: Final = 16  # two of 2^32 inputs are taken for equal with a chance of 2^-65
_ENTRY_BYTES: Final = 512  # of Python's objects around a small answer
_Key: TypeAlias = tuple[int, bytes]


class ResponseCache:
    """The cached answers of all models. The least recently used answers are dropped first.

    Attributes:
        held_bytes: The size of all cached answers.
        hits: The number of calls answered from the cache at once.
        joined: The number of calls that waited for the result of an equal call, including an error.
        misses: The number of calls that were not in the cache.
        passed: The number of calls that were not cached because their inputs are too large.
    """

    def __init__(self, limits: CacheLimits | None = None) -> None:
        self.limits = limits or CacheLimits()
        # Without a secret key, a client could look for inputs that are taken for those of another.
        self._secret = os.urandom(_KEY_BYTES)
        self._answers: OrderedDict[_Key, tuple[Reused, int]] = OrderedDict()
        self._lanes = 0
        self.held_bytes = self.hits = self.joined = self.misses = self.passed = 0

    def add_lane(self) -> int:
        """Return a new number that identifies the answers of a lane."""
        self._lanes += 1
        return self._lanes

    def to_json(self) -> dict[str, JsonValue]:
        """Return the number of `answers` and the counters for the `/v2` statistics."""
        return {
            "answers": len(self._answers),
            "held_bytes": self.held_bytes,
            "hits": self.hits,
            "joined": self.joined,
            "misses": self.misses,
            "passed": self.passed,
        }

    def digest(self, inputs: Mapping[str, Array]) -> bytes:
        """Return a keyed hash of the inputs with their names, dtypes and shapes."""
        state = hashlib.blake2b(digest_size=_KEY_BYTES, key=self._secret)
        for name in sorted(inputs):
            array = inputs[name]
            # Its length precedes each part: otherwise two splits of the same bytes would be equal.
            head = f"{len(name)}:{name}{array.dtype.str}{array.shape}{array.nbytes}:"
            state.update(head.encode())
            if array.nbytes:
                state.update(np.ascontiguousarray(array).reshape(-1).data)
        return state.digest()

    def find(self, key: _Key) -> Reused | None:
        """Return a cached answer and mark it as used, or return None.

        `key` is the number of the lane and the digest of the inputs.
        """
        answer = self._answers.get(key)
        if answer is None:
            return None
        self._answers.move_to_end(key)
        return answer[0]

    def keep(self, key: _Key, answer: Reused) -> None:
        """Cache an answer unless it is too large.

        The least recently used answers are dropped to make room.
        """
        size_bytes = sum(array.nbytes for array in answer.values()) + _ENTRY_BYTES
        if size_bytes > self.limits.max_bytes:
            return
        self._answers[key] = (answer, size_bytes)
        self.held_bytes += size_bytes
        while self.held_bytes > self.limits.max_bytes:
            _, (_, dropped_bytes) = self._answers.popitem(last=False)
            self.held_bytes -= dropped_bytes

    def drop_lane(self, lane: int) -> None:
        for key in [key for key in self._answers if key[0] == lane]:
            self.held_bytes -= self._answers.pop(key)[1]


class CacheLane(Lane):
    """Answers calls from the cache or passes them on. While a call runs, equal calls wait for its answer."""

    def __init__(
        self,
        cache: ResponseCache,
        lane: Lane,
        loop: AbstractEventLoop,
        *,
        metrics: LaneMetrics | None = None,
        max_waiting: int = 128,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a lane that answers from `cache`, and passes all other calls to `lane`.

        Args:
            cache: The cache of all models.
            lane: The lane of one loaded version. The answers of the version must not change.
            loop: The event loop.
            metrics: The metrics of the version, which also count hits and misses, or None.
            max_waiting: The maximum number of calls that wait for equal calls. Further calls are refused.
            clock: The clock of the deadlines.
        """
        self._cache, self._lane = cache, lane
        self._number = cache.add_lane()
        self._metrics = LaneMetrics("", "") if metrics is None else metrics
        self._max_waiting, self._clock, self._alarm = max_waiting, clock, Alarm(loop)
        self._under_way: dict[bytes, _UnderWay] = {}
        self._waiting = 0  # calls that wait for one under way
        self._is_closed = False

    def submit(self, call: Call) -> None:
        """Answer `call` from the cache, or pass it to the next lane. This does not raise."""
        cache = self._cache
        input_bytes = sum(array.nbytes for array in call.inputs.values())
        if self._is_closed or input_bytes > cache.limits.max_input_bytes:
            cache.passed += 1
            self._lane.submit(call)
            return
        began_s = self._clock()
        # What is hashed must be what is computed: a client can write to shared memory between the two, and
        # others would get the answer to its second inputs.
        inputs = call.own_inputs()
        digest = cache.digest(inputs)
        cached = cache.find((self._number, digest))
        if cached is not None:
            cache.hits += 1
            self._reuse(call, cached, began_s)
            return
        first = self._under_way.get(digest)
        # One with another priority has another place in the queue.
        if first is not None and first.call.priority == call.priority:
            self._join(first, call, began_s)
            return
        self._count_miss()
        self._compute(call, inputs, digest)

    def to_json(self) -> dict[str, JsonValue]:
        """Return the `hits` and `misses` of this version and the size of the cached answers of all models."""
        metrics = self._metrics
        return {
            "hits": metrics.cache_hits,
            "misses": metrics.cache_misses,
            "held_bytes_of_all": self._cache.held_bytes,
        }

    def close(self) -> None:
        """Drop the answers of this version. Running calls are answered, but their answers are not cached."""
        self._is_closed = True
        self._cache.drop_lane(self._number)

    def _count_miss(self) -> None:
        self._cache.misses += 1
        self._metrics.cache_misses += 1

    def _reuse(self, call: Call, answer: Reused, since_s: float) -> None:
        now_s = self._clock()
        self._metrics.note_hit(now_s - since_s, now_s)
        reply(call, answer)

    def _join(self, first: "_UnderWay", call: Call, now_s: float) -> None:
        """Let `call` wait for the answer to an equal call."""
        deadline_s = call.deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            miss(call, self._metrics)
            return
        if self._waiting >= self._max_waiting:
            # The time that the first has taken is the best estimate known here of the time left.
            shed(call, self._metrics, self._waiting, now_s - first.since_s)
            return
        self._cache.joined += 1
        self._waiting += 1
        first.waiting.append((call, now_s))
        if deadline_s is not None:
            self._alarm.set(self._expire, deadline_s, now_s, is_exact=False)

    def _expire(self) -> None:
        """Refuse calls that wait for others and whose deadline has passed."""
        now_s, next_s = self._clock(), math.inf
        late: list[Call] = []
        for first in self._under_way.values():
            waiting = []
            for waiting_call in first.waiting:
                deadline_s = waiting_call[0].deadline_s
                if deadline_s is not None and deadline_s <= now_s:
                    late.append(waiting_call[0])
                    continue
                waiting.append(waiting_call)
                next_s = min(next_s, math.inf if deadline_s is None else deadline_s)
            first.waiting[:] = waiting
        self._waiting -= len(late)
        if next_s < math.inf:
            self._alarm.set(self._expire, next_s, now_s, is_exact=False)
        for call in late:  # whom they answer may submit more
            miss(call, self._metrics)

    def _compute(self, call: Call, inputs: Mapping[str, Array], digest: bytes) -> None:
        mine = _UnderWay(call, self._clock())
        is_first = self._under_way.setdefault(digest, mine) is mine

        def take(answer: Answer) -> None:
            if is_first:
                del self._under_way[digest]
                self._waiting -= len(mine.waiting)
                if not self._waiting:
                    self._alarm.cancel()
            if isinstance(answer, EdgekitError):
                reply(call, answer)
                for other, _ in mine.waiting:
                    # It may have failed for a reason of its own, such as its deadline.
                    self._count_miss()
                    self._lane.submit(other)
                return
            frozen = _freeze(answer)
            reused = Reused(frozen)
            if not self._is_closed and is_first:
                self._cache.keep((self._number, digest), reused)
            reply(call, frozen)
            for other, since_s in mine.waiting:
                self._reuse(other, reused, since_s)

        def is_unwanted() -> bool:
            return call.is_unwanted() and all(other.is_unwanted() for other, _ in mine.waiting)

        own = call.answered_by(take)
        own.inputs, own.is_unwanted = inputs, is_unwanted
        self._lane.submit(own)


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A running call, and the equal calls that wait for its answer.

    Attributes:
        since_s: The arrival time of the call.
        waiting: The waiting calls with their arrival times.
    """

    call: Call
    since_s: float
    waiting: list[tuple[Call, float]] = field(default_factory=list)


def _freeze(answer: Mapping[str, Array]) -> Mapping[str, Array]:
    frozen = {}
    for name, array in answer.items():
        owned = array if array.flags.owndata else array.copy()
        owned.setflags(write=False)
        frozen[name] = owned
    return MappingProxyType(frozen)
