"""The verdict on a candidate, and how often it is wrong, by simulation with fixed seeds."""

import math
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.service.options.rollout import Gates
from edgekit_runtime.service.rollout.gates import Continue, Observations, Promote, Rollback, judge
from edgekit_runtime.statistics.confidence_sequences import (
    LogHistogram,
    log_evidence,
    rank_interval,
    share_interval,
)

LOOK_EVERY = 16


def simulate(
    gates: Gates,
    rng: np.random.Generator,
    *,
    samples: int = 3000,
    agreement: float = 1.0,
    failing: float = 0.0,
    slower: float = 1.0,
) -> Any:
    """Both versions answer in turns; return the verdict at the first look that has one, and when."""
    observed = Observations()
    current_s = rng.lognormal(-8, 0.2, samples)
    candidate_s = slower * rng.lognormal(-8, 0.2, samples)
    agrees = rng.random(samples) < agreement
    fails = rng.random(samples) < failing
    for place in range(samples):
        observed.current.answers += 1
        observed.current.latency.add(current_s[place])
        observed.candidate.answers += 1
        if fails[place]:
            observed.candidate.failed += 1
        else:
            observed.candidate.latency.add(candidate_s[place])
            observed.agreement += agrees[place]
            observed.compared += 1
            observed.paired.add(current_s[place], candidate_s[place], gates.max_p99_ratio)
        if (place + 1) % LOOK_EVERY == 0:
            verdict = judge(observed, gates)
            if not isinstance(verdict, Continue):
                return verdict, place + 1
    observed.elapsed_s = gates.max_duration_s
    return judge(observed, gates), samples


def test_a_good_candidate_is_promoted() -> None:
    verdict, samples = simulate(Gates(), np.random.default_rng(1), agreement=0.99)
    assert isinstance(verdict, Promote)
    assert samples >= Gates().min_samples


@pytest.mark.parametrize(
    ("gate", "fault"),
    [
        ("agreement", {"agreement": 0.7}),
        ("errors", {"failing": 0.1}),
        ("latency_p50", {"slower": 1.6}),
    ],
)
def test_a_bad_candidate_is_rolled_back_with_its_gate(gate: str, fault: dict[str, float]) -> None:
    verdict, samples = simulate(Gates(), np.random.default_rng(2), **fault)
    assert isinstance(verdict, Rollback)
    assert verdict.gate == gate
    assert samples < 1000


def test_one_nan_rolls_back_at_once() -> None:
    observed = Observations(not_finite=1)
    verdict = judge(observed, Gates())
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "not_finite"


def test_a_burst_of_errors_rolls_back_at_once() -> None:
    assert isinstance(judge(Observations(failed_in_a_row=4), Gates(error_burst=5)), Continue)
    assert isinstance(judge(Observations(failed_in_a_row=5), Gates(error_burst=5)), Rollback)


def test_too_few_answers_in_the_time_roll_back() -> None:
    verdict = judge(Observations(elapsed_s=90_000.0), Gates())
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "samples"


def test_at_the_end_unproven_latency_is_enough_and_unproven_agreement_is_not() -> None:
    undecided = Observations(elapsed_s=90_000.0, agreement=290.0, compared=300)
    for arm in (undecided.current, undecided.candidate):
        arm.answers = 3000
        arm.latency = LogHistogram(300, {-400: 300})
    assert isinstance(judge(undecided, Gates(min_agreement=0.9, max_p99_ratio=1.5)), Promote)
    verdict = judge(undecided, Gates(min_agreement=0.96))
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "agreement"
    assert verdict.reason.startswith("not shown")


@pytest.mark.parametrize(("failed", "gate"), [(0, ""), (1, ""), (2, "errors"), (12, "errors")])
def test_short_trial_is_judged_by_the_errors_that_it_counted(failed: int, gate: str) -> None:
    """To show that at most 1 % fail takes a thousand answers; here are 150."""
    observed = Observations(elapsed_s=90_000.0)
    observed.current.answers = observed.candidate.answers = 150
    observed.candidate.failed = failed
    verdict = judge(observed, Gates(min_samples=100, min_agreement=0, max_p50_ratio=0, max_p99_ratio=0))
    assert verdict.gate == gate if isinstance(verdict, Rollback) else gate == ""


