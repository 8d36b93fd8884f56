"""Drops of a score and their confidence intervals, from paired scores on the same samples.

The source model and a candidate are scored on the same samples, so only the change on each sample matters. A
drop is in points, which are hundredths of the score. A negative drop is a gain.

All metrics use the same interval. To compute its upper end, one sample with the largest possible loss is
added, and all samples get random weights (uniform over all weights with the sum 1). The upper end is a
quantile of the weighted mean change. The added sample accounts for rare large losses that no sample shows.
For example, a limit of 1 point needs 368 samples even if there is no loss. If all changes are 0 or 1, the
upper end is that of Clopper and Pearson. For many samples with small changes, it approaches that of the
normal distribution. The lower end is computed in the same way with an added sample that has the largest
possible gain. This gain is 0 if the float model is the reference.
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
        low, high: The ends of the interval in points, which are hundredths of the score.
        confidence: The two-sided confidence level, 0..1.
    """

    low: float
    high: float
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drop:
    """The drop of a score.

    Attributes:
        points: The drop in points, which are hundredths of the score.
        changes: The distinct drops of samples. 1 is the drop from the best score to the worst. If the metric
            scores whole sets, these are drops of the groups of samples from `leave_out`.
        counts: The number of samples or groups with each of `changes`.
        max_gain: The maximum gain of a sample, 0..1. It is 0 if the source model scores 1 on all samples.
        effective: The effective sample size if samples have weights, otherwise 0.
        heaviest: The largest weight of a sample, in the unit of `counts`. Confidence intervals assume
            one additional sample with this weight and the largest possible loss.
    """

    points: float
    changes: Floats
    counts: Floats
    samples: int
    max_gain: float = 1.0
    effective: float = 0.0
    heaviest: float = 1.0

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Return Gaffke's confidence interval of the mean drop.

        Its coverage is not proven, but no distribution is known for which it is below `confidence`.
        """
        error = (1 - confidence) / 2
        low = 0.0 - self._upper_end(-self.changes, error, unseen=self.max_gain)  # never -0.0
        return Interval(low, self._upper_end(self.changes, error), confidence)

    @property
    def standard_error(self) -> float:
        """The standard error of the drop in points.

        As for the interval, one sample with the largest possible loss is added, because a large loss can be
        so rare that no sample shows it.
        """
        changes, counts = np.append(self.changes, 1.0), np.append(self.counts, self.heaviest)
        deviations = changes - np.average(changes, weights=counts)
        return 100 * math.sqrt(np.average(deviations**2, weights=counts) / counts.sum())

    def samples_for(self, limit_points: float, confidence: float = CONFIDENCE) -> int | None:
        """Return the number of samples that would show that the drop is within a limit.

        This assumes that each change has the same frequency as in this drop. The result is None if the drop
        is not below the limit, or if more than 10 million samples would be needed.
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
        source: The scores of the source model, 0..1, [samples].
        candidates: The scores of the candidates on the same samples, [candidates, samples].
        max_gain: See `Drop`.
        weights: The weight of each sample, such as its number of requests, or None for equal weights.
    """
    if weights is not None:
        return [_weighted_drop(changes, weights, max_gain) for changes in source - candidates]
    return [
        _drop(100 * float(changes.mean()), changes, len(source), max_gain) for changes in source - candidates
    ]


def estimate_mean(scores: Floats, weights: Floats | None = None) -> tuple[float, Interval]:
    """Return a mean score and its confidence interval, both 0..1.

    Args:
        scores: The score of each sample, 0..1, [samples].
        weights: See `mean_drops`.
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
    """Divide samples into groups, and score the whole set without each of the groups (jackknife).

    Args:
        score: Returns the score of the samples with these indices. Raises DataError if they have no score.
        count: The number of samples, at least 2.

    Returns:
        The score without each group, float64 [groups], with at most `MAX_GROUPS` groups. NaN if the other
        samples have no score.

    Raises:
        DataError: More than half of these scores are missing.
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
    """Return the drop of a score over a whole set, with `changes` from the results of `leave_out`.

    Args:
        source: The score of the source model, 0..1.
        candidate: The score of the candidate, 0..1.
        without: The results of `leave_out` for the source and the candidate.
        samples: The number of samples in the set.
    """
    drop = source - candidate
    losses = drop - (without[0] - without[1])
    losses = losses[~np.isnan(losses)]
    changes = drop + (len(without[0]) - 1) * (losses - losses.mean())
    return _drop(100 * drop, changes.round(12), samples)
