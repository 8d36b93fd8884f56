"""Filters the readings of a sensor: replaces single spikes, and detects a stuck sensor.

A repeated reading alone is no fault, since temperatures change in steps of a degree and an idle board is
steady. A sensor is stuck if its reading stays the same although the expected power has changed.
"""

from dataclasses import replace
from statistics import median
from typing import Final

from edgekit_runtime.records import dataclass

_MOVED: Final = 0.25  # share by which the expected power must have moved
_READINGS: Final = 5  # number of readings


@dataclass(frozen=True, slots=True)
class SensorFilter:
    """The latest readings of one sensor.

    Attributes:
        patience: The number of repeated readings after which a sensor may be considered stuck.
        recent: The last five readings. Their median is correct even if two of them are wrong.
        repeats: How many times the last reading was repeated.
        least_w, most_w: The lowest and the highest power that was expected during the repetitions.
    """

    patience: int
    recent: tuple[float, ...] = ()
    repeats: int = 0
    least_w: float = 0.0
    most_w: float = 0.0

    def see(self, value: float | None, expected_w: float) -> "SensorFilter":
        """Return the state after a reading. A failed reading (None) discards the readings before it.

        `expected_w` is the power that the device is expected to use at the time of the reading.
        """
        if value is None:
            return replace(self, recent=())
        if not self.recent or value != self.recent[-1]:
            return SensorFilter(self.patience, (*self.recent, value)[-_READINGS:], 0, expected_w, expected_w)
        return SensorFilter(
            self.patience,
            (*self.recent, value)[-_READINGS:],
            self.repeats + 1,
            min(self.least_w, expected_w),
            max(self.most_w, expected_w),
        )

    @property
    def stuck(self) -> bool:
        """Whether the reading stayed the same although the power changed."""
        return self.repeats >= self.patience and self.most_w - self.least_w > _MOVED * self.most_w

    def latest(self, expected: float) -> float | None:
        """Return the last reading, or the median if the last reading looks wrong.

        A reading looks wrong if it differs by more than a factor of two from both the median and `expected`.
        The result is None without readings or if the sensor is stuck. Unlike `value`, the result follows
        changes without a delay.
        """
        middle = self.value
        if middle is None:
            return None
        last = self.recent[-1]
        return last if _alike(last, middle) or _alike(last, expected) else middle

    @property
    def value(self) -> float | None:
        """The median of the last readings, or None without readings or if the sensor is stuck."""
        return None if self.stuck or not self.recent else median(self.recent)


def _alike(value: float, other: float) -> bool:
    return value <= 2 * other and other <= 2 * value
