"""Drops of a score with their confidence intervals, from paired outcomes on the same samples. Pure.

The source model and a candidate see the same samples, so only the samples on which they differ matter. A drop
is in points, hundredths of the score; a negative one is a gain.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

CONFIDENCE: Final = 0.95  # two-sided
# Beyond this, a number of samples is no advice.
_MOST_SAMPLES: Final = 10_000_000
_MEAN_REPLICATES: Final = 2000
# A metric over the whole set is called once for each replicate.
SET_REPLICATES: Final = 200
_SEED: Final = 1
# With this many differing samples or fewer, some resamples hold none of them.
_FEW: Final = 7
# Two drops this close are equal: a drop is rounded to four decimals, and a mean depends on the order of its
# sum.
_SAME_POINTS: Final = 1e-4

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval of a drop.

    Attributes:
        low, high: points.
        confidence: confidence level of both sides together, 0..1.
    """

    low: float
    high: float
    confidence: float


@dataclass(frozen=True, slots=True)
class PairedDrop:
    """The drop of a score that is 0 or 1 on each sample.

    Attributes:
        losses: samples that the source gets right and the candidate wrong.
        gains: the reverse.
        samples: all of them, at least 1.
    """

    losses: int
    gains: int
    samples: int

    @property
    def points(self) -> float:
        """The drop itself."""
        return round(100 * (self.losses - self.gains) / self.samples, 4)

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Return Tango's score interval.

        With no differing sample at all its upper end is z^2 / (n + z^2), which is not below the exact one.

        Source: T. Tango, Equivalence test and confidence interval for the difference in proportions for the
        paired-sample design, Statistics in Medicine 17 (1998), 891-908.
        """
        z = _quantile(1 - (1 - confidence) / 2)
        low, high = (100 * _invert(sign * z, self.losses, self.gains, self.samples) for sign in (1, -1))
        return Interval(low, high, confidence)

    def samples_for(self, limit_points: float, confidence: float = CONFIDENCE) -> int | None:
        """Return how many samples with these shares of losses and gains show the drop to be within a limit.

        None if no number does: the drop is not below the limit.
        """
        z = _quantile(1 - (1 - confidence) / 2)
        losses, gains = self.losses / self.samples, self.gains / self.samples

        def is_enough(count: int) -> bool:
            return 100 * _invert(-z, losses * count, gains * count, count) <= limit_points

        if self.points >= limit_points:
            return None
        low, high = 0, 1
        while not is_enough(high):
            low, high = high, 2 * high
            if high > _MOST_SAMPLES:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high


def _invert(z: float, losses: float, gains: float, samples: float) -> float:
    """Return the difference at which Tango's statistic, which falls with it, is `z`."""
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _tango(middle, losses, gains, samples) > z:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _tango(difference: float, losses: float, gains: float, samples: float) -> float:
    """Return the score statistic of a hypothetical difference of the shares of losses and gains."""
    a = 2 * samples
    b = (2 * samples - losses + gains) * difference - losses - gains
    c = -gains * difference * (1 - difference)
    share = max(0.0, (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a))  # of gains, most likely
    variance = samples * (2 * share + difference * (1 - difference))
    error = losses - gains - samples * difference
    if variance <= 0:
        return math.copysign(math.inf, error) if error else 0.0
    return error / math.sqrt(variance)


