"""A canary: the candidate answers a share of the calls, and clients do not see its failures.

Calls are chosen evenly, not at random. After the answer, both versions run some of the candidate's calls
again to compare answers and latency. If calls arrive faster than they can be compared, the candidate gets
fewer calls. This limits the number of wrong answers before a rollback. Answers from the cache are compared,
but do not count in the error rate or the latency.

All calls of a sequence go to the version that answered the first one, because only this version has the
states. For a comparison, both versions run such a call as if it were the first of its sequence.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, RefusedInputError
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.service.options.rollout import CanaryOptions
from edgekit_runtime.service.rollout.comparison import all_finite
from edgekit_runtime.service.rollout.gates import Rollback
from edgekit_runtime.service.rollout.observer import Observer, is_of_model
from edgekit_runtime.service.rollout.paired_runs import Pair, PairedRuns
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane, Reused
from edgekit_runtime.service.scheduling.golden_ratio import GOLDEN
from edgekit_runtime.tensors import Array

if TYPE_CHECKING:
    from edgekit_runtime.service.scheduling.sequence_lane import SequenceLane

_AHEAD: Final = 2.0  # the candidate may be ahead by this multiple of the calls of a pair


class CanaryLane(Lane):
    """Sends a share of the calls to the candidate and the rest to the current version.

    Attributes:
        skipped: The number of comparisons that were skipped because another comparison or real calls were
            running.
    """

    def __init__(
        self,
        current: Lane,
        candidate: Lane,
        observer: Observer,
        pairs: PairedRuns,
        *,
        options: CanaryOptions,
        sequences: tuple["SequenceLane | None", "SequenceLane | None"] = (None, None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Add a candidate beside the current version.

        After a rollback, all calls go to `current`. After a promotion, the share does not change until the
        owner removes this lane. The owner closes the candidate, which must still answer its running calls.

        Args:
            current: The version in use.
            candidate: The version on trial.
            observer: Counts the answers and judges the candidate.
            pairs: Runs both versions with the same inputs.
            options: The share of the calls for the candidate, the share of these for comparison, and whether
                `current` answers calls on which the candidate failed before the deadline.
            sequences: The lanes in which `current` and `candidate` keep the states of sequences, or None.
            clock: The clock of the deadlines.
        """
        self._current = current
        self._candidate = candidate
        self._observer = observer
        self._pairs = pairs
        self._compared, self._compared_share = options.share * options.compared_share, options.compared_share
        self._sequences = sequences
        self._is_pairing, self.skipped = False, 0
        self._unpaired, self._most_unpaired = 0, math.ceil(_AHEAD / options.compared_share)
        self._retry = options.retry
        self._clock = clock
        self._phase = 0.0
        self._share = options.share
        # As many calls of the current version are measured as the candidate gets: more say little more.
        self._measured = min(2 * options.share, 1.0)

    def submit(self, call: Call) -> None:
        """Let one of the two versions answer `call` through `call.reply`. This does not raise."""
        self._phase = phase = (self._phase + GOLDEN) % 1.0
        verdict = self._observer.verdict
        if call.sequence is not None and not isinstance(verdict, Rollback):
            self._submit_step(call, call.sequence)
        elif phase >= self._measured or isinstance(verdict, Rollback):
            self._current.submit(call)
        elif phase < self._compared and verdict is None:
            if self._is_pairing or not self._pairs.may_start():
                self.skipped += 1
                self._measure_current(call)
            else:
                self._is_pairing = True
                self._try_candidate(call, is_compared=True)
        elif phase < self._share and (self._unpaired < self._most_unpaired or verdict is not None):
            self._unpaired += 1
            self._try_candidate(call, is_compared=False)
        else:
            self._measure_current(call)

    def _submit_step(self, call: Call, step: SequenceStep) -> None:
        """Send a call to the version that has its sequence.

        A share of new sequences goes to the candidate.
        """
        current, candidate = (lane is not None and lane.holds(step.id) for lane in self._sequences)
        may_begin = self._phase < self._share and self._unpaired < self._most_unpaired
        if not candidate and (current or not step.start or not may_begin):
            self._measure_current(call)
            return
        is_compared = (
            self._observer.verdict is None
            and self._phase < self._compared_share
            and not self._is_pairing
            and self._pairs.may_start()
        )
        self._is_pairing |= is_compared
        self._unpaired += not is_compared
        self._try_candidate(call, is_compared=is_compared)

    def _measure_current(self, call: Call) -> None:
        begin_s = self._clock()

        def take(answer: Answer) -> None:
            latency_s = self._clock() - begin_s
            has_failed = _has_failed(answer)
            call.reply(answer)
            if not isinstance(answer, Reused):
                self._observer.count_current(None if has_failed else latency_s)

        self._current.submit(call.answered_by(take))

    def _try_candidate(self, call: Call, *, is_compared: bool) -> None:
        begin_s = self._clock()
        inputs: Mapping[str, Array] | None = None
        is_answered = False

        def take(answer: Answer) -> None:
            nonlocal is_answered
            is_answered = True
            now_s = self._clock()
            if _has_failed(answer):
                if is_compared:
                    self._is_pairing = False
                else:
                    self._unpaired = max(0, self._unpaired - 1)  # an error is no wrong answer
                self._take_failure(call, answer, now_s)
                return
            own_inputs = inputs
            if own_inputs is None and is_compared:  # the model has run at once
                own_inputs = call.own_inputs()
            call.reply(answer)
            if not isinstance(answer, Reused):
                self._observer.count_candidate(now_s - begin_s)
            if own_inputs is not None:
                self._pairs.start(own_inputs, self._take_pair)

        self._candidate.submit(call.answered_by(take))
        if is_compared and not is_answered:  # the model runs on a thread meanwhile
            inputs = call.own_inputs()

    def _take_failure(self, call: Call, failed: Answer, now_s: float) -> None:
        is_within = call.sequence is not None and not call.sequence.start  # `current` has not its states
        if self._retry and not is_within and (call.deadline_s is None or now_s < call.deadline_s):
            self._ask_current(call, failed)
            return
        # Now, as the inputs are gone after the reply. Without an answer of the current version to the same
        # inputs, an error that may be the client's fault is not held against the candidate.
        if isinstance(failed, EdgekitError):
            is_own_fault = isinstance(failed, BackendError) and not isinstance(failed, RefusedInputError)
        else:
            is_own_fault = all_finite(call.inputs)
        call.reply(failed)
        self._count_failure(failed, is_own_fault=is_own_fault)

    def _take_pair(self, pair: Pair | None) -> None:
        self._is_pairing = False
        if pair is not None:
            self._unpaired = 0
            self._observer.add_pair(pair)

    def _ask_current(self, call: Call, failed: Answer) -> None:
        """Answer with the current version.

        This also shows whether only the candidate fails on these inputs.
        """

        def take(answer: Answer) -> None:
            is_own_fault = is_of_model(failed) and not _has_failed(answer)
            call.reply(answer)
            self._count_failure(failed, is_own_fault=is_own_fault)

        self._current.submit(call.answered_by(take))

    def _count_failure(self, failed: Answer, *, is_own_fault: bool) -> None:
        if isinstance(failed, Reused):  # NaN, which was counted when it was computed
            return
        # Failures of both arms count in the shares, whichever is at fault: so the shares can be compared.
        self._observer.count_candidate(None)
        if is_own_fault:
            self._observer.blame(not_finite=not isinstance(failed, EdgekitError))

    def to_json(self) -> dict[str, JsonValue]:
        """Return the observations for the `/v2` statistics."""
        return {
            **self._observer.to_json(),
            "skipped": self.skipped,
        }


def _has_failed(answer: Answer) -> bool:
    return isinstance(answer, EdgekitError) or not all_finite(answer)
