"""Finds integer codes for tensors whose values were integers before preprocessing, such as pixels.

A preprocessing such as `(pixel - mean) / std` produces at most 256 values per channel. If samples confirm
this, the values can be sent as 8-bit codes without loss.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.partition.coding import Lattice

SOUND: Final = Lattice(np.array([2.0**-15]), np.array([0.0]), -32768, 32767, is_grid=False, is_exact=False)
"""The lattice of 16-bit sound samples in -1..1. Other values are rounded to it."""
_TOLERANCE: Final = 0.02  # share of a step: error of a preprocessing's roundings in float32
_MAX_DIVISOR: Final = 8  # all codes in the samples may be multiples of a few steps apart
_BYTE: Final = 255
_INT16: Final = 32767
_SLACK: Final = 4  # codes reach beyond those of the samples by a quarter of their span on each side
_MAX_CHANNELS: Final = 4
_IMAGE_RANK: Final = 4


def find_bytes(samples: NDArray[np.float32]) -> Lattice | None:
    """Return a lattice that maps the values of the samples to 8-bit codes, or None if there is none.

    The value of a code that does not occur in the samples is interpolated, and its last bit may be wrong. The
    range of accepted codes is wider than the range of the samples by at most a quarter of its width on each
    side. Values outside of the accepted range may not be on the grid.

    Args:
        samples: The samples, float32 [samples, ...]. For images, channels are axis 1 or the last axis.
    """
    for axis in _channel_axes(samples.shape):
        channels = [samples] if axis == 0 else list(np.moveaxis(samples, axis, 0))
        searched = [_find_grid(np.unique(values), _BYTE) for values in channels]
        grids = [grid for grid in searched if grid is not None]
        if len(grids) < len(channels):
            continue
        step = np.array([grid[0] for grid in grids])
        offset = np.array([_align(low, width, count) for width, low, count in grids])
        table = [_fill(np.unique(values), s, o) for values, s, o in zip(channels, step, offset, strict=True)]
        first = np.rint((np.array([grid[1] for grid in grids]) - offset) / step).astype(np.int64)
        count = np.array([grid[2] for grid in grids])
        ends = np.array([first - count // _SLACK, first + count + count // _SLACK])
        return Lattice(
            step,
            offset,
            0,
            _BYTE,
            axis=axis,
            table=np.array(table, np.float32),
            accepted=ends.clip(0, _BYTE),
        )
    return None


def find_series(samples: NDArray[np.float32]) -> Lattice:
    """Return a lattice that maps the values of the samples to 16-bit codes.

    If the values are not on a grid, they are rounded to 1/30,000 of their range. The range of the codes is
    wider than the range of the samples by at most a quarter of its width on each side. The difference of two
    codes fits into 16 bits.

    Args:
        samples: The samples, float32 [samples, ...].
    """
    values = np.unique(samples)
    time_axis = find_time_axis(samples)
    # Differences must fit 16 bits, so the codes have 15.
    grid = _find_grid(values, _INT16 - 1)
    is_grid = grid is not None
    if grid is None:
        low, high = float(values[0]), float(values[-1])
        step = max((high - low) / 30_000, 1e-30)
        grid = (step, low, 30_000)
    step, low, count = grid
    slack = min((_INT16 - 1 - count) // 2, count // _SLACK)
    codes = np.floor((values - np.float32(low)) / np.float32(step) + np.float32(0.5))
    restored = codes.astype(np.float32) * np.float32(step) + np.float32(low)
    return Lattice(
        np.array([step]),
        np.array([low]),
        -slack,
        count + slack,
        time_axis=time_axis,
        is_grid=is_grid,
        is_exact=bool(np.array_equal(restored, values)),
    )


def find_time_axis(samples: NDArray[np.float32]) -> int:
    """Return the axis along which neighbouring values differ least. Axis 0 is not considered."""
    return 1 + int(np.argmin([_roughness(samples, axis) for axis in range(1, samples.ndim)]))


def _channel_axes(shape: tuple[int, ...]) -> Sequence[int]:
    """Axis 0, which stands for one grid for all values; then the axes that may be channels."""
    if len(shape) != _IMAGE_RANK:
        return (0,)
    return (0, *(axis for axis in (1, 3) if shape[axis] <= _MAX_CHANNELS))


def _find_grid(values: NDArray[np.float32], most: int) -> tuple[float, float, int] | None:
    """Step, smallest value and number of steps of a grid on which sorted values lie; None without one."""
    if not np.isfinite(values).all() or len(values) < 2 or len(values) > most + 1:
        return None
    wide = values.astype(np.float64)
    least = float(np.diff(wide).min())
    for divisor in range(1, _MAX_DIVISOR + 1):
        step = least / divisor
        # The step is refined from near values to far ones: its error adds up with each step.
        for reach in (8, 64, 512, 4096, most + 1):
            codes = (wide - wide[0]) / step
            near = codes <= reach
            rounded = np.rint(codes)
            if np.abs(codes - rounded)[near].max() > 0.25:
                break
            if near.sum() > 1:
                step = float((wide[near] - wide[0]) @ rounded[near] / (rounded[near] @ rounded[near]))
        codes = (wide - wide[0]) / step
        count = round(float(codes[-1]))
        if count <= most and np.abs(codes - np.rint(codes)).max() <= _TOLERANCE:
            return step, float(wide[0]), count
    return None


def _align(low: float, step: float, count: int) -> float:
    """The value of code 0, if samples do not show all 256 codes.

    Preprocessings of pixels map code 0 to 0, or both ends to nearly opposite values; these are tried first.
    """
    slack = _BYTE - count
    from_zero = low / step
    if abs(from_zero - round(from_zero)) <= _TOLERANCE and 0 <= round(from_zero) <= slack:
        return low - round(from_zero) * step
    centred = round((low + _BYTE * step / 2) / step)
    return low - min(max(centred, 0), slack) * step


def _fill(values: NDArray[np.float32], step: float, offset: float) -> NDArray[np.float32]:
    """The value of each of 256 codes: from the samples, or on the line."""
    table = (np.arange(_BYTE + 1) * step + offset).astype(np.float32)
    table[np.rint((values.astype(np.float64) - offset) / step).astype(np.int64)] = values
    return table


def _roughness(samples: NDArray[np.float32], axis: int) -> float:
    if samples.shape[axis] < 2:
        return float("inf")
    return float(np.abs(np.diff(samples, axis=axis)).mean())
