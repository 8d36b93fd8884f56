"""A lane that keeps the states of sequences between requests.

    request 1, id 7, start:  runs with x1 and zeros, returns y1, keeps state s1
    request 2, id 7:         runs with x2 and s1, returns y2, keeps state s2
    request 3, id 7, end:    runs with x3 and s2, returns y3, drops the sequence

The next lane gets inputs that include the states, so requests of different sequences can share batches.
Requests of one sequence run one after the other, in the order of arrival. If a request fails, the states do
not change. If the first request fails, the sequence does not start.

A lane belongs to one version of a model, because other versions cannot use its states.
"""

import functools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Final, NamedTuple

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, OverloadedError, RequestError
from edgekit_runtime.package.states import RecurrentState, StateInputs
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane
from edgekit_runtime.service.scheduling.outcomes import refuse, reply, shed
from edgekit_runtime.tensors import Array, TensorSpec, input_bytes

_MIN_RETRY_S: Final = 0.1


class SequenceLimits(NamedTuple):
    """Limits of the sequences of one model.

    Attributes:
        max_bytes: The size limit of all states.
        idle_s: The time without a request after which a sequence ends.
        max_waiting: The maximum number of calls that wait for an earlier call of their sequence.
    """

    max_sequences: int
    max_bytes: int
    idle_s: float
    max_waiting: int


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence that has started, or whose first call has not run yet.

    Attributes:
        states: A dict from input names to values for the next run. None before the start and after the end.
        last_s: The time when its last call arrived or was answered.
        waiting: The calls that have not started.
    """

    last_s: float
    states: Mapping[str, Array] | None = None
    waiting: deque[Call] = field(default_factory=deque)
    is_running: bool = False
    is_advancing: bool = False

    @property
    def is_idle(self) -> bool:
        return not (self.is_running or self.waiting)


class SequenceLane(Lane):
    """Adds the states of a sequence to the inputs of its calls, and stores the new states."""

    def __init__(
        self,
        lane: Lane,
        states: Sequence[RecurrentState],
        inputs: Sequence[TensorSpec],
        limits: SequenceLimits,
        *,
        metrics: LaneMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a lane without sequences, in front of a lane that answers calls with complete inputs."""
        self._lane, self._states, self._limits = lane, StateInputs(states, inputs), limits
        self._metrics, self._clock = metrics, clock
        self._sequences: OrderedDict[int | str, _Sequence] = OrderedDict()  # the least recently used first
        self._held_bytes = self._waiting = 0
        self.started = self.expired = 0

    def attempt(self, inputs: Mapping[str, Array]) -> "Answer | None":
        """Try to answer a call without a sequence, see `Lane.attempt`. Missing states are zeros."""
        return self._lane.attempt(self._states.complete(inputs))

    def submit(self, call: Call) -> None:
        """Run `call` after the earlier calls of its sequence. This does not raise.

        `call.reply` gets the outputs or the error.
        """
        step = call.sequence
        if step is None:
            self._submit(call, self._states.complete(call.inputs), call.reply)
            return
        sequence = self._find(step)
        if sequence is None:
            refuse(call, self._make_unknown_error(step.id), self._metrics)
            return
        if sequence.is_running and self._waiting >= self._limits.max_waiting:
            shed(call, self._metrics, self._waiting, _MIN_RETRY_S)
            return
        sequence.waiting.append(call)
        self._waiting += 1
        self._advance(step.id, sequence)

    def holds(self, sequence_id: int | str) -> bool:
        """Return whether the sequence is active."""
        return sequence_id in self._sequences

    def to_json(self) -> dict[str, JsonValue]:
        """Drop idle sequences, and return the statistics for `/v2`.

        `active`, `started` and `expired` are numbers of sequences. `held_bytes` is the size of all states.
        """
        self._expire(self._clock())
        return {
            "active": len(self._sequences),
            "held_bytes": self._held_bytes,
            "started": self.started,
            "expired": self.expired,
        }

    def _find(self, step: SequenceStep) -> _Sequence | None:
        """Return the sequence of a call, which may start it. Return None if it is not active."""
        now_s = self._clock()
        self._expire(now_s)
        if step.start:
            self._sequences.setdefault(step.id, _Sequence(now_s))
        sequence = self._sequences.get(step.id)
        if sequence is not None:
            sequence.last_s = now_s
            self._sequences.move_to_end(step.id)
        return sequence

    def _expire(self, now_s: float) -> None:
        """Drop the sequences that have been idle for too long, the least recently used first."""
        while self._sequences:
            sequence_id, sequence = next(iter(self._sequences.items()))
            if not sequence.is_idle or now_s - sequence.last_s <= self._limits.idle_s:
                return
            self._drop(sequence_id)
            self.expired += 1

    def _advance(self, sequence_id: int | str, sequence: _Sequence) -> None:
        """Run the calls that may run now. These are several calls if each is answered at once."""
        if sequence.is_advancing:  # called from within, by an answer that came at once
            return
        sequence.is_advancing = True
        while sequence.waiting and not sequence.is_running:
            call = sequence.waiting.popleft()
            self._waiting -= 1
            try:
                self._run(sequence_id, sequence, call)
            except EdgekitError as error:
                refuse(call, error, self._metrics)
        sequence.is_advancing = False
        if sequence.states is None and sequence.is_idle and self._sequences.get(sequence_id) is sequence:
            self._drop(sequence_id)

    def _run(self, sequence_id: int | str, sequence: _Sequence, call: Call) -> None:
        """Pass a call on with the states of its sequence.

        Raises:
            EdgekitError: The call is refused, and the states do not change.
        """
        step = call.sequence
        if step is None or (sequence.states is None and not step.start):
            raise self._make_unknown_error(sequence_id)
        inputs = self._states.complete(call.inputs, None if step.start else sequence.states)
        if step.start:
            self._begin(sequence, self._states.pick(inputs))
        sequence.is_running = True
        self._submit(call, inputs, functools.partial(self._take, sequence, call, step))

    def _submit(self, call: Call, inputs: Mapping[str, Array], reply_to: Callable[[Answer], None]) -> None:
        complete = call.answered_by(reply_to)
        complete.inputs, complete.sequence = inputs, None
        self._lane.submit(complete)

    def _take(self, sequence: _Sequence, call: Call, step: SequenceStep, answer: Answer) -> None:
        """Store the states from an answer, answer the call, and run the next calls of the sequence."""
        sequence.is_running = False
        sequence.last_s = self._clock()
        states = None
        if not (step.end or isinstance(answer, EdgekitError)):
            try:
                states = self._states.take(answer)
            except Exception as cause:  # of a third party's backend that returned other outputs
                answer = BackendError(f"the backend returned no states: {cause!r}")
        if step.start or not isinstance(answer, EdgekitError):
            self._store(sequence, states)
        reply(call, answer)
        self._advance(step.id, sequence)

    def _begin(self, sequence: _Sequence, states: Mapping[str, Array]) -> None:
        """Set the first states of a sequence.

        Raises:
            OverloadedError: There are too many sequences, or their states are too large.
        """
        limits, count = self._limits, len(self._sequences)
        held_bytes = self._held_bytes - input_bytes(sequence.states or {}) + input_bytes(states)
        if count > limits.max_sequences or held_bytes > limits.max_bytes:
            oldest = next(iter(self._sequences.values()))
            wait_s = oldest.last_s + limits.idle_s - self._clock()
            raise OverloadedError(
                f"{self._metrics.model}: {count - 1} sequences are active, and no more fit (max_sequences is"
                f" {limits.max_sequences}); end sequences by sequence_end, or try again later",
                max(_MIN_RETRY_S, wait_s),
            )
        self._store(sequence, states)
        self.started += 1

    def _store(self, sequence: _Sequence, states: Mapping[str, Array] | None) -> None:
        self._held_bytes += input_bytes(states or {}) - input_bytes(sequence.states or {})
        sequence.states = states

    def _drop(self, sequence_id: int | str) -> None:
        self._store(self._sequences.pop(sequence_id), None)

    def _make_unknown_error(self, sequence_id: int | str) -> RequestError:
        metrics = self._metrics
        return RequestError(
            400,
            f"{metrics.model} {metrics.version}: sequence {sequence_id!r} is not active: the first request of"
            f" a sequence must set sequence_start. One ends by sequence_end, after {self._limits.idle_s:g} s"
            " without a request, or with the version, worker or service that it began with",
        )
