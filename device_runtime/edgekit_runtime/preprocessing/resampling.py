"""Changes the sample rate of a recording with a polyphase filter."""

import functools
import math
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import Floats

_MAX_FACTOR: Final = 4096  # all usual rates from 8 to 192 kHz have smaller ones
_MAX_GROWTH: Final = 8  # from 8 kHz to 48 kHz it is 6. More is a slip, or an attack on memory


def resample(samples: Floats, rate: int, target_rate: int) -> Floats:
    """Resample a float32 recording [samples] from `rate` to `target_rate`, both in Hz.

    The result is that of `scipy.signal.resample_poly` with its default arguments.

    Raises:
        DataError: The ratio of the two rates is not supported.
    """
    divisor = math.gcd(rate, target_rate)
    up, down = target_rate // divisor, rate // divisor
    if max(up, down) > _MAX_FACTOR or up > _MAX_GROWTH * down:
        raise DataError(
            f"{rate} Hz cannot become {target_rate} Hz: their ratio is {down} : {up}, the limits are"
            f" {_MAX_FACTOR} for each and 1 : {_MAX_GROWTH}; record at a usual rate such as 48000 Hz"
        )
    filters, delay = _make_filters(up, down)
    taps = len(filters)
    count = -(-len(samples) * up // down)
    last = ((count - 1) * down + delay) // up
    padded = np.pad(samples, (taps - 1, max(0, last + 1 - len(samples))))
    windows = sliding_window_view(padded, taps)  # a row ends at each sample
    resampled = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        end, column = divmod(phase * down + delay, up)
        target = resampled[phase::up]
        target[...] = windows[end::down][: len(target)] @ filters[:, column]
    return resampled


@functools.lru_cache(16)
def _make_filters(up: int, down: int) -> tuple[Floats, int]:
    """Return a low-pass filter for each phase, reversed, float32 [taps, up], and its delay."""
    longest = max(up, down)
    delay = 10 * longest
    response = np.sinc(np.arange(-delay, delay + 1) / longest) * np.kaiser(2 * delay + 1, 5.0)
    response *= up / response.sum()
    taps = -(-len(response) // up)
    phases = np.pad(response, (0, taps * up - len(response))).reshape(taps, up)
    return phases[::-1].astype(np.float32), delay
