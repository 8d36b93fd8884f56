"""Replaces an operator by a new scale and zero point, so that the codes of its input represent its output.

If necessary, the scale of the codes is increased to make the result exact. It is increased by up to 1/8 so
that a shift is a whole number of steps. For a hard sigmoid, it is first increased by up to 1/4, so that the
codes cover the sloped part.
"""

import math
from dataclasses import dataclass

import numpy as np

from edgekit_toolkit.quantize.scheme import QuantizationParams

# A shift of fewer steps than this would change the scale by more than a few percent.
_MIN_STEPS = 8
# How much coarser codes may become to cover the whole sloped part of a hard sigmoid.
_MAX_WIDENING = 1.25


@dataclass(frozen=True, slots=True)
class Reread:
    """The quantization parameters that replace an operator.

    Attributes:
        source: The parameters with which the previous kernel quantizes its output.
        output: The parameters that convert the same codes to the output of the replaced operator.
        low, high: The limits to which the codes are clipped first, or None.
    """

    source: QuantizationParams
    output: QuantizationParams
    low: int | None = None
    high: int | None = None


def reread_shifted(params: QuantizationParams, factor: float, shift: float) -> Reread | None:
    """Return parameters with which the codes of x represent factor * x + shift, or None.

    The formula is scale (q - zero) + shift = scale (q - (zero - shift / scale)), which is exact if shift /
    scale is an integer. The result is None if the shift is less than 8 steps, or if the new zero point does
    not fit into uint8.

    `params` are the uint8 parameters of x. `factor` is positive.
    """
    scale, steps = float(params.scale), 0
    if shift:
        steps = math.floor(abs(shift / factor) / scale)
        if steps < _MIN_STEPS:
            return None
        scale = abs(shift / factor) / steps
        steps = int(math.copysign(steps, shift))
    # The larger scale brings the kernel's own zero point closer to the low end, which stays where it is.
    zero = round(int(params.zero_point) * float(params.scale) / scale)
    if not 0 <= zero - steps <= 255:
        return None
    return Reread(_affine(scale, zero), _affine(scale * factor, zero - steps))


def reread_hard_sigmoid(params: QuantizationParams, alpha: float, beta: float) -> Reread | None:
    """Return parameters with which the codes of x represent clip(alpha * x + beta, 0, 1), or None.

    Codes are clipped to the sloped part, where the result is alpha * x + beta. None is returned if no scale
    close to that of x has a code at each end of this part.

    Args:
        params: The uint8 parameters of x.
        alpha: A positive factor.
        beta: A shift between 0 and 1, exclusive.
    """
    scale, zero = float(params.scale), int(params.zero_point)
    low, high = -scale * zero, scale * (255 - zero)
    zero_at = -beta / alpha
    wide = (high - min(low, zero_at)) / 255
    steps = math.floor(-zero_at / wide)
    if wide > _MAX_WIDENING * scale or steps < _MIN_STEPS:
        return None
    scale = -zero_at / steps
    zero = round(-min(low, zero_at) / scale)
    first, last = zero - steps, zero + (1 - beta) / alpha / scale
    if last < 255 and abs(last - round(last)) > 1e-3:  # the upper end would lie between two codes
        return None
    return Reread(
        _affine(scale, zero),
        _affine(scale * alpha, first),
        low=first if first > 0 else None,
        high=round(last) if last < 255 else None,
    )


def _affine(scale: float, zero: int) -> QuantizationParams:
    return QuantizationParams(np.asarray(np.float32(scale)), np.asarray(zero, np.uint8))