@pytest.mark.parametrize(("answers", "failed", "is_kept"), [(20, 2, False), (100, 10, True), (150, 0, False)])
def test_few_answers_of_the_current_version_excuse_no_error(answers: int, failed: int, is_kept: bool) -> None:
    observed = Observations(elapsed_s=90_000.0)
    observed.current.answers, observed.current.failed = answers, failed
    observed.candidate.answers, observed.candidate.failed = 150, 4
    verdict = judge(observed, Gates(min_samples=100, min_agreement=0, max_p50_ratio=0, max_p99_ratio=0))
    assert isinstance(verdict, Promote) == is_kept


def test_more_energy_per_request_is_rolled_back() -> None:
    observed = Observations()
    rng = np.random.default_rng(3)
    for _ in range(100):
        observed.current.energy.add(rng.lognormal(-6, 0.1))
        observed.candidate.energy.add(rng.lognormal(-6, 0.1) * 1.6)
    verdict = judge(observed, Gates())
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "energy"


def test_errors_that_the_current_version_makes_too_do_not_count_against_the_candidate() -> None:
    observed = Observations()
    for arm in (observed.current, observed.candidate):
        arm.answers, arm.failed = 2000, 400
    assert isinstance(judge(observed, Gates()), Continue)


def test_candidates_that_keep_all_limits_are_seldom_rolled_back(is_long: bool) -> None:
    """At the very edge of each limit, looked at every 16 answers; alpha is 10 % to see anything at all."""
    gates = Gates(min_agreement=0.9, max_p50_ratio=1.25, max_p99_ratio=1.25, alpha=0.1, max_duration_s=1e9)
    wrong, runs = 0, 60 if is_long else 20
    for seed in range(runs):
        observed, _ = simulate(
            gates, np.random.default_rng(seed), samples=1500, agreement=0.9, failing=0.01, slower=1.25
        )
        # The end of time rolls back what was not shown, by design: only what was shown to be bad counts.
        wrong += isinstance(observed, Rollback) and not observed.reason.startswith("not shown")
    assert wrong <= 0.1 * runs  # the bound holds for the chance; measured with these seeds: 0


def simulate_loaded(gates: Gates, rng: np.random.Generator, *, slower: float = 1.0) -> Any:
    """Pairs on a simulated busy machine: load that comes and goes, bursts, and runs that are cut off.

    Both versions draw from one distribution, whose scale wanders by a factor of ten and whose tail has no
    mean (a Pareto tail of index 1), and the second of a pair is 20 % faster, as its inputs are in the caches.
    """
    observed, load = Observations(), 0.0
    for number in range(1, 501):
        load = 0.99 * load + rng.normal(0, 0.15)
        scale_s = 1e-4 * math.exp(load) * (8 if number % 100 > 80 else 1)
        first_s, second_s = scale_s * (1 + rng.pareto(1.0, 2) * (rng.random(2) < 0.3)) * [1.0, 0.8]
        current_s, candidate_s = (first_s, second_s) if rng.random() < 0.5 else (second_s, first_s)
        observed.paired.add(current_s, slower * candidate_s, gates.max_p99_ratio)
        for arm in (observed.current, observed.candidate):
            arm.answers += 4
        observed.agreement, observed.compared = observed.agreement + 1, observed.compared + 1
        if number % 8 == 0 and not isinstance(verdict := judge(observed, gates), Continue):
            return verdict
    observed.elapsed_s = gates.max_duration_s
    return judge(observed, gates)


def test_identical_canaries_on_a_simulated_busy_machine_are_hardly_ever_rolled_back(is_long: bool) -> None:
    """At the very edge, with an alpha of twenty times the default, a test that is wrong would show."""
    gates, runs = Gates(alpha=0.2, max_p50_ratio=1.01, max_p99_ratio=1.01), 60 if is_long else 20
    verdicts = [simulate_loaded(gates, np.random.default_rng(seed)) for seed in range(runs)]
    wrong = sum(isinstance(verdict, Rollback) for verdict in verdicts)
    bound = 2 / 5 * 0.2  # two of the five tests
    assert wrong <= runs * bound + 3 * math.sqrt(runs * bound)  # three deviations of what is allowed
    defaults = [simulate_loaded(Gates(), np.random.default_rng(seed)) for seed in range(runs)]
    assert defaults == [Promote()] * runs


