"""Drops with their intervals: against closed forms, exact error rates, and simulation."""

import copy
import functools
from collections.abc import Callable
from math import exp, lgamma, log

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.answers import answers
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError
from edgekit_toolkit.evaluation.drops import Drop, Interval, leave_out, mean_drops, set_drop

Changes = NDArray[np.float64]


def interval_of(changes: Changes, confidence: float = 0.95) -> Interval:
    return mean_drops(np.ones(len(changes)), 1 - changes[np.newaxis])[0].interval(confidence)


def test_interval_turns_round_with_losses_and_gains() -> None:
    one, other = answers(9, 2, 80).interval(0.9), answers(2, 9, 80).interval(0.9)
    assert (one.low, one.high) == (pytest.approx(-other.high), pytest.approx(-other.low))


def test_gain_is_a_negative_drop() -> None:
    assert answers(1, 3, 100).points == -2
    (drop,) = mean_drops(np.full(50, 0.5), np.full((1, 50), 0.75))
    assert drop.points == -25


@cases("count", [10, 100, 368, 1000])
def test_without_a_differing_sample_the_upper_end_is_known_in_closed_form(count: int) -> None:
    expected = 100 * (1 - 0.025 ** (1 / count))
    interval = answers(0, 0, count).interval()
    assert interval.high == pytest.approx(expected, rel=0.01)
    assert interval.low == -interval.high


def _upper_tail(losses: int, count: int, share: float) -> float:
    """Return the chance of at most `losses` where each sample is lost with the chance `share`."""
    return sum(
        exp(lgamma(count + 1) - lgamma(lost + 1) - lgamma(count - lost + 1))
        * share**lost
        * (1 - share) ** (count - lost)
        for lost in range(losses + 1)
    )


@cases(("losses", "count"), [(1, 20), (3, 40), (20, 40), (39, 40), (2, 170)])
def test_upper_end_of_losses_alone_is_that_of_clopper_and_pearson(losses: int, count: int) -> None:
    share = answers(losses, 0, count).interval().high / 100
    assert _upper_tail(losses, count, share) == pytest.approx(0.025, rel=0.05)


@cases(("losses", "count"), [(1, 20), (10, 20), (5, 100), (20, 20)])
def test_lower_end_where_nothing_can_gain_is_that_of_clopper_and_pearson(losses: int, count: int) -> None:
    candidate = np.arange(count)[np.newaxis] >= losses
    (drop,) = mean_drops(np.ones(count), candidate.astype(np.float64), max_gain=0)
    share = drop.interval(0.99).low / 100
    assert 1 - _upper_tail(losses - 1, count, share) == pytest.approx(0.005, rel=0.08)


def test_equal_models_where_nothing_can_gain_have_a_lower_end_of_zero() -> None:
    (drop,) = mean_drops(np.ones(20), np.ones((1, 20)), max_gain=0)
    assert str(drop.interval().low) == "0.0"


def test_model_that_loses_every_answer_has_an_upper_end_of_a_hundred_points() -> None:
    assert answers(50, 0, 50).interval().high == 100


def test_interval_of_many_small_changes_is_that_of_a_normal_distribution() -> None:
    changes = np.random.default_rng(3).uniform(0, 0.2, 20_000)
    error = 1.95996 * changes.std() / len(changes) ** 0.5
    interval = interval_of(changes)
    assert interval.low == pytest.approx(100 * (changes.mean() - error), abs=0.02)
    assert interval.high == pytest.approx(100 * (changes.mean() + error), abs=0.02)


def test_one_sample_more_lost_outright_is_reckoned_with_whatever_small_noise_all_have() -> None:
    noise = np.random.default_rng(4).normal(0, 1e-3, 100)
    assert interval_of(noise).high == pytest.approx(answers(0, 0, 100).interval().high, abs=0.1)


def _errors(share: float, gains: float, count: int) -> float:
    """Exact chance that the upper end is below the true drop, for shares of losses and gains."""
    total = 0.0
    for lost in range(count + 1):
        for gained in range(min(count - lost, 12) + 1):
            if gained and not gains:
                continue
            rest = count - lost - gained
            weight = (
                lgamma(count + 1) - lgamma(lost + 1) - lgamma(gained + 1) - lgamma(rest + 1)
                + lost * log(share) + (gained * log(gains) if gained else 0.0) + rest * log(1 - share - gains)
            )  # fmt: skip
            if weight > -18 and answers(lost, gained, count).interval().high < 100 * (share - gains):
                total += exp(weight)
    return total


