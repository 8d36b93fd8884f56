"""Drops with their intervals: against published values, exact error rates, and simulation."""

from math import ceil, exp, lgamma, log
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from edgekit_toolkit.evaluation.drops import PairedDrop, ResampledDrop, mean_drops, set_drop, set_replicates


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


# BCa against its formula: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), 14.9 to 14.15.
SPREAD = np.sort(np.random.default_rng(7).gamma(2.0, 1.0, 400))


def bca_ends(
    replicates: NDArray[np.float64], points: float, acceleration: float, confidence: float
) -> list[float]:
    normal = NormalDist()
    bias = normal.inv_cdf(float(np.mean(replicates < points)))
    ends = []
    for level in (0.5 - confidence / 2, 0.5 + confidence / 2):
        sum_of_both = bias + normal.inv_cdf(level)
        moved = normal.cdf(bias + sum_of_both / (1 - acceleration * sum_of_both))
        ends.append(float(np.quantile(replicates, moved)))
    return ends


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("acceleration", [-0.15, 0.0, 0.05, 0.15])
@pytest.mark.parametrize("points", [1.3, 2.0, 2.9])
def test_both_ends_of_a_resampled_interval_are_those_of_bca(
    points: float, acceleration: float, confidence: float
) -> None:
    interval = ResampledDrop(points, SPREAD, acceleration, 100, 100).interval(confidence)
    expected = bca_ends(SPREAD, points, acceleration, confidence)
    assert [interval.low, interval.high] == pytest.approx(expected, rel=1e-9)
    assert interval.confidence == confidence


def test_resamples_that_equal_the_drop_count_half_to_its_bias() -> None:
    """Of 100 resamples 20 are below the drop and 40 equal it: the drop is their median."""
    replicates = np.repeat([1.0, 2.0, 3.0], [20, 40, 40])
    bias = NormalDist().inv_cdf(0.4)
    interval = ResampledDrop(2.0, replicates, 0.0, 100, 100).interval(0.5)
    ends = [NormalDist().cdf(2 * bias + NormalDist().inv_cdf(level)) for level in (0.25, 0.75)]
    assert [interval.low, interval.high] == pytest.approx(np.quantile(replicates, ends))


@pytest.mark.parametrize(("points", "share"), [(-1.0, 0.5 / 400), (99.0, 1 - 0.5 / 400)])
def test_drop_beyond_all_resamples_is_taken_for_half_a_resample_from_their_end(
    points: float, share: float
) -> None:
    bias = NormalDist().inv_cdf(share)
    interval = ResampledDrop(points, SPREAD, 0.0, 100, 100).interval()
    ends = [NormalDist().cdf(2 * bias + NormalDist().inv_cdf(level)) for level in (0.025, 0.975)]
    assert [interval.low, interval.high] == pytest.approx(np.quantile(SPREAD, ends))


def test_interval_whose_acceleration_has_no_end_reaches_the_largest_resample() -> None:
    """1 - a (z0 + z) is below 0 here, where the formula has no meaning."""
    assert ResampledDrop(2.0, SPREAD, 0.9, 100, 100).interval().high == SPREAD[-1]


def test_acceleration_of_a_mean_is_that_of_the_jackknife() -> None:
    change = _skewed(np.random.default_rng(8), 40)
    left_out = np.array([np.delete(change, place).mean() for place in range(len(change))])
    around = left_out.mean() - left_out
    (drop,) = mean_drops(np.ones(40), 1 - change[np.newaxis])
    assert isinstance(drop, ResampledDrop)
    expected = (around**3).sum() / (6 * (around**2).sum() ** 1.5)
    assert expected > 0.05
    assert drop.acceleration == pytest.approx(expected)


def test_acceleration_of_equal_changes_is_zero() -> None:
    (drop,) = mean_drops(np.full(50, 0.5), np.full((1, 50), 0.25))
    assert isinstance(drop, ResampledDrop)
    assert (drop.acceleration, drop.points, drop.differing) == (0, 25, 50)


