"""Computes ranges of activations without rare extreme values, from histograms.

With the full range, a few outliers waste most codes. A narrower range clips the outliers. The noise of the
whole model decides which range is used.

Source: H. Wu et al., Integer Quantization for Deep Learning Inference: Principles and Empirical Evaluation,
2020, section 5.1 (percentile), and R. Banner et al., Post-training 4-bit quantization of convolution networks
for rapid deployment, 2019, section 2.1 (rounding noise and clipping noise).
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.quantize.ranges import Histogram

# Share of the values that a percentile range keeps, half of the rest at either end.
_KEPT_SHARE: Final = 0.9999
_STEPS: Final = 64
_CODES: Final = 255


def percentile_range(histogram: Histogram, *, symmetric: bool) -> tuple[float, float]:  # noqa: ARG001  # see `narrow`
    """Return the range without the lowest and highest 0.005 % of the values. `symmetric` is ignored."""
    edges = _edges(histogram)
    share = np.cumsum(histogram.counts) / max(int(histogram.counts.sum()), 1)
    tail = (1 - _KEPT_SHARE) / 2
    first = int(np.searchsorted(share, tail, side="right"))
    last = int(np.searchsorted(share, 1 - tail, side="left"))
    last = min(max(last, first), len(histogram.counts) - 1)
    return float(edges[first]), float(edges[last + 1])


def least_error_range(histogram: Histogram, *, symmetric: bool) -> tuple[float, float]:
    """Return the range for which 8-bit codes have the least mean squared error.

    Args:
        histogram: The histogram of one activation.
        symmetric: Whether the codes are symmetric around 0.
    """
    edges = _edges(histogram)
    centers, counts = (edges[:-1] + edges[1:]) / 2, histogram.counts.astype(np.float64)
    lows, highs = _shortened(histogram.low), _shortened(histogram.high)
    below = np.array([_clipped_error(low - centers, counts) for low in lows])
    above = np.array([_clipped_error(centers - high, counts) for high in highs])
    reach = np.maximum(highs, 0)[None, :], np.minimum(lows, 0)[:, None]
    width = 2 * np.maximum(reach[0], -reach[1]) if symmetric else reach[0] - reach[1]
    rounding = (width / _CODES) ** 2 / 12 * counts.sum()
    total = below[:, None] + above[None, :] + rounding
    best = np.unravel_index(int(total.argmin()), total.shape)
    return float(lows[best[0]]), float(highs[best[1]])


class NarrowRange(Protocol):
    """A function that narrows the range of an activation, so that common values get more codes."""

    def __call__(self, histogram: Histogram, *, symmetric: bool) -> tuple[float, float]:
        """Return the lowest and the highest value of the range.

        `symmetric` says whether the codes are symmetric around 0.
        """


@dataclass(frozen=True, slots=True)
class RangeMethod:
    """A method for narrow ranges, which the search tries in addition to the full ranges.

    Attributes:
        label: The name of the method in labels of candidates.
    """

    label: str
    narrow: NarrowRange


RANGE_METHODS: Final = (
    RangeMethod("99.99 % ranges", percentile_range),
    RangeMethod("least-error ranges", least_error_range),
)


def _edges(histogram: Histogram) -> NDArray[np.float64]:
    return np.linspace(histogram.low, histogram.high, len(histogram.counts) + 1)


def _shortened(end: float) -> NDArray[np.float64]:
    """Return the end of a range and points between it and 0, the farthest first."""
    return end * np.arange(_STEPS, 0, -1) / _STEPS


def _clipped_error(beyond: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Return the sum of the squared distances of the values beyond an end."""
    return float((np.square(np.maximum(beyond, 0)) * counts).sum())
