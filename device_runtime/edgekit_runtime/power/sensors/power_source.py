"""A power source: probes that together measure the device, and the energy between readings."""

from collections.abc import Mapping
from typing import Final

from edgekit_runtime.power.sensors.probe import MOST_POWER_W
from edgekit_runtime.records import dataclass

# Over a longer gap, a straight line between two powers would be a guess.
_MAX_GAP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Interval:
    """The power and energy between two readings. None for values that are unknown."""

    seconds: float
    power_w: float | None
    energy_j: float | None


@dataclass(slots=True, kw_only=True)
class PowerSource:
    """Adds up probes that together measure the device or a part of it.

    Attributes:
        scope: The part of the device that the probes measure, for messages.
        counts: True if the probes count joules. False if they measure watts, which are then interpolated.
        rank: The preference of this source. The source with the lowest rank is used.
        is_whole: Whether the probes measure the whole device.
    """

    scope: str
    names: tuple[str, ...]
    counts: bool
    rank: int
    is_whole: bool = False
    _at_s: float | None = None
    _last: float | None = None

    def measure(self, values: Mapping[str, float | None], now_s: float) -> Interval:
        """Return the power and the energy since the last call. The first call returns no energy.

        For probes that count joules, the power is the mean since the last call. For probes that measure
        watts, it is the sum of `values`.

        Args:
            values: A dict from probe names to numbers. If one is missing, power and energy are unknown.
            now_s: The time of a monotonic clock.
        """
        numbers = [values.get(name) for name in self.names]
        readings = [number for number in numbers if number is not None]
        total = sum(readings) if len(readings) == len(numbers) and min(readings) >= 0 else None
        if total == 0 and not self.counts:
            total = None  # a running device draws power: a full battery on a charger reports 0
        seconds = 0.0 if self._at_s is None else now_s - self._at_s
        interval = self._count(total, seconds) if self.counts else self._join(total, seconds)
        if total is not None or not self.counts:
            self._last = total  # a counter bridges a gap, so its last number is kept
        if total is not None or not self.counts or self._at_s is None:
            self._at_s = now_s
        return interval

    def _count(self, total: float | None, seconds: float) -> Interval:
        if total is None or self._last is None or seconds <= 0:
            return Interval(max(0.0, seconds), None, None)
        energy_j = total - self._last
        if energy_j > MOST_POWER_W * seconds:  # a counter that was reset, as by a suspend, looks wrapped
            return Interval(seconds, None, None)
        return Interval(seconds, energy_j / seconds, energy_j)

    def _join(self, total: float | None, seconds: float) -> Interval:
        if total is None or self._last is None or not 0 < seconds <= _MAX_GAP_S:
            return Interval(max(0.0, seconds), total, None)
        return Interval(seconds, total, (total + self._last) / 2 * seconds)