@pytest.mark.parametrize(("share", "gains"), [(0.05, 0.0), (0.06, 0.01), (0.08, 0.03), (0.2, 0.02)])
def test_upper_end_is_below_the_true_drop_in_one_of_forty_cases_at_most(share: float, gains: float) -> None:
    assert _errors(share, gains, 60) <= 0.025


def _rare_losses(draw: np.random.Generator, count: int) -> Changes:
    """A total loss on 1.15 % of the samples, and a gain that hides a little of it on all others."""
    return np.where(draw.random(count) < 0.0115, 1.0, draw.normal(-6e-4, 3e-3, count))


def _skewed(draw: np.random.Generator, count: int) -> Changes:
    """Of which a few are large, as of the overlap of masks."""
    return np.clip(draw.gamma(0.5, 0.02, count), 0, 1)


def _heavy(draw: np.random.Generator, count: int) -> Changes:
    return np.clip(0.002 / draw.random(count), 0, 1)


@functools.cache
def draw_true_drop(
    changes: Callable[[np.random.Generator, int], Changes],
) -> tuple[float, np.random.Generator]:
    """Return the drop in points of very many samples, and the generator after it."""
    draw = np.random.default_rng(5)
    return 100 * float(changes(draw, 2_000_000).mean()), draw


@cases("changes", [_rare_losses, _skewed, _heavy])
@cases("count", [20, 40, 300])
def test_upper_end_is_seldom_below_the_true_drop_whatever_the_shape_of_the_loss(
    changes: Callable[[np.random.Generator, int], Changes], count: int
) -> None:
    """Of 200 sets; 2.5 % are allowed, and 12 of 200 would be chance in 1 of 300 such tests."""
    true, before = draw_true_drop(changes)
    draw = copy.deepcopy(before)
    assert sum(interval_of(changes(draw, count)).high < true for _ in range(200)) <= 11


def test_standard_error_reckons_with_one_more_lost_sample() -> None:
    few, many = (mean_drops(np.ones(count), np.ones((1, count)))[0] for count in (25, 2500))
    assert few.standard_error == pytest.approx(100 * (25 / 26**3) ** 0.5)
    assert many.standard_error < 0.05


def test_wider_confidence_gives_a_wider_interval_that_holds_the_drop() -> None:
    changes = _skewed(np.random.default_rng(3), 80)
    narrow, wide = interval_of(changes, 0.9), interval_of(changes, 0.99)
    assert wide.low < narrow.low < 100 * changes.mean() < narrow.high < wide.high


def test_order_of_samples_does_not_change_the_interval() -> None:
    changes = _skewed(np.random.default_rng(3), 80)
    assert interval_of(changes) == interval_of(changes[::-1])


def test_least_number_of_samples_for_a_point_is_that_without_a_differing_sample() -> None:
    assert answers(0, 0, 10).samples_for(1.0) == 368
    assert answers(0, 0, 368).interval().high <= 1 < answers(0, 0, 367).interval().high


@pytest.mark.parametrize("counts", [(3, 2, 500), (0, 4, 300), (1, 0, 400)])
def test_number_of_samples_needed_is_just_enough(counts: tuple[int, int, int]) -> None:
    """One percent more is enough and one percent less is not, in the same shares."""
    needed = answers(*counts).samples_for(2.0)
    assert needed is not None
    ends = []
    for factor in (1.01, 0.99):
        scaled = [round(100 * count * factor * needed / counts[2]) for count in counts]
        changes = answers(*scaled).changes
        counted = answers(*scaled).counts / 100
        ends.append(
            Drop(points=0.0, changes=changes, counts=counted, samples=round(counted.sum())).interval().high
        )
    assert ends[0] <= 2.0 < ends[1]


def test_no_number_of_samples_shows_a_drop_at_the_limit_to_be_within_it() -> None:
    assert answers(1, 0, 100).samples_for(1.0) is None


def test_drop_just_below_the_limit_has_no_number_of_samples_that_is_advice() -> None:
    assert answers(9_999, 0, 1_000_000).samples_for(1.0) is None


