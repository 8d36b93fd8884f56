"""A lane that answers equal inputs from memory: for cameras that look at nothing, and retries.

Off unless a model asks for it: every call pays for a copy of its inputs and for their digest.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import numpy as np

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.service.call import Answer, Call, Lane
from edgekit_runtime.service.metrics import LaneMetrics
from edgekit_runtime.service.refusals import reply
from edgekit_runtime.sessions.session import Array

_DIGEST_BYTES: Final = 32


class ResponseCache:
    """A `Lane` in front of another; the least recently used answers are forgotten first.

    One cache belongs to one version of a model, and ends with it.
    """

    __slots__ = ("_answers", "_lane", "_max_bytes", "_metrics", "_size_bytes")

    def __init__(self, lane: Lane, max_bytes: int, metrics: LaneMetrics) -> None:
        """Make an empty cache.

        Args:
            lane: that answers what is not in it.
            max_bytes: of all outputs in it.
            metrics: of the model.
        """
        self._lane, self._max_bytes, self._metrics = lane, max_bytes, metrics
        self._answers: OrderedDict[bytes, Mapping[str, Array]] = OrderedDict()
        self._size_bytes = 0

    def submit(self, call: Call) -> None:
        """Take `call`; one that is in the cache is answered before this returns."""
        # A copy: inputs in shared memory may change between the digest and the run, and the answer to
        # something else would be kept for everyone.
        inputs = {name: np.array(array) for name, array in call.inputs.items()}
        key = _digest(inputs)
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
            self._metrics.cache_hits += 1
            reply(call, found)
            return
        self._metrics.cache_misses += 1

        def keep_and_reply(answer: Answer) -> None:
            reply(call, answer if isinstance(answer, EdgekitError) else self._keep(key, answer))

        self._lane.submit(Call(inputs, keep_and_reply, call.priority, call.deadline_s))

    def _keep(self, key: bytes, answer: Mapping[str, Array]) -> Mapping[str, Array]:
        size_bytes = sum(array.nbytes for array in answer.values())
        if size_bytes > self._max_bytes or key in self._answers:
            return answer
        kept = {}
        for name, array in answer.items():
            # A copy: a view would keep the outputs of its whole batch in memory.
            kept[name] = np.array(array)
            kept[name].flags.writeable = False
        self._answers[key] = kept
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes:
            _, oldest = self._answers.popitem(last=False)
            self._size_bytes -= sum(array.nbytes for array in oldest.values())
        return kept


def _digest(inputs: Mapping[str, Array]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(inputs):
        array = inputs[name]
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data if array.ndim else array.tobytes())
    return digest.digest()
