"""Tests whether the mean of bounded values lies above a limit; needs few values if they vary little.

A gambler bets that each value lies above the limit. If the mean does not, no gambler can expect to win: the
chance that the capital ever reaches `1 / alpha` is at most `alpha`. The capital is spread over a few fixed
bets, so the order of the values does not matter. If values scatter little around a mean above the limit, the
logarithm of the capital grows by the square of their distance over their variance;
`confidence_sequences.log_evidence` takes only their sum, and needs ten times as many.

The values must be independent, or at least have a mean below the limit whatever came before.

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
    """Return the natural logarithm of the capital, at first 1, of bets that the mean is above `limit`.

    Args:
        values: values, clipped to 0..1.
        limit: limit of the mean, more than 0 and at most 1.

    Raises:
        ValueError: `limit` is out of its range.
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
    """Return for each count n the largest limit that the first n values refute.

    With `evidence` = -log(alpha) this is the lower end of a confidence sequence of their mean.

    Args:
        values: values in the order in which they came, clipped to 0..1.
        counts: values of n in rising order, each from 1 to the number of `values`.
        limits: in rising order, 1e-4..1; between two of them the result is interpolated.
        evidence: logarithm of the capital that refutes a limit.

    Returns:
        float64 [number of counts]; 0 where not even the lowest limit is refuted.
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
