"""A canary: a share of the calls is answered by the candidate, and clients do not see it fail.

Which calls is decided without chance. Outputs are not compared here, as a call has one answer: that is what
`shadow_lane` is for. What a cache answers says nothing about a version, and is not counted.
"""

import time
from collections.abc import Callable

from edgekit_runtime.errors import BackendError, EdgekitError, ManifestError
from edgekit_runtime.service.agreement import all_finite
from edgekit_runtime.service.call import Answer, Call, Lane, Reused
from edgekit_runtime.service.canary import Rollback
from edgekit_runtime.service.canary_watch import GOLDEN, Watch, is_of_model


class CanaryLane(Lane):
    """Sends a share of the calls to the candidate and the rest to the current version."""

    __slots__ = ("_candidate", "_clock", "_current", "_measured", "_phase", "_retry", "_share", "_watch")

    def __init__(
        self,
        current: Lane,
        candidate: Lane,
        watch: Watch,
        *,
        share: float,
        retry: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put a candidate beside the current version.

        After a rollback all calls go to `current`; after a promotion the share stays until the owner takes
        this lane away. The owner closes the candidate: what is under way there must still be answered, with
        an error if need be, which is then made good by `current`.

        Args:
            current: the version in use.
            candidate: the one on trial.
            watch: counts and judges.
            share: of the calls that go to the candidate, more than 0 and at most 1.
            retry: whether a failed answer of the candidate is replaced by one of the current version, where
                the call's deadline has not passed.
            clock: that of the deadlines.

        Raises:
            ManifestError: the share is out of range.
        """
        if not 0 < share <= 1:
            raise ManifestError(f"canary: share is {share}, expected more than 0 and at most 1")
        self._current = current
        self._candidate = candidate
        self._watch = watch
        self._retry = retry
        self._clock = clock
        self._phase = 0.0
        self._share = share
        # As many calls of the current version are measured as the candidate gets: more say little more.
        self._measured = min(2 * share, 1.0)

    def submit(self, call: Call) -> None:
        """Take `call`, which one of the two versions answers; raises nothing."""
        phase = self._phase + GOLDEN
        if phase >= 1.0:
            phase -= 1.0
        self._phase = phase
        if phase >= self._measured or isinstance(self._watch.verdict, Rollback):
            self._current.submit(call)
        elif phase < self._share:
            self._try_candidate(call)
        else:
            self._measure_current(call)

    def _measure_current(self, call: Call) -> None:
        begin_s = self._clock()

        def take(answer: Answer) -> None:
            latency_s = self._clock() - begin_s
            has_failed = _has_failed(answer)
            call.reply(answer)
            if not isinstance(answer, Reused):
                self._watch.count_current(None if has_failed else latency_s)

        self._current.submit(call.answered_by(take))

    def _try_candidate(self, call: Call) -> None:
        begin_s = self._clock()

        def take(answer: Answer) -> None:
            now_s = self._clock()
            if not _has_failed(answer):
                call.reply(answer)
                if not isinstance(answer, Reused):
                    self._watch.count_candidate(now_s - begin_s)
            elif self._retry and (call.deadline_s is None or now_s < call.deadline_s):
                self._ask_current(call, answer)
            else:
                # Now, as the inputs are gone after the reply. Without another answer to the same inputs, an
                # error for which the client may be to blame is not held against the candidate.
                is_own_fault = (
                    isinstance(answer, BackendError)
                    if isinstance(answer, EdgekitError)
                    else all_finite(call.inputs)
                )
                call.reply(answer)
                self._count_failure(answer, is_own_fault=is_own_fault)

        self._candidate.submit(call.answered_by(take))

    def _ask_current(self, call: Call, failed: Answer) -> None:
        """Answer with the current version, which also tells whose fault the failed answer was."""

        def take(answer: Answer) -> None:
            is_own_fault = is_of_model(failed) and not _has_failed(answer)
            call.reply(answer)
            self._count_failure(failed, is_own_fault=is_own_fault)

        self._current.submit(call.answered_by(take))

    def _count_failure(self, failed: Answer, *, is_own_fault: bool) -> None:
        if isinstance(failed, Reused):  # NaN, which was counted when it was computed
            return
        # Failures of both arms count in the shares, whoever is at fault: so the shares can be compared.
        self._watch.count_candidate(None)
        if is_own_fault:
            self._watch.blame(not_finite=not isinstance(failed, EdgekitError))


def _has_failed(answer: Answer) -> bool:
    return isinstance(answer, EdgekitError) or not all_finite(answer)
