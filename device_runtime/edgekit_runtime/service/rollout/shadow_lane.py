"""A shadow: the current version answers, and the candidate runs on copies of calls when the service is idle.

Real calls come first. The candidate runs only if few real calls are running and the last answer was some
time ago. Large inputs are not copied, and copies that wait too long are dropped. Under steady load, nothing
is compared. Use a `CanaryLane` in this case. To compare answers and latency, both versions run again on the
copied inputs. The candidate should run on a thread, so that it does not delay new calls. Answers from the
cache are not counted.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.rollout import ShadowOptions
from edgekit_runtime.service.rollout.comparison import all_finite
from edgekit_runtime.service.rollout.observer import Defer, Observer, is_of_model
from edgekit_runtime.service.rollout.paired_runs import Pair, PairedRuns
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane, Reused
from edgekit_runtime.service.scheduling.golden_ratio import GOLDEN
from edgekit_runtime.tensors import Array


@dataclass(slots=True, eq=False)
class _Copy:
    inputs: Mapping[str, Array] | None = None
    current_s: float = 0.0
    answered_s: float = 0.0


class ShadowLane(Lane):
    """Answers with the current version, and runs the candidate on copies of calls when the service is idle.

    Attributes:
        under_way: The number of real calls that are not answered yet.
        dropped: The number of selected calls whose copies were skipped or dropped.
    """

    def __init__(
        self,
        current: Lane,
        candidate: Lane,
        observer: Observer,
        pairs: PairedRuns,
        *,
        options: ShadowOptions,
        defer: Defer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Add a candidate behind the current version.

        Args:
            current: The version in use.
            candidate: The version on trial.
            observer: Counts the answers and judges the candidate.
            pairs: Runs both versions with the same inputs.
            options: The options for copying calls.
            defer: Calls a function on the event loop after some seconds.
            clock: The clock of the deadlines.
        """
        self._current = current
        self._candidate = candidate
        self._observer = observer
        self._pairs = pairs
        self._options = options
        self._defer = defer
        self._clock = clock
        self._phase = 0.0
        self._last_s = clock()
        self._pending: deque[_Copy] = deque()
        self._armed = False
        self._is_scheduled = False
        self.under_way = 0
        self.dropped = 0

    def submit(self, call: Call) -> None:
        """Let the current version answer `call` through `call.reply`. This does not raise."""
        self._phase = phase = (self._phase + GOLDEN) % 1.0
        begin_s = self._clock()
        copy = None
        # A call that found others under way would have waited for them, which the candidate does not.
        if phase < self._options.share and self._observer.verdict is None:
            if self.under_way == 0 and len(self._pending) < self._options.max_pending:
                copy = _Copy()
            else:
                self.dropped += 1
        self.under_way += 1

        def take(answer: Answer) -> None:
            nonlocal copy
            self.under_way -= 1
            # Counted from the answer: a client's next call comes soon after it.
            self._last_s = now_s = self._clock()
            if copy is None:
                call.reply(answer)
                return
            pending, copy = copy, None
            pending.current_s, pending.answered_s = now_s - begin_s, now_s
            if pending.inputs is None and not isinstance(answer, EdgekitError | Reused):
                self._copy_inputs(pending, call)
            call.reply(answer)
            self._keep(pending, answer)

        self._current.submit(call.answered_by(take))
        if copy is not None:  # the model runs on a thread meanwhile
            self._copy_inputs(copy, call)

    def _copy_inputs(self, copy: _Copy, call: Call) -> None:
        # An array that owns its values was made for this call: nobody else will write there.
        borrowed = sum(array.nbytes for array in call.inputs.values() if not array.flags.owndata)
        if borrowed <= self._options.max_copied_bytes:
            copy.inputs = call.own_inputs()

    def _keep(self, copy: _Copy, answer: Answer) -> None:
        """Queue a copy, unless the current version failed or did not run, so that nothing can be compared."""
        if isinstance(answer, EdgekitError | Reused) or not all_finite(answer):
            return
        if copy.inputs is None:
            self.dropped += 1
            return
        self._pending.append(copy)
        self._arm()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._defer(self._options.quiet_s, self._ask)

    def _ask(self) -> None:
        """Run the candidate if no real calls prevent it, or try again later."""
        self._armed = False
        now_s, options = self._clock(), self._options
        if self._observer.verdict is not None:
            self._pending.clear()
        while self._pending and now_s - self._pending[0].answered_s > options.max_wait_s:
            self._pending.popleft()
            self.dropped += 1
        if not self._pending or self._is_scheduled:
            return
        if self.under_way > options.max_load or now_s - self._last_s < options.quiet_s:
            self._arm()
            return
        copy = self._pending.popleft()
        self._is_scheduled = True

        def take(answer: Answer) -> None:
            if self._is_good(copy, answer, self._clock() - now_s):
                self._pairs.start(copy.inputs or {}, self._take_pair)
            else:
                self._go_on()

        self._candidate.submit(Call(copy.inputs or {}, take))

    def _take_pair(self, pair: Pair | None) -> None:
        if pair is not None:
            self._observer.add_pair(pair)
        self._go_on()

    def _go_on(self) -> None:
        self._is_scheduled = False
        if self._pending:
            self._arm()

    def _is_good(self, copy: _Copy, answer: Answer, candidate_s: float) -> bool:
        """Count an answer of the candidate. Return whether it can be compared."""
        if isinstance(answer, Reused):
            return False
        self._observer.count_current(copy.current_s)
        if isinstance(answer, EdgekitError):
            self._observer.count_candidate(None)
            if is_of_model(answer):
                self._observer.blame(not_finite=False)
        elif not all_finite(answer):
            self._observer.count_candidate(None)
            # Inputs in shared memory may have changed after the current version read them.
            self._observer.blame(not_finite=all_finite(copy.inputs or {}))
        else:
            self._observer.count_candidate(candidate_s)
            return True
        return False

    def to_json(self) -> dict[str, JsonValue]:
        """Return the observations, and the numbers of `dropped` and `waiting` copies."""
        return {
            **self._observer.to_json(),
            "dropped": self.dropped,
            "waiting": len(self._pending),
        }
