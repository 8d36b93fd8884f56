"""The range trap: a model calibrated on 0..1 and fed with -1..1 saturates and says nothing.

Samples are held against the samples that calibrated, and against the codes of a model that came quantized.
It looks at inputs, and warns; a model of another preprocessing still runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from edgekit_toolkit.samples.generated import Feeds

# Values this far outside, in spans of the calibrated range, are what other samples of the same kind have.
_MARGIN: Final = 0.05
# A share of values outside that heavy tails explain; another preprocessing puts a third or more there.
_TOLERATED_SHARE: Final = 0.01
_MAX_SAMPLES: Final = 256
# The share of the codes' range that samples use when they are like those that calibrated the model, by the
# number of samples. Keyword spectrograms, whose tails are heavy, use 0.11 with one sample, 0.6 with 64.
_LEAST_USED: Final = ((64, 0.5), (1, 0.1))
# Samples that all lie on one side of zero where a quarter of the codes or more is for the other side.
_LEAST_SAMPLES_OF_ONE_SIGN: Final = 4
_UNUSED_SIDE: Final = 0.25


@dataclass(frozen=True, slots=True)
class CodeRange:
    """The values from an input's lowest to its highest code.

    Attributes:
        low, high: ends of the range, in the unit of what the caller gives.
        may_be_symmetric: whether zero is in the middle because every range of that form is written so; then
            `low` says nothing about the values that it was calibrated with.
    """

    low: float
    high: float
    may_be_symmetric: bool


def find_range_trap(calibration: Iterable[Feeds], evaluation: Iterable[Feeds]) -> list[str]:
    """Return a warning for each float input whose evaluation values lie outside its calibrated range.

    Args:
        calibration: samples that calibrate.
        evaluation: samples that judge, or any that the model will be fed with; the first 256 are looked at.
    """
    calibrated = _extremes(calibration)
    seen, _ = _compare(calibrated, evaluation)
    return [
        f"RANGE TRAP: {one.outside:.0%} of the values of input '{name}' lie outside the range that was"
        f" calibrated ({_show(calibrated[name])}; judged on {_show(one.extremes)}): quantized forms cut them"
        " off. Check that calibration and evaluation samples went through the same preprocessing"
        for name, one in seen.items()
        if one.outside > _TOLERATED_SHARE
    ]


def find_codes_trap(codes: Mapping[str, CodeRange], samples: Iterable[Feeds]) -> list[str]:
    """Return a warning for each quantized input whose codes are for values of another range.

    Args:
        codes: what the inputs hold, see `models.input_codes`.
        samples: what the model will be fed with; the first 256 are looked at.
    """
    seen, count = _compare({name: (held.low, held.high) for name, held in codes.items()}, samples)
    warnings = []
    for name, one in seen.items():
        held = codes[name]
        if one.outside > _TOLERATED_SHARE:
            fault = f"{one.outside:.0%} of its values in the samples lie outside and are cut off"
        elif _is_barely_used(held, one.extremes, count):
            fault = "the samples use a part of it only, so most codes never occur"
        else:
            continue
        warnings.append(
            f"RANGE TRAP: the model was quantized for values of input '{name}' in"
            f" {_show((held.low, held.high))}, the samples hold {_show(one.extremes)}: {fault}. Check that"
            " they went through the preprocessing that the model was quantized with; if not, its scores are"
            " wrong"
        )
    return warnings


class _InputValues(NamedTuple):
    """The values of one input in samples: their extremes, and the share that lies outside its range."""

    extremes: tuple[float, float]
    outside: float


def _compare(
    ranges: Mapping[str, tuple[float, float]], samples: Iterable[Feeds]
) -> tuple[dict[str, _InputValues], int]:
    """Return what the first samples hold of each input with a range, and how many samples these are."""
    extremes: dict[str, tuple[float, float]] = {}
    outside, sizes, count = dict.fromkeys(ranges, 0), dict.fromkeys(ranges, 0), 0
    for feeds in islice(samples, _MAX_SAMPLES):
        count += 1
        for name, (low, high) in ranges.items():
            value = feeds[name]
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
