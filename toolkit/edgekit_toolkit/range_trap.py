"""The calibration range trap: a model calibrated on 0..1 and fed with -1..1 saturates and says nothing.

It serves every quantized form alike: it looks at inputs, not at models.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

import numpy as np

from edgekit_toolkit.feeds import Feeds

# Values this far outside, in spans of the calibrated range, are what other samples of the same kind have.
_MARGIN: Final = 0.05
# A share of values outside that heavy tails explain; another preprocessing puts a third or more there.
_TOLERATED_SHARE: Final = 0.01
_MAX_SAMPLES: Final = 256


def find_range_trap(calibration: Iterable[Feeds], evaluation: Iterable[Feeds]) -> list[str]:
    """Return a warning for each float input whose evaluation values lie outside its calibrated range.

    Args:
        calibration: samples that calibrate.
        evaluation: samples that judge, or any that the model will be fed with; the first 256 are looked at.
    """
    calibrated = _extremes(calibration)
    outside: dict[str, list[int]] = {}
    seen: dict[str, tuple[float, float]] = {}
    for feeds in islice(evaluation, _MAX_SAMPLES):
        for name, value in feeds.items():
            if name not in calibrated or not value.size:
                continue
            low, high = calibrated[name]
            margin = _MARGIN * (high - low)
            count = int(np.count_nonzero((value < low - margin) | (value > high + margin)))
            total = outside.setdefault(name, [0, 0])
            total[0] += count
            total[1] += value.size
            seen[name] = _wider(seen.get(name), (float(value.min()), float(value.max())))
    return [
        f"RANGE TRAP: {count / size:.0%} of the values of input '{name}' lie outside the range that was"
        f" calibrated ({_show(calibrated[name])}; judged on {_show(seen[name])}): quantized forms cut them"
        " off. Check that calibration and evaluation samples went through the same preprocessing"
        for name, (count, size) in outside.items()
        if count > _TOLERATED_SHARE * size
    ]


def _extremes(samples: Iterable[Feeds]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for feeds in samples:
        for name, value in feeds.items():
            if value.dtype.kind == "f" and value.size:
                found[name] = _wider(found.get(name), (float(value.min()), float(value.max())))
    return found


def _wider(known: tuple[float, float] | None, pair: tuple[float, float]) -> tuple[float, float]:
    return pair if known is None else (min(known[0], pair[0]), max(known[1], pair[1]))


def _show(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.4g}..{pair[1]:.4g}"
