"""Counts the answers of two versions, judges the candidate, and reports the verdict once."""

import logging
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, DataError, EdgekitError
from edgekit_runtime.service.options.rollout import Gates
from edgekit_runtime.service.rollout.gates import Arm, Continue, Observations, Promote, Rollback, judge
from edgekit_runtime.service.rollout.paired_runs import Pair
from edgekit_runtime.service.scheduling.call import Answer
from edgekit_runtime.statistics.confidence_sequences import LogHistogram

Report: TypeAlias = Callable[[Promote | Rollback], None]
# (seconds, what to call then), such as `loop.call_later`
Defer: TypeAlias = Callable[[float, Callable[[], None]], object]

# The least answers of the candidate between two verdicts, also as a share of all. A verdict takes as long as
# a small inference, and late ones bring little that is new.
_LOOK_EVERY: Final = 32
_LOOK_SHARE: Final = 1 / 16

_logger = logging.getLogger(__name__)


class Observer:
    """Counts the answers of two versions, judges the candidate, and reports the verdict once.

    Attributes:
        verdict: The final verdict of `judge`, or None while the trial continues.
    """

    __slots__ = ("_begin_s", "_clock", "_defer", "_gates", "_report", "_until_look", "observed", "verdict")

    def __init__(
        self,
        gates: Gates,
        report: Report,
        *,
        defer: Defer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an observer without observations.

        Args:
            gates: The limits of the candidate.
            report: Called once with the verdict, through `defer`, so never while a call is being answered.
            defer: Calls a function on the event loop after some seconds.
            clock: Returns the time in seconds.
        """
        self._gates = gates
        self._report: Callable[[Promote | Rollback], None] | None = report
        self._defer = defer
        self._clock = clock
        self._begin_s = clock()
        self._until_look = _LOOK_EVERY
        self.observed = Observations()
        self.verdict: Promote | Rollback | None = None

    def count_current(self, latency_s: float | None) -> None:
        """Count an answer of the current version. `latency_s` is None for a failed answer."""
        _count(self.observed.current, latency_s)

    def count_candidate(self, latency_s: float | None) -> None:
        """Count an answer of the candidate. `latency_s` is None for a failed answer.

        The candidate is judged after 32 answers, and then at growing intervals.
        """
        _count(self.observed.candidate, latency_s)
        if latency_s is not None:
            self.observed.failed_in_a_row = 0
        self._until_look -= 1
        if self._until_look <= 0:
            self.look()

    def blame(self, *, not_finite: bool) -> None:
        """Count a failure of the candidate on inputs on which the current version did not fail.

        The candidate is judged at once if `not_finite` is True or `Gates.error_burst` is reached.

        Args:
            not_finite: Whether the answer contains NaN or infinity.
        """
        self.observed.failed_in_a_row += 1
        self.observed.not_finite += not_finite
        if not_finite or self.observed.failed_in_a_row >= self._gates.error_burst:
            self.look()

    def add_pair(self, pair: Pair) -> None:
        """Add a pair of runs with the same inputs. If the answers differ, the candidate is judged at once."""
        observed, least = self.observed, self._gates.min_agreement
        observed.agreement += pair.agreement
        observed.compared += 1
        observed.paired.add(pair.current_s, pair.candidate_s, self._gates.max_p99_ratio)
        if pair.agreement < least:
            self.look()  # wrong answers go to clients until then

    def add_energy(self, candidate_j: float, current_j: float) -> None:
        """Add the energy per request of both versions in joules, measured over the same period."""
        self.observed.candidate.energy.add(candidate_j)
        self.observed.current.energy.add(current_j)

    def look(self) -> None:
        """Judge the candidate unless there is a final verdict.

        Call this regularly, because a verdict may depend on time.
        """
        self._until_look = max(_LOOK_EVERY, int(self.observed.candidate.answers * _LOOK_SHARE))
        if self.verdict is not None:
            return
        self.observed.elapsed_s = self._clock() - self._begin_s
        verdict = judge(self.observed, self._gates)
        if isinstance(verdict, Continue):
            return
        self.verdict = verdict
        if isinstance(verdict, Rollback):
            _logger.warning("canary: rolled back: %s: %s", verdict.gate, verdict.reason)
        else:
            _logger.info("canary: promoted after %d answers", self.observed.candidate.answers)
        self._defer(0.0, self._report_verdict)

    def _report_verdict(self) -> None:
        report, self._report = self._report, None  # it holds both versions, and this would be a cycle
        if self.verdict is not None and report is not None:
            report(self.verdict)

    def to_json(self) -> dict[str, JsonValue]:
        """Return the observations for the `/v2` statistics. Means without values are None.

        `verdict` is `promote`, `rollback` (with `gate` and `reason`) or `continue` (with the `undecided`
        gates). `compared` is the number of pairs. `agreement` is the mean agreement, and `latency_ratio_p50`
        is the median of the candidate's latency divided by the current version's latency. `current` and
        `candidate` contain counts and quantiles of latency and energy.
        """
        observed = self.observed
        verdict = self.verdict or judge(observed, self._gates)
        stated: dict[str, JsonValue] = {"verdict": type(verdict).__name__.lower()}
        if isinstance(verdict, Rollback):
            stated |= {"gate": verdict.gate, "reason": verdict.reason}
        elif isinstance(verdict, Continue):
            stated["undecided"] = list(verdict.undecided)
        return {
            **stated,
            "elapsed_s": round(observed.elapsed_s, 3),
            "agreement": round(observed.agreement / observed.compared, 6) if observed.compared else None,
            "compared": observed.compared,
            "latency_ratio_p50": _rounded(observed.paired.ratio.quantile(0.5)),
            "current": _arm_to_json(observed.current),
            "candidate": _arm_to_json(observed.candidate),
        }


def is_of_model(failed: Answer) -> bool:
    """Return whether the model caused a failure. Queues, deadlines and closed lanes are other causes."""
    return isinstance(failed, BackendError | DataError) or not isinstance(failed, EdgekitError)


def _count(arm: Arm, latency_s: float | None) -> None:
    arm.answers += 1
    if latency_s is None:
        arm.failed += 1
    else:
        arm.latency.add(latency_s)


def _arm_to_json(arm: Arm) -> dict[str, JsonValue]:
    return {
        "answers": arm.answers,
        "failed": arm.failed,
        "p50_us": _microseconds(arm.latency, 0.5),
        "p99_us": _microseconds(arm.latency, 0.99),
        "energy_mj": None if not arm.energy.count else round(1e3 * (arm.energy.quantile(0.5) or 0.0), 3),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _microseconds(latency: LogHistogram, quantile: float) -> float | None:
    seconds = latency.quantile(quantile)
    return None if seconds is None else round(seconds * 1e6, 1)
