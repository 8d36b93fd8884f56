"""Drops of a score with their confidence intervals, from paired outcomes on the same samples. Pure.

The source model and a candidate see the same samples, so only what changes on a sample matters. A drop is in
points, hundredths of the score; a negative one is a gain.

One interval serves all metrics. Its upper end asks how high the mean change can be if one more sample were
lost outright, and if the weights of the samples were random (uniform over all weights that sum up to 1). So a
rare large loss that no sample shows is reckoned with, whatever small noise all samples have: without any loss
a limit of 1 point needs 368 samples. For changes of 0 and 1 the upper end is that of Clopper and Pearson; for
many samples of small changes it is that of the normal distribution. The lower end reckons likewise with one
more sample that gains all it can: nothing where the float model itself is the reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError

CONFIDENCE: Final = 0.95  # two-sided
# Beyond this, a number of samples is no advice.
_MAX_SAMPLES: Final = 10_000_000
# A metric over the whole set is called once for each group.
MAX_GROUPS: Final = 200
_SEED: Final = 1
_MAX_TILT: Final = 1 - 1e-9
_SAME_TILT: Final = 1e-12
_SAME_QUANTILE: Final = 1e-9
_MIN_CHANCE: Final = 1e-300

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval of a drop.

    Attributes:
        low, high: ends of the interval, in points: hundredths of the score.
        confidence: confidence level of both sides together, 0..1.
    """

    low: float
    high: float
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drop:
    """The drop of a score.

    Attributes:
        points: the drop in points, hundredths of the score.
        changes: distinct drops of single units; 1 is the drop from the best score to the worst. A unit is a
            sample; in a metric over the whole set it is a group of samples that `leave_out` leaves out.
        counts: number of units with each of `changes`.
        max_gain: the most that a sample can gain, 0..1; 0 if the source model's score is 1 on all samples.
        effective: effective sample size if samples have weights, otherwise 0.
        heaviest: count of the heaviest unit. `interval` adds one unseen unit of this count, with the largest
            drop.
    """

    points: float
    changes: Floats
    counts: Floats
    samples: int
    max_gain: float = 1.0
    effective: float = 0.0
    heaviest: float = 1.0

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Return Gaffke's interval of the mean drop.

        No distribution is known for which the interval misses the mean more often than `confidence` allows.
        """
        error = (1 - confidence) / 2
        low = 0.0 - self._upper_end(-self.changes, error, unseen=self.max_gain)  # never -0.0
        return Interval(low, self._upper_end(self.changes, error), confidence)

    @property
    def standard_error(self) -> float:
        """Standard error of the drop in points, with the unseen unit that `interval` adds."""
        changes, counts = np.append(self.changes, 1.0), np.append(self.counts, self.heaviest)
        deviations = changes - np.average(changes, weights=counts)
        return 100 * math.sqrt(np.average(deviations**2, weights=counts) / counts.sum())

    def samples_for(self, limit_points: float, confidence: float = CONFIDENCE) -> int | None:
        """Return how many samples would be enough to show that the drop is within a limit.

        Each change is taken to be as frequent as in this drop. None if the drop itself is not below the
        limit, or if more than 10 million samples would be needed.
        """
        if self.points >= limit_points:
            return None

        def is_enough(count: int) -> bool:
            return self._upper_end(self.changes, (1 - confidence) / 2, count / self.samples) <= limit_points

        low, high = 0, 1
        while not is_enough(high):
            low, high = high, 2 * high
            if high > _MAX_SAMPLES:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high

    def _upper_end(self, changes: Floats, error: float, factor: float = 1.0, *, unseen: float = 1.0) -> float:
        """Return the upper end in points, were there `factor` times as many samples with the same changes.

        `error` is the chance of a mean above it, `unseen` the least change of the sample that is added.
        """
        added = unseen * float(self.counts.sum()) / (self.effective or self.samples)  # in a group of samples
        values = np.append(changes, max(added, changes.max()))
        counts = np.append(self.counts * factor, self.heaviest)
        return 100 * _upper_quantile(values, counts, error)


def _upper_quantile(values: Floats, counts: Floats, error: float) -> float:
    """Return the mean that random weights exceed with the chance `error`.

    The weights of the values are a Dirichlet distribution with `counts`: exponential variables over their
    sum. So the chance is that of a sum of exponential variables times `value - mean` above 0, which the
    saddlepoint gives within some 6 % of itself. `tilt` runs through all saddlepoints, from the mean of the
    values to the largest one.

    Source: R. Lugannani, S. Rice, Saddle point approximation for the distribution of the sum of independent
    random variables, Advances in Applied Probability 12 (1980), 475-490.
    """
    least = float(values.min())
    values = values - least
    largest = float(values.max())
    if largest == 0:
        return least

    normal, total = NormalDist(), counts.sum()
    target = normal.inv_cdf(1 - error)

    def evaluate(tilt: float) -> tuple[float, float]:
        """Return a mean, and by how much the normal quantile of its chance is over the target."""
        odds = 1 / (1 - tilt / largest * values)
        scale = float(counts @ odds / total)
        mean = (scale - 1) * largest / (tilt * scale)
        root = math.sqrt(2 * float(counts @ np.log(scale / odds)))
        slope = tilt / largest * math.sqrt(float(counts @ ((values - mean) * odds) ** 2))
        chance = normal.cdf(-root) + normal.pdf(root) * (1 / slope - 1 / root)
        return mean, -normal.inv_cdf(max(chance, _MIN_CHANCE)) - target

    around = values - counts @ values / total
    low, high = (0.0, -target), (0.0, -target)
    tilt = min(target * largest / math.sqrt(float(counts @ around**2)), 0.5)
    while high[1] < 0:
        if tilt > _MAX_TILT:
            return least + largest
        low, high = high, (tilt, evaluate(tilt)[1])
        tilt = (1 + tilt) / 2
    mean, excess = largest, math.inf
    while abs(excess) > _SAME_QUANTILE and high[0] - low[0] > _SAME_TILT:  # false position, as of Illinois
        tilt = (low[0] * high[1] - high[0] * low[1]) / (high[1] - low[1])
        previous, (mean, excess) = excess, evaluate(tilt)
        share = 0.5 if previous * excess > 0 else 1.0  # of the end that stayed twice
        if excess < 0:
            low, high = (tilt, excess), (high[0], high[1] * share)
        else:
            low, high = (low[0], low[1] * share), (tilt, excess)
    return least + mean


def mean_drops(
    source: Floats, candidates: Floats, *, max_gain: float = 1.0, weights: Floats | None = None
) -> list[Drop]:
    """Return the drop of each candidate's mean score.

    Args:
        source: scores [samples] of the source model, 0..1.
        candidates: scores [candidates, samples] on the same samples.
        max_gain: as in `Drop`.
        weights: weight of each sample, such as its number of requests; None if all count alike.
    """
    if weights is not None:
        return [_weighted_drop(changes, weights, max_gain) for changes in source - candidates]
    return [
        _drop(100 * float(changes.mean()), changes, len(source), max_gain) for changes in source - candidates
    ]


def estimate_mean(scores: Floats, weights: Floats | None = None) -> tuple[float, Interval]:
    """Return a mean score and its confidence interval, both 0..1.

    Args:
        scores: score [samples] of each sample, 0..1.
        weights: as for `mean_drops`.
    """
    (drop,) = mean_drops(np.ones_like(scores), scores[np.newaxis], weights=weights, max_gain=0.0)
    interval = drop.interval()
    low, high = 1 - interval.high / 100, 1 - max(interval.low, 0.0) / 100
    return 1 - drop.points / 100, Interval(max(low, 0.0), high, interval.confidence)


def _weighted_drop(changes: Floats, weights: Floats, max_gain: float) -> Drop:
    """Return the drop of a weighted mean (Hájek's estimator).

    The counts of the changes add up to the number of samples of equal weight whose mean varies as much, by
    the linearised variance. A few heavy samples may hide what others like them lose, so the interval reckons
    with one more of the heaviest.

    Source: C.-E. Särndal, B. Swensson, J. Wretman, Model Assisted Survey Sampling (1992), section 5.7.
    """
    shares = weights / weights.sum()
    mean = float(shares @ changes)
    variance = float((shares * (changes - mean)) @ (shares * (changes - mean)))
    is_same = variance <= 0  # then the weights alone count, see `count_effective`
    effective = 1 / float(shares @ shares) if is_same else float(shares @ (changes - mean) ** 2) / variance
    effective = max(1.0, effective)
    distinct, positions = np.unique(changes, return_inverse=True)
    return Drop(
        points=round(100 * mean, 4),
        changes=distinct,
        counts=np.asarray(effective * np.bincount(positions.ravel(), shares), np.float64),
        samples=len(changes),
        max_gain=max_gain,
        effective=effective,
        heaviest=effective * float(shares.max()),
    )


def _drop(points: float, changes: Floats, samples: int, max_gain: float = 1.0) -> Drop:
    distinct, counts = np.unique(changes, return_counts=True)
    return Drop(
        points=round(points, 4),
        changes=distinct,
        counts=counts.astype(np.float64),
        samples=samples,
        max_gain=max_gain,
    )


def leave_out(score: Callable[[NDArray[np.int64]], float], count: int) -> Floats:
    """Return the scores of a set with one group of samples left out at a time (jackknife).

    Args:
        score: positions of samples -> their score; raises DataError if they have none.
        count: number of samples, at least 2.

    Returns:
        float64 [groups], at most `MAX_GROUPS` of them: the score without each group; NaN if the remaining
        samples have no score.

    Raises:
        DataError: for more than half of the groups, the remaining samples have no score.
    """
    size = math.ceil(count / MAX_GROUPS)
    groups = np.random.default_rng(_SEED).permutation(count) * math.ceil(count / size) // count
    errors = []

    def score_or_nan(positions: NDArray[np.int64]) -> float:
        try:
            return score(positions)
        except DataError as error:
            errors.append(error)
            return math.nan

    scores = [score_or_nan(np.flatnonzero(groups != group)) for group in range(math.ceil(count / size))]
    if 2 * len(errors) > len(scores):
        raise DataError(
            f"the metric has a score on all {count} samples, but on {len(errors)} of {len(scores)} parts of"
            f" them it has none, so its drop has no interval; give more samples. Last: {errors[-1]}"
        )
    return np.array(scores)


def set_drop(source: float, candidate: float, without: tuple[Floats, Floats], samples: int) -> Drop:
    """Return the drop of a score over a whole set; its `changes` come from groups left out (jackknife).

    Args:
        source: score, 0..1.
        candidate: score, 0..1.
        without: results of `leave_out` for both models, the source first.
        samples: number of samples in the set.
    """
    drop = source - candidate
    losses = drop - (without[0] - without[1])
    losses = losses[~np.isnan(losses)]
    changes = drop + (len(without[0]) - 1) * (losses - losses.mean())
    return _drop(100 * drop, changes.round(12), samples)