def test_resamples_of_a_mean_spread_as_its_standard_error() -> None:
    """2000 resamples show a standard deviation to 1.6 %; four times that is allowed."""
    change = _skewed(np.random.default_rng(9), 80)
    (drop,) = mean_drops(np.ones(80), 1 - change[np.newaxis])
    assert isinstance(drop, ResampledDrop)
    error = 100 * change.std() / 80**0.5
    assert drop.points == pytest.approx(100 * change.mean(), abs=1e-4)
    assert drop.replicates.std() == pytest.approx(error, rel=0.064)
    assert drop.replicates.mean() == pytest.approx(100 * change.mean(), abs=4 * error / 2000**0.5)
    assert (drop.samples, drop.differing, len(drop.replicates)) == (80, np.count_nonzero(change), 2000)


NARROW = np.linspace(-0.01, 0.01, 101)


@pytest.mark.parametrize(("differing", "is_widened"), [(7, True), (8, False)])
def test_interval_is_widened_where_at_most_seven_samples_differ(differing: int, is_widened: bool) -> None:
    interval = ResampledDrop(0.005, NARROW, 0.0, 60, differing).interval()
    if is_widened:
        assert interval.high == PairedDrop(7, 0, 60).interval().high
    else:
        assert interval.high <= NARROW[-1]


@pytest.mark.parametrize(("points", "losses", "gains"), [(0.005, 3, 0), (-0.005, 0, 3), (0.0, 0, 0)])
def test_few_differing_samples_are_lost_or_won_as_the_drop_says(
    points: float, losses: int, gains: int
) -> None:
    """The resamples alone reach 0.01 points to each side."""
    interval = ResampledDrop(points, NARROW, 0.0, 60, 3).interval(0.9)
    answers = PairedDrop(losses, gains, 60).interval(0.9)
    assert interval.low == pytest.approx(min(answers.low, 0), abs=0.01)
    assert interval.high == pytest.approx(max(answers.high, 0), abs=0.01)


def test_interval_of_few_differing_samples_holds_that_of_their_resamples() -> None:
    interval = ResampledDrop(0.5, np.linspace(-90, 91, 101), 0.0, 60, 3).interval()
    assert interval.low < -80
    assert interval.high > 80


@pytest.mark.parametrize("ratio", [0.5, 2.0, 3.0])
def test_number_of_samples_grows_with_the_square_of_the_reach_over_the_room(ratio: float) -> None:
    drop = ResampledDrop(2.0, SPREAD, 0.1, 100, 100)
    reach = drop.interval().high - 2.0
    assert drop.samples_for(2.0 + reach / ratio) == pytest.approx(ceil(100 * ratio**2), abs=1)


@pytest.mark.parametrize("limit", [1.0, 1.9])
def test_no_number_of_samples_shows_a_drop_above_the_limit_to_be_within_it(limit: float) -> None:
    assert ResampledDrop(2.0, SPREAD, 0.0, 100, 100).samples_for(limit) is None
    assert PairedDrop(20, 0, 1000).samples_for(limit) is None


def test_number_of_samples_for_few_differing_ones_is_that_of_as_many_answers() -> None:
    drop = ResampledDrop(0.005, NARROW, 0.0, 1000, 5)
    assert drop.samples_for(1.0) == PairedDrop(5, 0, 1000).samples_for(1.0)


def test_number_of_samples_for_few_differing_ones_is_at_least_that_of_their_resamples() -> None:
    drop = ResampledDrop(0.005, 100 * NARROW, 0.0, 10_000, 5)
    reach = bca_ends(100 * NARROW, 0.005, 0.0, 0.95)[1] - 0.005
    needed = drop.samples_for(0.2)
    assert needed == pytest.approx(10_000 * (reach / 0.195) ** 2, rel=1e-3)
    assert needed > (PairedDrop(5, 0, 10_000).samples_for(0.2) or 0)


