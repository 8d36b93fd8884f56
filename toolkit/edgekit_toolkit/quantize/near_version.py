"""Rounds the change of weights between two model versions to coarse steps, so that their delta is small.

First, the earlier weights of each channel are multiplied by the factor for which the change is smallest. The
step is at most 0.9 times the root mean square of this change, so it is small for weights that changed little.
Rounding loses about 1/15 of the energy of the change, or 1/12 in float16. The search checks that the model
still meets its limits.

The error of uniform quantization has the variance step^2 / 12. Source for rounding toward zero: Sullivan,
"Efficient scalar quantization of exponential and Laplacian random variables" (1996).
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LARGEST_SHARE: Final = 0.9  # share of the root mean square of the change
_LARGEST_STEP: Final = 6  # leaves more than five bits of eight
_FIXED_POINT_ONE: Final = 4096
"""The multiplier 1 of a delta, which predicts a code as (code * multiplier + 2048) >> 12. See
docs/reference/fleet-deltas.md."""
_RATIOS: Final = 64
"""A new scale is the earlier scale times 64 / j with an integer j, so that a delta's multiplier is exact."""
_MOST_RATIO, _LEAST_RATIO = 32.0, 0.1  # beyond these, a channel is unrelated to its earlier version
_KEPT_SHRINK, _KEPT_GROWTH = 0.9, 1.01  # within these factors a range keeps its scale. The peak clips by 1 %
_BIAS_STEP: Final = 16  # in steps of the weight: inputs are codes up to 255, and a sum has several
_FREE_BITS: Final = 13  # bits of a float32's mantissa that may change. Ten bits stay
_LEAST_HALF_EXPONENT: Final = -24  # of float16
_HALF_ROUNDING: Final = 1 / 3  # less than 1 / 2 saves a tenth of the bits, for a quarter more error


class WeightCodes(NamedTuple):
    """Quantized weights with their scales.

    Attributes:
        codes: An int8 or int32 array of any shape.
        scales: float32 scales of shape [] or [channels].
        axis: The axis of the channels. Ignored if there is one scale.
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32]
    axis: int

    def is_like(self, other: "WeightCodes") -> bool:
        """Return whether the codes and scales have the same shapes as those of `other`."""
        return self.codes.shape == other.codes.shape and self.scales.shape == other.scales.shape

    def along(self, values: NDArray[Any]) -> NDArray[Any]:
        """Reshape `values` (a scalar or one value per channel) so that they broadcast to the codes."""
        if values.ndim == 0 or self.codes.ndim == 0:
            return values
        shape = [1] * self.codes.ndim
        shape[self.axis] = -1
        return values.reshape(shape)


def near_weight(new: WeightCodes, earlier: WeightCodes) -> tuple[WeightCodes, int]:
    """Return a weight that is closer to its earlier version, and the step to which changes are rounded.

    The codes of `earlier` are first converted to the returned scales. The returned codes differ from the
    converted codes by multiples of the step. If the step is 1, the codes of `new` are returned.

    `new` has symmetric int8 codes. `earlier` is the earlier version with the same shape.
    """
    was, now = (coded.scales.astype(np.float64) for coded in (earlier, new))
    with np.errstate(all="ignore"):
        ratio = np.nan_to_num(now / was, nan=np.inf)
    step = min(int(_LARGEST_SHARE * _measure_change(new, earlier)), _LARGEST_STEP)
    peak = int(max(np.abs(new.codes.astype(int)).max(initial=1), 1))
    if step < 2:
        # A scale that differs so little changes no code: keep it, and save its bytes.
        is_same = np.abs(ratio - 1) * peak < 0.5
        return new._replace(scales=np.where(is_same, earlier.scales, new.scales)), 1
    steps = np.clip(np.floor(_RATIOS / np.clip(ratio, _LEAST_RATIO, _MOST_RATIO)), 1, None)
    steps = np.where((ratio >= _KEPT_SHRINK) & (ratio <= _KEPT_GROWTH), _RATIOS, steps)
    is_near = (ratio >= _LEAST_RATIO) & (ratio <= _MOST_RATIO)
    scales = np.where(is_near, was * _RATIOS / steps, now).astype(np.float32)
    exact = scales.astype(np.float64)
    multipliers = np.clip(np.rint(_FIXED_POINT_ONE * np.divide(was, exact)), 0, 0xFFFF).astype(np.int64)
    base = np.clip(
        (earlier.codes.astype(np.int64) * new.along(multipliers) + _FIXED_POINT_ONE // 2) >> 12, -128, 127
    )
    exact_codes = new.codes * new.along(now / exact)
    codes = base + step * np.rint((exact_codes - base) / step)
    over = np.ceil(np.maximum(np.abs(codes) - peak, 0) / step)
    codes -= np.sign(codes) * over * step
    return WeightCodes(codes.astype(np.int8), scales, new.axis), step


def _measure_change(new: WeightCodes, earlier: WeightCodes) -> float:
    """Return the root mean square of the codes' change after the best factor for each channel."""
    now, was = new.codes.astype(np.float64), earlier.codes.astype(np.float64)
    others = tuple(a for a in range(now.ndim) if new.scales.ndim == 0 or a != new.axis % now.ndim)
    power = (was * was).sum(axis=others, keepdims=True)
    gain = (now * was).sum(axis=others, keepdims=True) / np.maximum(power, 1)
    return float(np.sqrt(np.mean((now - gain * was) ** 2))) if now.size else 0.0


