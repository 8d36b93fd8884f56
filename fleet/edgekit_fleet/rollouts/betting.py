"""Tests whether the mean of bounded values is above a limit. It needs few values if they vary little.

A gambler with a capital of 1 bets that each value is above the limit. If the mean is not above it, the
probability that the capital ever reaches `1 / alpha` is at most `alpha`. The capital is divided among a few
fixed bets, so the order of the values does not matter. For values with a small variance around a mean above
the limit, the logarithm of the capital grows with the squared distance from the limit, divided by the
variance. `confidence_sequences.log_evidence` uses only the sum of the values, and needs ten times as many
values.

The values must be independent, or at least have a conditional mean below the limit, given all earlier values.

Source: I. Waudby-Smith, A. Ramdas, Estimating means of bounded random variables by betting, J. R. Stat. Soc.
B 86 (2024), sections 4 and 5; H. Robbins (1970) for the mixture.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BETS: Final = np.array([[0.06], [0.2], [0.5], [0.8], [0.95]])
"""Bets, as shares of the largest bet that cannot lose more than the whole capital."""
_FACTORS: Final = 64  # factors multiplied before the logarithm: their product stays within 1e-256 and 1e256


def log_capital(values: Sequence[float] | NDArray[np.float64], limit: float) -> float:
    """Return the natural logarithm of the gambler's capital after all values.

    The gambler bets that the mean is above `limit`. The capital is 1 before the first value.

    Args:
        values: The values. They are clipped to 0..1.
        limit: The limit of the mean, more than 0 and at most 1.

    Raises:
        ValueError: `limit` is out of range.
    """
    if not 0 < limit <= 1:
        raise ValueError(f"the limit is {limit}, expected more than 0 and at most 1")
    gains = np.clip(np.asarray(values, np.float64), 0.0, 1.0) / limit - 1.0
    logs = np.log1p(_BETS * gains).sum(axis=1)
    return float(np.logaddexp.reduce(logs)) - math.log(len(_BETS))


def find_refuted_limits(
    values: Sequence[float] | NDArray[np.float64],
    counts: Sequence[int],
    limits: Sequence[float],
    evidence: float,
) -> NDArray[np.float64]:
    """Compute a lower bound of the mean from the first n values, for several n.

    The bound is the largest limit that the values refute. With `evidence` = -log(alpha), the bounds are a
    confidence sequence.

    Args:
        values: The values in the order of arrival. They are clipped to 0..1.
        counts: The numbers n, in rising order, each from 1 to the number of `values`.
        limits: Limits from 1e-4 to 1, in rising order. The bound is interpolated between them.
        evidence: The natural logarithm of the capital at which a limit is refuted.

    Returns:
        float64 [counts], the bound for each n. It is 0 if no limit is refuted.
    """
    clipped = np.clip(np.asarray(values, np.float64), 0.0, 1.0)
    # `numpy.unique` would import `numpy.ma`, for which the first page of a rollout waits.
    starts = sorted({*range(0, len(clipped), _FACTORS), *(count for count in counts if count < len(clipped))})
    count_columns = np.searchsorted(starts, counts) - 1  # the values since the previous count
    capital = np.empty((len(limits), len(counts)))
    for row, limit in zip(capital, limits, strict=True):
        logs = [
            np.log(np.multiply.reduceat(clipped * (bet / limit) + (1.0 - bet), starts)).cumsum()[
                count_columns
            ]
            for bet in _BETS.ravel()
        ]
        row[:] = np.logaddexp.reduce(logs, axis=0) - math.log(len(_BETS))
    refuted = np.zeros(len(counts))
    for count_index, column in enumerate(capital.T):  # falls as the limit rises
        above = int((column >= evidence).sum())
        if above == len(limits):
            refuted[count_index] = limits[-1]
        elif above:
            share = (column[above - 1] - evidence) / (column[above - 1] - column[above])
            refuted[count_index] = limits[above - 1] + share * (limits[above] - limits[above - 1])
    return refuted
