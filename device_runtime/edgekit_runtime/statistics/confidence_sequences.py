"""Confidence sequences for a mean and for a quantile, which can be evaluated after every observation.

If an ordinary 99 % interval is computed after every request, it almost surely misses the true value at some
time. For a confidence sequence, the probability that the true value is *ever* outside the interval is at most
`alpha`, so a decision can be made at any time. All functions use one martingale for a mean `p`. It is the
likelihood of the observations averaged over all means (with a Beta(1/2, 1/2) prior), divided by the
likelihood under `p`. By Ville's inequality, the probability that it ever reaches 1 / alpha is at most alpha.

The observations must be independent given the past, and their mean or distribution must be constant.

Source: H. Robbins, Statistical methods related to the law of the iterated logarithm, Ann. Math. Statist. 41
(1970); S. Howard, A. Ramdas, J. McAuliffe, J. Sekhon, Time-uniform, nonparametric, nonasymptotic confidence
sequences, Ann. Statist. 49 (2021), proposition 7; for quantiles: S. Howard, A. Ramdas, Sequential estimation
of quantiles with applications to A/B testing and best-arm identification, Bernoulli 28 (2022), section 2.
"""

import math
from collections.abc import Callable
from dataclasses import field
from typing import Final

from edgekit_runtime.records import dataclass

_PRIOR: Final = 0.5
_LOG_PRIOR: Final = 2 * math.lgamma(_PRIOR) - math.lgamma(2 * _PRIOR)
_BISECTIONS: Final = 24  # halvings of 0..1: to 6e-8, on the safe side

# Relative width of a bucket, and the range of all buckets: 100 ns to 10,000 s, or as many joules.
_BUCKET_LOG: Final = math.log(1.02)
_LEAST, _MOST = 1e-7, 1e4


def log_evidence(total: float, count: int, share: float) -> float:
    """Return the logarithm of the test martingale for the mean `share`.

    A value of at least log(1 / alpha) rejects this mean at the level alpha.

    Args:
        total: The sum of the observations, which are numbers from 0 to 1.
        count: The number of observations.
        share: The hypothetical mean, between 0 and 1 (exclusive).
    """
    missed = max(count - total, 0.0)  # sums of fractions are rounded
    mixed = math.lgamma(total + _PRIOR) + math.lgamma(missed + _PRIOR) - math.lgamma(count + 2 * _PRIOR)
    return mixed - _LOG_PRIOR - total * math.log(share) - missed * math.log1p(-share)


def share_interval(total: float, count: int, alpha: float) -> tuple[float, float]:
    """Return the lower and upper bound of the mean, or (0, 1) without observations.

    Args:
        total: The sum of the observations, see `log_evidence`.
        count: The number of observations.
        alpha: The probability that the true mean is ever outside the bounds.
    """
    if not count:
        return 0.0, 1.0
    mean, limit = min(total / count, 1.0), -math.log(alpha)

    def refutes(share: float) -> bool:
        return log_evidence(total, count, share) >= limit

    low = 0.0 if mean <= 0 else _edge(refutes, 0.0, mean)
    high = 1.0 if mean >= 1 else _edge(refutes, 1.0, mean)
    return low, high


def _edge(refutes: Callable[[float], bool], outside: float, inside: float) -> float:
    """Return the last refuted share on the way from `outside` to `inside`."""
    for _ in range(_BISECTIONS):
        middle = (outside + inside) / 2
        if middle in (outside, inside):
            break
        if refutes(middle):
            outside = middle
        else:
            inside = middle
    return outside


def rank_interval(count: int, quantile: float, alpha: float) -> tuple[int, int]:
    """Return bounds for the number of values that are at or below the true quantile.

    Args:
        count: The number of values, at least 1.
        quantile: The quantile, between 0 and 1 (exclusive).
        alpha: The probability that the true number is ever outside the bounds.
    """
    limit, middle = -math.log(alpha), round(quantile * count)
    low = _first(0, middle, lambda rank: log_evidence(rank, count, quantile) < limit)
    past = _first(middle, count + 1, lambda rank: log_evidence(rank, count, quantile) >= limit)
    return low, past - 1


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the first of low..high - 1 for which the monotonic `holds` is true, else `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def share_is_above(total: float, count: int, share: float, alpha: float) -> bool | None:
    """Return whether the mean is above `share`, or None if this is not yet known.

    Args:
        total: The sum of the observations, see `log_evidence`.
        count: The number of observations.
        share: The mean to compare with, between 0 and 1 (exclusive).
        alpha: The probability that the result is ever wrong.
    """
    if not count or log_evidence(total, count, share) < -math.log(alpha):
        return None
    return bool(total / count > share)


@dataclass(slots=True)
class LogHistogram:
    """A histogram of positive values with at most 1,280 buckets, each 2 % wide.

    Attributes:
        count: The number of values.
        buckets: A dict from the index b of a bucket, which begins at 1.02 ** b, to its number of values.
    """

    count: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        """Add a value. Values outside 1e-7..1e4 count as the nearest limit."""
        bucket = math.floor(math.log(min(max(value, _LEAST), _MOST)) / _BUCKET_LOG)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1

    def quantile_interval(self, quantile: float, alpha: float) -> tuple[float, float]:
        """Return the confidence interval of the true quantile. An unknown bound is 0 or infinity.

        Args:
            quantile: The quantile, between 0 and 1 (exclusive).
            alpha: The probability that the true quantile is ever outside the interval.
        """
        if not self.count:
            return 0.0, math.inf
        low, high = rank_interval(self.count, quantile, alpha)
        return self._bounds(low)[0] if low else 0.0, self._bounds(high + 1)[1]

    def quantile(self, quantile: float) -> float | None:
        """Return a quantile (0..1) of the values with an accuracy of about 1 %, or None without values."""
        if not self.count:
            return None
        low, high = self._bounds(max(1, math.ceil(quantile * self.count)))
        return math.sqrt(low * high)

    def _bounds(self, rank: int) -> tuple[float, float]:
        """Edges of the bucket of the value with this rank, from 1; infinite beyond the last."""
        for bucket in sorted(self.buckets):
            rank -= self.buckets[bucket]
            if rank <= 0:
                return math.exp(bucket * _BUCKET_LOG), math.exp((bucket + 1) * _BUCKET_LOG)
        return math.inf, math.inf