def near_bias(
    new: WeightCodes,
    earlier: WeightCodes,
    weights: tuple[WeightCodes, WeightCodes, WeightCodes],
    step: int,
) -> WeightCodes:
    """Return an int32 bias that is closer to its earlier version, for a weight from `near_weight`.

    Args:
        new: The bias. Its scales are input scale x weight scale.
        earlier: The bias of the earlier version.
        weights: The weight after `near_weight`, before `near_weight`, and in the earlier version.
        step: The step from `near_weight`.
    """
    now, first, was = (weight.scales for weight in weights)
    scales = (new.scales * (now.astype(np.float64) / first)).astype(np.float32)
    scales = np.where(now == was, earlier.scales, scales)
    exact = scales.astype(np.float64)
    base = np.rint(earlier.codes * (earlier.scales / exact))
    coarse = _BIAS_STEP * step
    codes = base + coarse * np.rint((new.codes * (new.scales / exact) - base) / coarse)
    return WeightCodes(np.clip(codes, -(2**31), 2**31 - 1).astype(np.int32), scales, new.axis)


def near_floats(new: NDArray[Any], earlier: NDArray[Any]) -> NDArray[Any]:
    """Return float weights that are close to `new` and differ from `earlier` by multiples of a step.

    In float16, the step is at most 0.9 times the root mean square of `new - earlier`, but at least 2^-24. In
    float32, the bits of `new` and `earlier` are compared as int32, and the step is a power of two.

    A weight is copied from `new` if it is NaN or infinite there or after rounding. A float32 weight is also
    copied if its sign differs between `new` and `earlier`.

    Args:
        new: The weights of the new version, in float16 or float32.
        earlier: The weights of the earlier version, with the same shape and dtype.
    """
    stepped = (_near_halves if new.dtype == np.float16 else _near_singles)(new, earlier)
    return np.where(np.isfinite(stepped) & np.isfinite(new), stepped, new).reshape(new.shape)


def _near_halves(new: NDArray[Any], earlier: NDArray[Any]) -> NDArray[Any]:
    """Return float16 weights at multiples of one step, computed as a delta does: rounded once."""
    was = earlier.astype(np.float64)
    with np.errstate(all="ignore"):
        change = np.nan_to_num(new - was, posinf=0.0, neginf=0.0)
        # Quarters of a power of two: the maker of a delta finds the step again.
        quarter = np.floor(4 * np.log2(_LARGEST_SHARE * np.sqrt(np.mean(change**2))))
        step = np.float64(np.float32(2.0 ** (max(quarter, 4 * _LEAST_HALF_EXPONENT) / 4)))
        counts = np.sign(change) * np.floor(np.abs(change) / step + _HALF_ROUNDING)
        return np.where(counts == 0, earlier, (was + counts * step).astype(np.float16))


def _near_singles(new: NDArray[Any], earlier: NDArray[Any]) -> NDArray[Any]:
    """Return float32 weights whose bits differ by steps of a power of two."""
    now, was = (np.ascontiguousarray(floats).view(np.int32).astype(np.int64) for floats in (new, earlier))
    change = now - was
    bits = min(_FREE_BITS, int(np.log2(max(np.median(np.abs(change)), 1))))
    words = was + (np.rint(change / 2**bits).astype(np.int64) << bits)
    stepped = words.astype(np.int32).view(np.float32)
    return np.where(np.signbit(new) == np.signbit(earlier), stepped, new)