def test_drop_of_answers_is_rounded_to_four_decimals() -> None:
    assert answers(2, 1, 3).points == 33.3333


# Scores over a whole set.


def test_metric_over_a_set_that_is_a_mean_has_the_interval_of_that_mean() -> None:
    draw = np.random.default_rng(6)
    source, candidate = draw.random(90), draw.random(90)

    def score(values: Changes) -> Callable[[NDArray[np.int64]], float]:
        return lambda positions: float(values[positions].mean())

    without = leave_out(score(source), 90), leave_out(score(candidate), 90)
    found = set_drop(source.mean(), candidate.mean(), without, 90)
    (exact,) = mean_drops(source, candidate[np.newaxis])
    assert found.points == exact.points
    assert found.interval().low == pytest.approx(exact.interval().low, abs=1e-6)
    assert found.interval().high == pytest.approx(exact.interval().high, abs=1e-6)


def test_large_set_is_left_out_in_groups_that_hold_each_sample_once() -> None:
    others: list[set[int]] = []

    def score(positions: NDArray[np.int64]) -> float:
        others.append(set(positions.tolist()))
        return 0.5

    assert len(leave_out(score, 700)) == len(others) == 175
    everything = set(range(700))
    groups = [everything - rest for rest in others]
    assert sum(map(len, groups)) == 700
    assert set.union(*groups) == everything
    first = others.copy()
    others.clear()
    leave_out(score, 700)
    assert first == others  # all models share the groups


@pytest.mark.parametrize("losses", [0, 3])
def test_groups_of_a_set_reckon_with_the_loss_of_a_sample_and_not_of_a_group(losses: int) -> None:
    count = 1000
    candidate = np.ones(count)
    candidate[:losses] = 0
    without = leave_out(lambda _: 1.0, count), leave_out(lambda rest: float(candidate[rest].mean()), count)
    drop = set_drop(1.0, candidate.mean(), without, count)
    assert drop.interval().high == pytest.approx(answers(losses, 0, count).interval().high, rel=0.05)
    assert drop.samples_for(2.0) == pytest.approx(answers(losses, 0, count).samples_for(2.0), rel=0.05)


def _character_errors(draw: np.random.Generator, count: int) -> tuple[Changes, Changes]:
    """Lengths of lines, and wrong characters of a candidate that loses 2 % of the lines."""
    lengths = np.ceil(draw.lognormal(3, 0.6, count))
    return lengths, np.where(draw.random(count) < 0.02, lengths, draw.binomial(lengths.astype(int), 0.002))


@pytest.mark.parametrize("count", [20, 60])
def test_upper_end_of_a_character_error_rate_is_seldom_below_the_true_drop(count: int) -> None:
    """Of 200 sets; 200 resamples of each could not carry the tail."""
    draw = np.random.default_rng(7)
    lengths, errors = _character_errors(draw, 1_000_000)
    true, wrong = 100 * errors.sum() / lengths.sum(), 0
    for _ in range(200):
        lengths, errors = _character_errors(draw, count)

        def score(rest: NDArray[np.int64], lengths: Changes = lengths, errors: Changes = errors) -> float:
            return float(1 - errors[rest].sum() / lengths[rest].sum())

        without = leave_out(lambda _: 1.0, count), leave_out(score, count)
        wrong += set_drop(1.0, score(np.arange(count)), without, count).interval().high < true
    assert wrong <= 11


def test_part_of_a_set_without_a_score_is_left_out_and_most_of_them_are_an_error() -> None:
    def score(missing: int) -> Callable[[NDArray[np.int64]], float]:
        def call(rest: NDArray[np.int64]) -> float:
            if set(range(missing)) - set(rest.tolist()):
                raise DataError("only one class")
            return float(np.mean(rest) / 50)

        return call

    source, candidate = leave_out(score(0), 30), leave_out(score(4), 30)
    assert np.isnan(candidate).sum() == 4
    interval = set_drop(0.5, 0.4, (source, candidate), 30).interval()
    assert np.isfinite([interval.low, interval.high]).all()
    with pytest.raises(DataError, match=r"on 16 of 30 parts of them it has none.*Last: only one class"):
        leave_out(score(16), 30)