def test_slower_canary_on_a_simulated_busy_machine_is_rolled_back() -> None:
    verdicts = [simulate_loaded(Gates(), np.random.default_rng(seed), slower=1.8) for seed in range(20)]
    assert [getattr(verdict, "gate", "none") for verdict in verdicts] == ["latency_p50"] * 20


def test_canary_that_is_slow_now_and_then_is_rolled_back_by_its_p99() -> None:
    gates, rng = Gates(max_p50_ratio=0, max_duration_s=1e9), np.random.default_rng(7)
    observed = Observations()
    for _ in range(3000):
        current_s, candidate_s = rng.lognormal(-8, 0.2, 2)
        observed.paired.add(current_s, candidate_s * (4 if rng.random() < 0.05 else 1), gates.max_p99_ratio)
    verdict = judge(observed, gates)
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "latency_p99"


def test_candidates_that_miss_a_limit_are_seldom_promoted(is_long: bool) -> None:
    gates = Gates(min_agreement=0.9, alpha=0.1, max_duration_s=1e9)
    wrong, runs = 0, 60 if is_long else 20
    for seed in range(runs):
        verdict, _ = simulate(gates, np.random.default_rng(seed), samples=1500, agreement=0.89)
        wrong += isinstance(verdict, Promote)
    assert wrong <= 0.1 * runs


def test_an_interval_holds_the_share_at_every_look() -> None:
    """Of 400 runs of 2,000 observations, the truth may be outside at any look in at most 5 %."""
    rng = np.random.default_rng(4)
    share, alpha = 0.97, 0.05
    sums = np.cumsum(rng.random((400, 2000)) < share, axis=1)
    left = sum(
        any(log_evidence(float(row[n - 1]), n, share) >= -math.log(alpha) for n in range(10, 2001, 10))
        for row in sums
    )
    assert left <= 0.05 * 400
    naive = sum(
        any(
            abs(row[n - 1] / n - share) > 1.96 * math.sqrt(share * (1 - share) / n)
            for n in range(10, 2001, 10)
        )
        for row in sums
    )
    assert naive > 0.3 * 400  # an ordinary interval that is looked at again and again


def test_intervals_enclose_what_was_observed() -> None:
    for total, count in ((0, 0), (0, 50), (50, 50), (12.5, 50)):
        low, high = share_interval(total, count, 0.01)
        assert 0 <= low <= (total / count if count else 0.5) <= high <= 1


@pytest.mark.parametrize("quantile", [0.5, 0.99])
def test_ranks_enclose_the_quantile_and_grow_with_the_square_root(quantile: float) -> None:
    low, high = rank_interval(1, quantile, 0.01)
    assert (low, high) == (0, 1)
    low, high = rank_interval(100_000, quantile, 0.01)
    assert low < quantile * 100_000 < high
    assert high - low < 10 * math.sqrt(100_000 * quantile * (1 - quantile))


def test_a_histogram_finds_quantiles_within_its_buckets() -> None:
    histogram, values = LogHistogram(), np.random.default_rng(5).lognormal(-8, 0.5, 5000)
    for value in values:
        histogram.add(value)
    for quantile in (0.5, 0.99):
        true = float(np.quantile(values, quantile))
        assert histogram.quantile(quantile) == pytest.approx(true, rel=0.02)  # buckets are 2 % wide
        low, high = histogram.quantile_interval(quantile, 0.01)
        assert low < true < high
    for extreme in (0.0, 1e-12, 1e9):
        histogram.add(extreme)
    assert histogram.count == 5003


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_agreement": 1.5},
        {"alpha": 0.0},
        {"max_p50_ratio": -1.0},
        {"error_burst": 0},
        {"max_duration_s": math.inf},
        {"max_extra_errors": math.nan},
        {"max_extra_errors": 0.0},
    ],
)
def test_gates_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        from_plain(Gates, wrong)
