"""The response cache: equal inputs to the same version are computed once, while there is room.

It is off unless a model asks for it. What is cached are good answers only; calls with equal inputs that come
while the first of them is under way wait for it. A lane with a cache belongs to one loaded version, under a
canary, never above one; when that version goes, its answers go with it.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.errors import EdgekitError, ManifestError
from edgekit_runtime.service.call import Answer, Call, Lane
from edgekit_runtime.service.metrics import LaneMetrics
from edgekit_runtime.sessions.session import Array

_KEY_BYTES: Final = 16  # two of 2^32 inputs are taken for equal with a chance of 2^-65
_ENTRY_BYTES: Final = 512  # of Python's objects around a small answer
_Key: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Bounds of a response cache.

    Attributes:
        max_bytes: of all answers that it keeps.
        max_input_bytes: calls with larger inputs pass by: hashing takes about 1 ms a MiB, on the loop's
            thread.
    """

    max_bytes: int = 8 << 20
    max_input_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_input_bytes < 0:
            raise ManifestError(f"cache: expected max_bytes >= 1 and max_input_bytes >= 0, got {self}")


class ResponseCache:
    """The answers of all models that cache, the least recently used of which are dropped first.

    Attributes:
        held_bytes: of the answers kept.
        hits: calls that were answered from it.
        joined: calls that waited for an equal one under way.
        misses: calls that were computed.
        passed: calls that were too large.
    """

    __slots__ = (
        *("_answers", "_lanes", "_limits", "_secret"),
        *("held_bytes", "hits", "joined", "misses", "passed"),
    )

    def __init__(self, limits: CacheLimits | None = None) -> None:
        self._limits = limits or CacheLimits()
        # Without a secret key, a client could look for inputs that are taken for those of another.
        self._secret = os.urandom(_KEY_BYTES)
        self._answers: OrderedDict[_Key, tuple[Mapping[str, Array], int]] = OrderedDict()
        self._lanes = 0
        self.held_bytes = self.hits = self.joined = self.misses = self.passed = 0

    def in_front_of(self, lane: Lane, metrics: LaneMetrics | None = None) -> "CacheLane":
        """Return a lane that answers from this cache and asks `lane` for what is not there.

        Args:
            lane: of one loaded version of one model, with nothing that changes its answers.
            metrics: of that version, where hits and misses are counted too, or None.
        """
        self._lanes += 1
        own = LaneMetrics("", "") if metrics is None else metrics
        return CacheLane(self, lane, self._lanes, own)

    def to_json(self) -> dict[str, JsonValue]:
        """Return what is known, for `/v2` statistics."""
        return {
            "answers": len(self._answers),
            "held_bytes": self.held_bytes,
            "hits": self.hits,
            "joined": self.joined,
            "misses": self.misses,
            "passed": self.passed,
        }

    def _digest(self, inputs: Mapping[str, Array]) -> bytes:
        state = hashlib.blake2b(digest_size=_KEY_BYTES, key=self._secret)
        for name in sorted(inputs):
            array = inputs[name]
            # Its length precedes each part: otherwise two splits of the same bytes would be equal.
            head = f"{len(name)}:{name}{array.dtype.str}{array.shape}{array.nbytes}:"
            state.update(head.encode())
            if array.nbytes:
                state.update(np.ascontiguousarray(array).reshape(-1).data)
        return state.digest()

    def _find(self, key: _Key) -> Mapping[str, Array] | None:
        found = self._answers.get(key)
        if found is None:
            return None
        self._answers.move_to_end(key)
        return found[0]

    def _keep(self, key: _Key, answer: Mapping[str, Array]) -> None:
        size_bytes = sum(array.nbytes for array in answer.values()) + _ENTRY_BYTES
        if size_bytes > self._limits.max_bytes:
            return
        self._answers[key] = (answer, size_bytes)
        self.held_bytes += size_bytes
        while self.held_bytes > self._limits.max_bytes:
            _, (_, dropped_bytes) = self._answers.popitem(last=False)
            self.held_bytes -= dropped_bytes

    def _forget(self, lane: int) -> None:
        for key in [key for key in self._answers if key[0] == lane]:
            self.held_bytes -= self._answers.pop(key)[1]


class CacheLane(Lane):
    """Answers what it knows; everything else goes to the lane behind it, equal calls under way once."""

    __slots__ = ("_cache", "_is_closed", "_lane", "_metrics", "_number", "_under_way")

    def __init__(self, cache: ResponseCache, lane: Lane, number: int, metrics: LaneMetrics) -> None:
        """Be made by `ResponseCache.in_front_of`.

        Args:
            cache: shared by all models.
            lane: that computes.
            number: no other lane of this cache has it, so a version that is loaded again starts afresh.
            metrics: where hits and misses are counted.
        """
        self._cache = cache
        self._metrics = metrics
        self._lane = lane
        self._number = number
        self._under_way: dict[bytes, tuple[Call, list[Call]]] = {}
        self._is_closed = False

    def submit(self, call: Call) -> None:
        """Take `call`, which is answered from the cache or by the lane behind it; raises nothing."""
        cache = self._cache
        input_bytes = sum(array.nbytes for array in call.inputs.values())
        if self._is_closed or input_bytes > cache._limits.max_input_bytes:
            cache.passed += 1
            self._lane.submit(call)
            return
        # What is hashed must be what is computed: a client can write to shared memory between the two, and
        # others would get the answer to its second inputs.
        inputs = {name: array if array.flags.owndata else array.copy() for name, array in call.inputs.items()}
        digest = cache._digest(inputs)
        found = cache._find((self._number, digest))
        if found is not None:
            cache.hits += 1
            self._metrics.cache_hits += 1
            call.reply(found)
            return
        first = self._under_way.get(digest)
        # One with another priority has another place in the queue.
        if first is not None and first[0].priority == call.priority:
            cache.joined += 1
            self._metrics.cache_hits += 1
            first[1].append(call)
            return
        cache.misses += 1
        self._metrics.cache_misses += 1
        self._compute(call, inputs, digest)

    def to_json(self) -> dict[str, JsonValue]:
        """Return the figures of this version, and what all versions hold together, for `/v2` statistics."""
        metrics = self._metrics
        return {
            "hits": metrics.cache_hits,
            "misses": metrics.cache_misses,
            "held_bytes_of_all": self._cache.held_bytes,
        }

    def close(self) -> None:
        """Forget the answers of this version; calls under way are answered, but not kept."""
        self._is_closed = True
        self._cache._forget(self._number)

    def _compute(self, call: Call, inputs: Mapping[str, Array], digest: bytes) -> None:
        waiting: list[Call] = []
        is_first = digest not in self._under_way
        if is_first:
            self._under_way[digest] = (call, waiting)

        def take(answer: Answer) -> None:
            if is_first:
                del self._under_way[digest]
            if not isinstance(answer, EdgekitError):
                answer = _freeze(answer)
                if not self._is_closed and is_first:
                    self._cache._keep((self._number, digest), answer)
            call.reply(answer)
            for other in waiting:
                if isinstance(answer, EdgekitError):
                    # It may have failed for a reason of its own, such as its deadline.
                    self._lane.submit(other)
                else:
                    other.reply(answer)

        own = call.answered_by(take)
        own.inputs = inputs
        self._lane.submit(own)


def _freeze(answer: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return outputs that no reader can change, and that lie in no buffer of anybody else."""
    frozen = {}
    for name, array in answer.items():
        kept = array if array.flags.owndata else array.copy()
        kept.setflags(write=False)
        frozen[name] = kept
    return MappingProxyType(frozen)