def test_number_of_samples_where_as_many_answers_exceed_the_limit_is_that_of_the_wider_interval() -> None:
    drop = ResampledDrop(0.005, NARROW, 0.0, 100, 7)
    reach = PairedDrop(7, 0, 100).interval().high - 0.005
    assert drop.samples_for(1.0) == ceil(100 * (reach / 0.995) ** 2)


@pytest.mark.parametrize(("samples", "advice"), [(10_000_000, 10_000_000), (10_000_001, None)])
def test_number_of_samples_beyond_ten_million_is_no_advice(samples: int, advice: int | None) -> None:
    drop = ResampledDrop(0.0, NARROW, 0.0, samples, samples)
    assert drop.samples_for(drop.interval().high) == advice


def test_drop_just_below_the_limit_has_no_number_of_samples_that_is_advice() -> None:
    assert PairedDrop(9_999, 0, 1_000_000).samples_for(1.0) is None


def test_one_sample_shows_a_drop_to_be_within_a_limit_of_eighty_points() -> None:
    """Its upper end is 79.3 points, by the closed form."""
    assert PairedDrop(0, 0, 10).samples_for(80.0) == 1
    assert PairedDrop(0, 0, 10).samples_for(79.0) == 2


@pytest.mark.parametrize("counts", [(3, 2, 500), (0, 4, 300), (1, 0, 400)])
def test_one_sample_less_than_needed_is_not_enough(counts: tuple[int, int, int]) -> None:
    """With the same shares, of which not every number of samples makes whole losses and gains."""
    losses, gains, samples = counts
    drop = PairedDrop(losses, gains, samples)
    needed = drop.samples_for(2.0)
    assert needed is not None
    scaled = [
        PairedDrop(losses * count, gains * count, samples * count).interval().high  # type: ignore[arg-type]
        for count in (needed / samples, (needed - 1) / samples)
    ]
    assert scaled[0] <= 2.0 < scaled[1]


@pytest.mark.parametrize(
    ("unchanged", "samples", "differing"),
    [(200, 100, 0), (100, 100, 1), (10, 100, 3), (10, 2, 2), (0, 100, 100), (1, 100, 5)],
)
def test_differing_samples_of_a_whole_set_follow_from_the_resamples_without_a_change(
    unchanged: int, samples: int, differing: int
) -> None:
    """A resample holds none of k differing samples with a probability of about e^-k."""
    candidate = np.zeros(200)
    candidate[unchanged:] = -0.25
    drop = set_drop(0.5, 0.5, (np.zeros(200), candidate), samples)
    assert isinstance(drop, ResampledDrop)
    assert (drop.differing, drop.samples) == (differing, samples)


def test_drop_of_a_whole_set_has_its_resamples_in_order_without_those_that_have_no_score() -> None:
    source, candidate = np.array([0.9, np.nan, 0.8, 0.7, 0.6]), np.array([0.5, 0.5, np.nan, 0.6, 0.4])
    drop = set_drop(0.85, 0.5, (source, candidate), 30)
    assert isinstance(drop, ResampledDrop)
    assert drop.replicates == pytest.approx([10, 20, 40])
    assert (drop.points, drop.acceleration, drop.differing) == (35, 0, 30)


def test_resamples_of_a_whole_set_are_the_same_for_every_model_and_draw_from_all_places() -> None:
    drawn: list[list[int]] = []

    def score(places: NDArray[np.int64]) -> float:
        drawn.append(places.tolist())
        return 0.5

    assert [len(set_replicates(score, 7)) for _ in range(2)] == [200, 200]
    assert drawn[:200] == drawn[200:]
    assert {len(places) for places in drawn} == {7}
    assert {place for places in drawn for place in places} == set(range(7))


def test_drop_of_answers_is_rounded_to_four_decimals() -> None:
    assert PairedDrop(2, 1, 3).points == 33.3333
