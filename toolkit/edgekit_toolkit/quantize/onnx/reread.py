"""Operators that cost nothing on codes: the same codes are read with another scale and zero point.

Pure arithmetic on `QuantizationParams`. The kernel's own scale is enlarged if that makes the result exact: by
at most an eighth for a whole number of steps, and for a hard sigmoid by a quarter more so that the codes
cover its slope.
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
    """Codes of a kernel, read with other parameters.

    Attributes:
        source: parameters with which the kernel writes the codes.
        output: parameters that turn the same codes into the operator's output.
        low, high: limits that codes are clipped to before `output` applies; None for no limit.
    """

    source: QuantizationParams
    output: QuantizationParams
    low: int | None = None
    high: int | None = None


def reread_shifted(params: QuantizationParams, factor: float, shift: float) -> Reread | None:
    """Return parameters with which the codes of x stand for factor * x + shift, or None.

    scale (q - zero) + shift = scale (q - (zero - shift / scale)), exact where shift / scale is a whole
    number. The result is None if the shift is under a few steps, or the new zero point is outside uint8.

    `params`: scale and zero point of the codes of x, uint8. `factor`: above 0.
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
    """Return parameters with which the codes of x stand for clip(alpha * x + beta, 0, 1), or None.

    Between results 0 and 1, a hard sigmoid is a scaling and a shift; codes beyond these ends are clipped. The
    result is None if no scale close to the scale of x gives both ends a code.

    Args:
        params: scale and zero point of the codes of x, uint8.
        alpha: above 0.
        beta: above 0, below 1.
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
