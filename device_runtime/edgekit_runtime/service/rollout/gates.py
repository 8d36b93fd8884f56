"""Decides whether a candidate is promoted, rolled back or observed further.

`canary_lane` and `shadow_lane` collect the observations, and the rollout controller applies the verdict.
`judge` may be called any number of times. The probability that it rolls back a candidate for missing a limit
that the candidate keeps is at most `Gates.alpha`. A candidate that misses a limit is promoted before the time
limit with a probability of at most `Gates.alpha`. See `confidence_sequences` for the assumptions and
docs/explanation/canary.md for measurements.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Final, TypeAlias

from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.rollout import Gates
from edgekit_runtime.statistics.confidence_sequences import LogHistogram, share_interval, share_is_above

_TESTS: Final = 5  # agreement, errors, p50, p99, energy: each gets its part of alpha
_LEAST_FOR_P99: Final = 100  # pairs from which the p99 is known


@dataclass(slots=True)
class Arm:
    """Counts and latencies of one version.

    Attributes:
        answers: The number of answers, including failed ones.
        failed: The number of errors and of answers with NaN or infinity.
        latency: The latency of successful answers in seconds.
        energy: The energy per request in joules. Empty if it is not measured.
    """

    answers: int = 0
    failed: int = 0
    latency: LogHistogram = field(default_factory=LogHistogram)
    energy: LogHistogram = field(default_factory=LogHistogram)


@dataclass(slots=True)
class PairedLatency:
    """Latencies of both versions, run with the same inputs in quick succession and in random order.

    The statistical tests in `judge` assume that disturbances affect both versions equally often. If both
    versions are equally fast, each of them is slower in half of the pairs.

    Attributes:
        ratio: The candidate's latency divided by the current version's latency.
        current: The latency of the current version in seconds.
        candidate_slow: The number of pairs in which only the candidate was slow. The candidate is slow if it
            takes longer than `max_p99_ratio` times the 99th latency percentile of the current version.
        current_slow: The number of pairs in which only the current version was slow. It is slow if it takes
            longer than its own 99th latency percentile.
    """

    ratio: LogHistogram = field(default_factory=LogHistogram)
    current: LogHistogram = field(default_factory=LogHistogram)
    candidate_slow: int = 0
    current_slow: int = 0

    def add(self, current_s: float, candidate_s: float, max_p99_ratio: float) -> None:
        """Add a pair of latencies in seconds. `max_p99_ratio` is described in `Gates`."""
        # From the pairs before this one: the limit must not depend on the pair that it judges.
        slow_s = self.current.quantile(0.99) if self.current.count >= _LEAST_FOR_P99 else None
        if slow_s is not None and max_p99_ratio:
            is_candidate, is_current = candidate_s > max_p99_ratio * slow_s, current_s > slow_s
            self.candidate_slow += is_candidate and not is_current
            self.current_slow += is_current and not is_candidate
        self.current.add(current_s)
        self.ratio.add(candidate_s / max(current_s, 1e-9))


@dataclass(slots=True, kw_only=True)
class Observations:
    """All observations since the start of the trial.

    Attributes:
        elapsed_s: The seconds since the start of the trial.
        current: The observations of the current version.
        candidate: The observations of the candidate.
        agreement: The sum of the agreements of all compared answers, each 0 to 1.
        compared: The number of compared pairs of answers to the same inputs.
        paired: The latencies of both versions in these pairs.
        not_finite: The number of candidate answers with NaN or infinity, although the inputs or the current
            version's answer contain none.
        failed_in_a_row: The number of consecutive failures of the candidate. A failure is not counted if the
            current version also fails on these inputs, or if a queue or a deadline is the cause.
    """

    elapsed_s: float = 0.0
    current: Arm = field(default_factory=Arm)
    candidate: Arm = field(default_factory=Arm)
    agreement: float = 0.0
    compared: int = 0
    paired: PairedLatency = field(default_factory=PairedLatency)
    not_finite: int = 0
    failed_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class Continue:
    """The trial continues.

    Attributes:
        undecided: The gates for which there is not enough evidence yet.
    """

    undecided: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Promote:
    """The candidate replaces the version in use."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The candidate is unloaded.

    Attributes:
        gate: The gate that the candidate missed.
        reason: The reason as text, with figures.
    """

    gate: str
    reason: str


Verdict: TypeAlias = Continue | Promote | Rollback


@dataclass(frozen=True, slots=True)
class _Finding:
    """The result of a gate.

    Attributes:
        is_kept: True if the gate is proved to be kept, False if it is proved to be missed, else None.
        is_proof_needed: Whether an undecided gate is missed when the time limit is reached.
    """

    gate: str
    is_kept: bool | None
    text: Callable[[], str]  # only a verdict needs it, and quantiles take time
    is_proof_needed: bool


def judge(observed: Observations, gates: Gates) -> Verdict:
    """Return the verdict on the candidate.

    NaN, infinity or a burst of errors causes an immediate rollback. Otherwise, the candidate is rolled back
    when statistical tests show that it misses a gate, and promoted when they show that it keeps all gates.

    After `max_duration_s`, the candidate is rolled back if it has too few answers, if the agreement is
    undecided, or if the measured error rate exceeds its limit. Otherwise, it is promoted.
    """
    at_once = _find_at_once(observed, gates)
    if at_once is not None:
        return at_once
    findings = list(_find(observed, gates))
    for finding in findings:
        if finding.is_kept is False:
            return Rollback(finding.gate, finding.text())
    undecided = tuple(finding.gate for finding in findings if finding.is_kept is None)
    samples = observed.candidate.answers
    if samples >= gates.min_samples and not undecided:
        return Promote()
    if observed.elapsed_s < gates.max_duration_s:
        return Continue(undecided)
    if samples < gates.min_samples:
        return Rollback(
            "samples",
            f"{samples} answers in {observed.elapsed_s:.0f} s, expected at least {gates.min_samples}",
        )
    for finding in findings:
        if finding.is_kept is None and finding.is_proof_needed:
            return Rollback(finding.gate, f"not shown in {observed.elapsed_s:.0f} s: {finding.text()}")
    return Promote()


def may_be_promoted(current: Arm, candidate: Arm, gates: Gates) -> bool:
    """Return whether the counts of answers allow `judge` to promote the candidate.

    Only `answers` and `failed` of both arms are used.
    """
    if candidate.answers < gates.min_samples:
        return False
    counted = Observations(current=current, candidate=candidate)
    return _find_errors(counted, gates).is_kept is not False


def _find_at_once(observed: Observations, gates: Gates) -> Rollback | None:
    if observed.not_finite:
        return Rollback("not_finite", "the candidate answered NaN or infinity to finite inputs")
    if observed.failed_in_a_row >= gates.error_burst:
        return Rollback("error_burst", f"{observed.failed_in_a_row} answers in a row failed")
    return None


def _find(observed: Observations, gates: Gates) -> Iterator[_Finding]:
    current, candidate = observed.current, observed.candidate
    if gates.min_agreement:
        yield _find_agreement(observed, gates.min_agreement, gates.alpha)
    yield _find_errors(observed, gates)
    if gates.max_p50_ratio:
        yield _find_p50(observed.paired, gates.max_p50_ratio, gates.alpha)
    if gates.max_p99_ratio:
        yield _find_p99(observed.paired, gates.max_p99_ratio, gates.alpha)
    if gates.max_energy_ratio and candidate.energy.count and current.energy.count:
        yield _find_energy(candidate.energy, current.energy, gates.max_energy_ratio, gates.alpha)


def _find_agreement(observed: Observations, least: float, alpha: float) -> _Finding:
    is_kept = share_is_above(observed.agreement, observed.compared, least, alpha / _TESTS)

    def text() -> str:
        mean = observed.agreement / observed.compared if observed.compared else math.nan
        return f"agreement {mean:.4f} over {observed.compared} answers, expected at least {least:g}"

    return _Finding("agreement", is_kept, text, is_proof_needed=True)


def _find_errors(observed: Observations, gates: Gates) -> _Finding:
    current, candidate = observed.current, observed.candidate
    part = gates.alpha / _TESTS / 2  # of each arm
    own = share_interval(candidate.failed, candidate.answers, part)
    low, high = share_interval(current.failed, current.answers, part)
    is_kept = _compare(own, low + gates.max_extra_errors, high + gates.max_extra_errors)

    def text() -> str:
        return (
            f"{candidate.failed} of {candidate.answers} answers failed, {current.failed} of"
            f" {current.answers} of the current version, expected at most {gates.max_extra_errors:.1%} more"
        )

    # A few answers do not tell how often the current version fails.
    share = current.failed / current.answers if current.answers >= max(gates.min_samples, 1) else 0.0
    allowed = (share + gates.max_extra_errors) * candidate.answers
    is_beyond = candidate.failed > allowed + 1e-6  # products of shares round
    return _Finding("errors", is_kept, text, is_proof_needed=is_beyond)


def _compare(own: tuple[float, float], low_limit: float, high_limit: float) -> bool | None:
    """Compare the interval of the candidate with a limit that lies between two bounds, see `_Finding`."""
    if own[0] > high_limit:
        return False
    return True if own[1] <= low_limit else None


def _find_p50(paired: PairedLatency, limit: float, alpha: float) -> _Finding:
    is_kept = _compare(paired.ratio.quantile_interval(0.5, alpha / _TESTS), limit, limit)

    def text() -> str:
        ratio = paired.ratio.quantile(0.5) or math.nan
        return (
            f"with the same inputs it takes {ratio:.2f} times as long as the current version, median of"
            f" {paired.ratio.count} pairs, expected at most {limit:g} times"
        )

    return _Finding("latency_p50", is_kept, text, is_proof_needed=False)


def _find_p99(paired: PairedLatency, limit: float, alpha: float) -> _Finding:
    """Compare how often each version alone was slow. Pairs in which both were slow do not count.

    If the candidate is at most `limit` times as slow as the current version, it is not slow alone more often.
    """
    own, others = paired.candidate_slow, paired.current_slow
    is_above = share_is_above(own, own + others, 0.5, alpha / _TESTS)

    def text() -> str:
        slow_ms = 1e3 * (paired.current.quantile(0.99) or math.nan)
        return (
            f"of {paired.ratio.count} pairs only the candidate was slow in {own} (over {limit:g} times the"
            f" p99 of {slow_ms:.3g} ms), and only the current version in {others} (over that p99)"
        )

    return _Finding("latency_p99", None if is_above is None else not is_above, text, is_proof_needed=False)


def _find_energy(candidate: LogHistogram, current: LogHistogram, limit: float, alpha: float) -> _Finding:
    part = alpha / _TESTS / 2
    interval, (low, high) = (arm.quantile_interval(0.5, part) for arm in (candidate, current))
    is_kept = _compare(interval, limit * low, limit * high)

    def text() -> str:
        own, other = (arm.quantile(0.5) or math.nan for arm in (candidate, current))
        return f"it is {own / other:.2f} times the current version's, expected at most {limit:g} times"

    return _Finding("energy", is_kept, text, is_proof_needed=False)
