"""Drops with their intervals: against published values, exact error rates, and simulation."""

from math import exp, lgamma, log

import numpy as np
import pytest
from numpy.typing import NDArray

from edgekit_toolkit.drops import PairedDrop, ResampledDrop, mean_drops, set_drop, set_replicates


def test_interval_of_paired_outcomes_is_tangos() -> None:
    """M. W. Fagerland, S. Lydersen, P. Laake, Statistics in Medicine 33 (2014) 2850: -0.517 to -0.026."""
    interval = PairedDrop(losses=1, gains=7, samples=21).interval()
    assert (interval.low, interval.high) == (pytest.approx(-51.7, abs=0.05), pytest.approx(-2.6, abs=0.05))


def test_interval_turns_round_with_losses_and_gains() -> None:
    one, other = PairedDrop(9, 2, 80).interval(0.9), PairedDrop(2, 9, 80).interval(0.9)
    assert (one.low, one.high) == (pytest.approx(-other.high), pytest.approx(-other.low))


def test_gain_is_a_negative_drop() -> None:
    assert PairedDrop(losses=1, gains=3, samples=100).points == -2
    (drop,) = mean_drops(np.full(50, 0.5), np.full((1, 50), 0.75))
    assert drop.points == -25


@pytest.mark.parametrize("count", [100, 380, 381, 1000])
def test_without_a_differing_sample_the_upper_end_is_known_in_closed_form(count: int) -> None:
    square = 1.959964**2
    assert PairedDrop(0, 0, count).interval().high == pytest.approx(100 * square / (count + square))


def test_least_number_of_samples_for_a_point_is_that_without_a_differing_sample() -> None:
    assert PairedDrop(0, 0, 10).samples_for(1.0) == 381
    assert PairedDrop(0, 0, 381).interval().high <= 1 < PairedDrop(0, 0, 380).interval().high


def test_number_of_samples_needed_is_just_enough() -> None:
    drop = PairedDrop(3, 2, 500)
    needed = drop.samples_for(1.0)
    assert needed is not None
    scaled = PairedDrop(round(3 * needed / 500 * 100), round(2 * needed / 500 * 100), needed * 100)
    assert scaled.interval().high < 1  # a hundred times as many
    assert needed == pytest.approx(908, rel=0.01)


def test_no_number_of_samples_shows_a_drop_at_the_limit_to_be_within_it() -> None:
    assert PairedDrop(1, 0, 100).samples_for(1.0) is None
    assert ResampledDrop(1.0, np.array([0.5, 1.5]), 0.0, 100, 100).samples_for(1.0) is None


def _upper_errors(share: float, gains: float, count: int) -> float:
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
            if weight > -25 and PairedDrop(lost, gained, count).interval().high < 100 * (share - gains):
                total += exp(weight)
    return total


@pytest.mark.parametrize(("share", "gains"), [(0.05, 0.0), (0.06, 0.01), (0.08, 0.03), (0.2, 0.02)])
def test_upper_end_is_below_the_true_drop_in_one_of_forty_cases_at_most(share: float, gains: float) -> None:
    """A score interval errs by its level on average; 0.5 percentage points more is its known excess."""
    assert _upper_errors(share, gains, 60) <= 0.030


def _skewed(draw: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Changes of which a few are large, as of the overlap of masks."""
    return np.clip(draw.gamma(0.5, 0.02, count), 0, 1)


def test_interval_of_a_mean_covers_it_about_as_often_as_it_says() -> None:
    """Of 300 sets of 60 samples; BCa of skewed means falls short of 95 % a little."""
    draw = np.random.default_rng(5)
    true = 100 * _skewed(draw, 2_000_000).mean()
    inside = 0
    for _ in range(300):
        change = _skewed(draw, 60)
        interval = mean_drops(np.ones(60), 1 - change[np.newaxis])[0].interval()
        inside += interval.low <= true <= interval.high
    assert inside >= 0.88 * 300


def test_outcomes_of_zero_and_one_are_counted_and_others_are_resampled() -> None:
    source = np.array([1.0, 1, 0, 1])
    drops = mean_drops(source, np.array([[1.0, 0, 1, 1], [1.0, 0.5, 0, 1]]))
    assert drops[0] == PairedDrop(losses=1, gains=1, samples=4)
    assert isinstance(drops[1], ResampledDrop)


def test_wider_confidence_gives_a_wider_interval_that_holds_the_drop() -> None:
    draw = np.random.default_rng(3)
    (drop,) = mean_drops(np.ones(80), 1 - _skewed(draw, 80)[np.newaxis])
    narrow, wide = drop.interval(0.9), drop.interval(0.99)
    assert wide.low < narrow.low < drop.points < narrow.high < wide.high


def test_same_outcomes_give_the_same_interval() -> None:
    scores = np.random.default_rng(3).random((2, 50))
    assert mean_drops(scores[0], scores[1:])[0].interval() == mean_drops(scores[0], scores[1:])[0].interval()


def test_rounding_of_the_drop_does_not_move_its_interval() -> None:
    """Many resamples equal the drop, which is two thirds of a point: 0.6667 is beyond all of them."""
    source = np.full(300, 0.75)
    candidate = source.copy()
    candidate[:6] -= 0.5
    candidate[6:8] += 0.5
    (drop,) = mean_drops(source, candidate[np.newaxis])
    interval = drop.interval()
    assert drop.points == 0.6667
    assert (interval.low, interval.high) == pytest.approx((-100 / 600, 100 * 10 / 600))


def test_losses_and_gains_that_cancel_out_are_not_taken_for_no_difference() -> None:
    source = np.full(200, 0.5)
    candidate = source.copy()
    candidate[:20] -= 0.5
    candidate[20:40] += 0.49
    (drop,) = mean_drops(source, candidate[np.newaxis])
    even = mean_drops(source, np.where(candidate > 0.5, 1.0, candidate)[np.newaxis])[0]
    needed, needed_even = drop.samples_for(1.0), even.samples_for(1.0)
    assert needed is not None
    assert needed_even is not None
    assert needed_even == pytest.approx(needed, rel=0.25)  # 381 if none differed


@pytest.mark.parametrize("differing", [0, 1, 3])
def test_few_differing_samples_are_worth_no_more_than_as_many_answers(differing: int) -> None:
    """A rare large loss that was not drawn is in no resample."""
    source = np.full(60, 0.5)
    candidate = source.copy()
    candidate[:differing] -= 0.01
    (drop,) = mean_drops(source, candidate[np.newaxis])
    assert drop.interval().high == pytest.approx(PairedDrop(differing, 0, 60).interval().high)


def test_number_of_samples_for_a_score_without_a_difference_is_that_of_answers() -> None:
    (drop,) = mean_drops(np.full(60, 0.5), np.full((1, 60), 0.5))
    assert drop.samples_for(1.0) == 381


def test_score_of_a_whole_set_is_resampled_pairwise() -> None:
    """Both models err on the same samples: the drop is certain though each score is not."""
    right = np.arange(100) < 60
    source, candidate = right.astype(float), right * 0.9
    replicates = [
        set_replicates(lambda drawn, one=one: float(one[drawn].mean()), 100) for one in (source, candidate)
    ]
    drop = set_drop(0.6, 0.54, (replicates[0], replicates[1]), 100)
    interval = drop.interval()
    assert drop.points == 6
    assert 4.5 < interval.low < 6 < interval.high < 7.5
