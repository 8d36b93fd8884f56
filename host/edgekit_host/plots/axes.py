"""The axes of all plots, with ranges, ticks and positions. This module only computes and does not draw."""

import math
from dataclasses import dataclass

# Beyond this ratio of largest to smallest value, a linear axis would push most points into one corner.
_LOG_RATIO = 8.0
# The data keep at least this share of the axis if a far limit is on it too.
_DATA_SHARE = 0.45


@dataclass(frozen=True, slots=True)
class Quantity:
    """The quantity of an axis, in display units.

    Attributes:
        title: The title, such as `Size`.
        values: The values of the points.
        reaches: The confidence interval of each value as (low, high), or None where it is unknown. The tuple
            is empty if all are unknown.
        limit: The limit in the budget, or None.
        limit_text: The limit as text, in the same format as on the rest of the page.
        baseline: The value of the source model, or None.
    """

    title: str
    unit: str
    values: tuple[float, ...]
    limit: float | None = None
    limit_text: str = ""
    baseline: float | None = None
    reaches: tuple[tuple[float, float] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """A range with ticks, whose labels have `decimals` decimals. The ends of a `log` axis are above 0."""

    low: float
    high: float
    ticks: tuple[float, ...] = ()
    decimals: int = 0
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, where 0 is the low end and 1 the high end."""
        if self.low == self.high:
            return 0.5
        if self.log:
            # A log axis has no place for values up to 0: they are far below its low end.
            return math.log(max(value, 1e-9 * self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def clamp(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def shows(self, value: float) -> bool:
        return self.low <= value <= self.high


def scale_axis(quantity: Quantity) -> Axis:
    """Return the axis for costs. It includes all points, and the limit unless the limit is far away.

    The axis is logarithmic if the largest cost is over 8 times the smallest.
    """
    low, high = min(quantity.values), max(quantity.values)
    if low > 0 and high / low > _LOG_RATIO:
        return _log_axis(low, high, quantity.limit)
    low, high = _with_limit(low, high, quantity.limit)
    return _linear_axis(low, high, floor=0.0)


def focus_axis(quantity: Quantity) -> Axis:
    """Return the axis for scores, which may exclude very low scores so that the others stay distinguishable.

    The caller draws values below the axis at its lower end.
    """
    best = max((*quantity.values, *([] if quantity.baseline is None else [quantity.baseline])))
    low = min(quantity.values)
    window = 10.0 if quantity.limit is None else max(4 * (best - quantity.limit), 0.2)
    inside = [value for value in quantity.values if value >= best - window]
    if inside and 2 * len(inside) >= len(quantity.values):
        low = min(inside)
    # Intervals of visible points are visible too.
    for value, reach in zip(quantity.values, quantity.reaches, strict=False):
        if reach is not None and value >= low:
            low, best = min(low, max(reach[0], best - window)), max(best, reach[1])
    low, high = _with_limit(low, best, quantity.limit)
    return _linear_axis(low, high, floor=None)


def _with_limit(low: float, high: float, limit: float | None) -> tuple[float, float]:
    if limit is None:
        return low, high
    wide_low, wide_high = min(low, limit), max(high, limit)
    # If all points are at one place, only the limit gives the axis a scale.
    if low == high or high - low >= _DATA_SHARE * (wide_high - wide_low):
        return wide_low, wide_high
    return low, high


def _linear_axis(low: float, high: float, *, floor: float | None) -> Axis:
    span = high - low or abs(high) * 0.1 or 1.0
    low, high = low - 0.09 * span, high + 0.09 * span
    if floor is not None:
        low = max(low, floor)
    step = nice_step((high - low) / 5)
    ticks = tuple(linear_ticks(low, high))
    return Axis(low, high, ticks, max(0, -math.floor(math.log10(step) + 1e-9)), log=False)


def _log_axis(low: float, high: float, limit: float | None) -> Axis:
    if limit is not None and limit > 0:
        logs = _with_limit(math.log(low), math.log(high), math.log(limit))
        low, high = math.exp(logs[0]), math.exp(logs[1])
    pad = (high / low) ** 0.08
    low, high = low / pad, high * pad
    return Axis(
        low,
        high,
        tuple(log_ticks(low, high, dense_up_to=200.0)),
        max(0, -math.floor(math.log10(low))),
        log=True,
    )


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    step = nice_step((high - low) / count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, *, dense_up_to: float = 300.0) -> list[float]:
    """Return round numbers from `low` to `high` for a logarithmic axis.

    `low` must be above 0. If the ratio of the ends is below `dense_up_to`, the ticks are 1, 2 and 5 times
    powers of ten. Otherwise they are powers of ten.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < dense_up_to else (1,)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def nice_step(rough: float) -> float:
    """Return the smallest number that is at least `rough` and 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
