"""Warns if the values of inputs are outside the range for which a model was quantized.

For example, a model that was calibrated on 0..1 clips negative inputs to 0 without an error. Samples are
compared with the calibration samples, or with the range of codes of a model that is already quantized.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from edgekit_toolkit.samples.generated import Feeds

# Other samples of the same kind may lie this far outside, in spans of the calibrated range.
_MARGIN: Final = 0.05
# Heavy tails explain this share of values outside. Another preprocessing puts a third or more there.
_TOLERATED_SHARE: Final = 0.01
_MAX_SAMPLES: Final = 256
# Pairs of a number of samples and the share of the codes' range that samples like the calibration samples
# use. Keyword spectrograms, which have heavy tails, use 0.11 with one sample and 0.6 with 64.
_LEAST_USED: Final = ((64, 0.5), (1, 0.1))
# A warning needs this many samples, all on one side of zero, and this share of codes for the other side.
_LEAST_SAMPLES_OF_ONE_SIGN: Final = 4
_UNUSED_SIDE: Final = 0.25


@dataclass(frozen=True, slots=True)
class CodeRange:
    """The range of values that the codes of a quantized input can represent.

    Attributes:
        low, high: The lowest and highest value, in the unit of the model's input.
        may_be_symmetric: Whether the quantization may be symmetric around 0. In this case, `low` may be lower
            than all calibration values.
    """

    low: float
    high: float
    may_be_symmetric: bool


def find_range_trap(calibration: Iterable[Feeds], evaluation: Iterable[Feeds]) -> list[str]:
    """Return a warning for each float input with over 1 % of evaluation values outside the calibrated range.

    Args:
        calibration: The calibration samples.
        evaluation: The evaluation samples, or any later inputs. The first 256 are checked.
    """
    calibrated = _extremes(calibration)
    comparisons, _ = _compare(calibrated, evaluation)
    return [
        f"RANGE TRAP: {comparison.outside:.0%} of the values of input '{name}' lie outside the range"
        f" that was calibrated ({_show(calibrated[name])}; judged on {_show(comparison.extremes)}):"
        " quantized forms cut them off. Check that calibration and evaluation samples went through the same"
        " preprocessing"
        for name, comparison in comparisons.items()
        if comparison.outside > _TOLERATED_SHARE
    ]


def find_codes_trap(codes: Mapping[str, CodeRange], samples: Iterable[Feeds]) -> list[str]:
    """Return a warning for each quantized input whose code range does not match the samples.

    At most 256 samples are checked.
    """
    comparisons, count = _compare(
        {name: (code_range.low, code_range.high) for name, code_range in codes.items()}, samples
    )
    warnings = []
    for name, comparison in comparisons.items():
        code_range = codes[name]
        if comparison.outside > _TOLERATED_SHARE:
            fault = f"{comparison.outside:.0%} of its values in the samples lie outside and are cut off"
        elif _is_barely_used(code_range, comparison.extremes, count):
            fault = "the samples use a part of it only, so most codes never occur"
        else:
            continue
        warnings.append(
            f"RANGE TRAP: the model was quantized for values of input '{name}' in"
            f" {_show((code_range.low, code_range.high))}, the samples hold {_show(comparison.extremes)}:"
            f" {fault}. Check that they went through the preprocessing that the model was quantized with; if"
            " not, its scores are wrong"
        )
    return warnings


class _InputValues(NamedTuple):
    """Values of one input in samples: their extremes, and the share outside of its range."""

    extremes: tuple[float, float]
    outside: float


def _compare(
    ranges: Mapping[str, tuple[float, float]], samples: Iterable[Feeds]
) -> tuple[dict[str, _InputValues], int]:
    """Return the values of the first samples for each input with a range, and how many samples these are."""
    extremes: dict[str, tuple[float, float]] = {}
    outside, sizes, count = dict.fromkeys(ranges, 0), dict.fromkeys(ranges, 0), 0
    for feeds in islice(samples, _MAX_SAMPLES):
        count += 1
        for name, (low, high) in ranges.items():
            if name not in feeds:  # a state, which no sample holds
                continue
            value = feeds[name].astype(np.float64)  # a float16 does not hold the ends of wide ranges
            if not value.size:
                continue
            margin = _MARGIN * (high - low)
            outside[name] += int(np.count_nonzero((value < low - margin) | (value > high + margin)))
            sizes[name] += value.size
            extremes[name] = _wider(extremes.get(name), (float(value.min()), float(value.max())))
    return {name: _InputValues(pair, outside[name] / sizes[name]) for name, pair in extremes.items()}, count


def _is_barely_used(codes: CodeRange, pair: tuple[float, float], count: int) -> bool:
    if codes.may_be_symmetric:
        used = max(abs(pair[0]), abs(pair[1])) / codes.high
        unused_side = False
    else:
        span = codes.high - codes.low
        used = (min(pair[1], codes.high) - max(pair[0], codes.low)) / span
        side = -codes.low if pair[0] >= 0 else codes.high if pair[1] <= 0 else 0.0
        unused_side = side >= _UNUSED_SIDE * span and count >= _LEAST_SAMPLES_OF_ONE_SIGN
    return unused_side or used < next(share for least, share in _LEAST_USED if count >= least)


def _extremes(samples: Iterable[Feeds]) -> dict[str, tuple[float, float]]:
    extremes: dict[str, tuple[float, float]] = {}
    for feeds in samples:
        for name, value in feeds.items():
            if value.dtype.kind == "f" and value.size:
                extremes[name] = _wider(extremes.get(name), (float(value.min()), float(value.max())))
    return extremes


def _wider(pair_so_far: tuple[float, float] | None, pair: tuple[float, float]) -> tuple[float, float]:
    return pair if pair_so_far is None else (min(pair_so_far[0], pair[0]), max(pair_so_far[1], pair[1]))


def _show(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.4g}..{pair[1]:.4g}"