@dataclass(frozen=True, slots=True)
class ResampledDrop:
    """The drop of any other score, with its values on resamples of the samples.

    Attributes:
        points: the drop itself.
        replicates: points on each resample, in ascending order.
        acceleration: the acceleration of BCa; 0 if it is unknown.
        samples: how many there are.
        differing: number of samples on which source and candidate differ.
    """

    points: float
    replicates: Floats
    acceleration: float
    samples: int
    differing: int

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Return the bias-corrected and accelerated bootstrap interval (BCa).

        If few samples differ, resampling cannot show a rare large loss that was not drawn. Then the interval
        also includes the interval for as many samples won or lost outright.

        Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), section 14.3.
        """
        interval, rare = self._bootstrap(confidence), self._rare()
        if rare is None:
            return interval
        wider = rare.interval(confidence)
        return Interval(min(interval.low, wider.low), max(interval.high, wider.high), confidence)

    def _rare(self) -> PairedDrop | None:
        """Return the drop as if the differing samples were won or lost outright, if they are few."""
        if self.differing > _FEW:
            return None
        return PairedDrop(
            losses=self.differing if self.points > 0 else 0,
            gains=self.differing if self.points < 0 else 0,
            samples=self.samples,
        )

    def _bootstrap(self, confidence: float) -> Interval:
        count = len(self.replicates)
        below = np.searchsorted(self.replicates, self.points - _SAME_POINTS, "left")
        same = np.searchsorted(self.replicates, self.points + _SAME_POINTS, "right") - below
        bias = _quantile(min(max((below + same / 2) / count, 0.5 / count), 1 - 0.5 / count))
        ends = []
        for level in ((1 - confidence) / 2, 1 - (1 - confidence) / 2):
            shifted = bias + _quantile(level)
            corrected = bias + shifted / max(1 - self.acceleration * shifted, 1e-9)
            ends.append(float(np.quantile(self.replicates, NormalDist().cdf(corrected))))
        return Interval(ends[0], ends[1], confidence)

    def samples_for(self, limit_points: float, confidence: float = CONFIDENCE) -> int | None:
        """Return about how many such samples show the drop to be within a limit, or None if none do."""
        room, rare = limit_points - self.points, self._rare()
        if room <= 0:
            return None
        least = None if rare is None else rare.samples_for(limit_points, confidence)
        interval = self.interval(confidence) if least is None else self._bootstrap(confidence)
        reach = interval.high - self.points
        count = max(least or 1, math.ceil(self.samples * (reach / room) ** 2))
        return count if count <= _MOST_SAMPLES else None


Drop = PairedDrop | ResampledDrop


def mean_drops(source: Floats, candidates: Floats) -> list[Drop]:
    """Return the drop of each candidate's mean score.

    Args:
        source: scores [samples] of the source model, 0..1.
        candidates: scores [candidates, samples] on the same samples.
    """
    count = len(source)
    changes = source - candidates
    resampled: Floats | None = None
    drops: list[Drop] = []
    for place, change in enumerate(changes):
        if np.isin(source, (0, 1)).all() and np.isin(candidates[place], (0, 1)).all():
            drops.append(PairedDrop(int((change > 0).sum()), int((change < 0).sum()), count))
            continue
        if resampled is None:
            resampled = np.stack(
                [changes[:, drawn].mean(axis=1) for drawn in _draws(count, _MEAN_REPLICATES)]
            )
        replicates = np.sort(100 * resampled[:, place])
        drops.append(
            ResampledDrop(
                points=round(100 * float(change.mean()), 4),
                replicates=replicates,
                acceleration=_acceleration(change),
                samples=count,
                differing=int(np.count_nonzero(change)),
            )
        )
    return drops


def set_replicates(score: Callable[[NDArray[np.int64]], float], count: int) -> Floats:
    """Return a score over a whole set on each of `SET_REPLICATES` resamples, which all models share.

    Args:
        score: called with the places of the drawn samples [count].
        count: number of samples.
    """
    return np.array([score(drawn) for drawn in _draws(count, SET_REPLICATES)])


def set_drop(source: float, candidate: float, replicates: tuple[Floats, Floats], samples: int) -> Drop:
    """Return the drop of a score over a whole set.

    Args:
        source: score, 0..1.
        candidate: score, 0..1.
        replicates: the scores of both on the same resamples; NaN if there is none.
        samples: how many there are.
    """
    changes = 100 * (replicates[0] - replicates[1])
    changes = np.sort(changes[~np.isnan(changes)])
    return ResampledDrop(
        points=round(100 * (source - candidate), 4),
        replicates=changes,
        acceleration=0.0,
        samples=samples,
        differing=_estimate_differing(changes, samples),
    )


def _estimate_differing(replicates: Floats, samples: int) -> int:
    """Return about how many samples change a score over a whole set, which has no value for each sample.

    Of n samples of which k differ, a resample holds none of these with probability (1 - k/n)^n, or e^-k.
    """
    unchanged = float(np.mean(replicates == 0))
    return samples if unchanged == 0 else min(samples, round(-math.log(unchanged)))


def _draws(count: int, replicates: int) -> Iterator[NDArray[np.int64]]:
    """Yield the places of each resample."""
    draw = np.random.default_rng(_SEED)
    for _ in range(replicates):
        yield draw.integers(0, count, count)


def _acceleration(changes: Floats) -> float:
    """Return the acceleration of a mean from its influence values: the jackknife of a mean is exact."""
    around = changes - changes.mean()
    spread = float((around**2).sum())
    return 0.0 if spread == 0 else float((around**3).sum()) / (6 * spread**1.5)


def _quantile(probability: float) -> float:
    return NormalDist().inv_cdf(probability)
