"""Converts the temperature and battery limits to power budgets in watts.

The temperature limit uses proportional-integral control, like the power allocator of the Linux kernel, with
anti-windup. If the device heats up fast, the budget falls before the limit is reached. The battery budget is
the energy above the required charge, divided by the remaining time.

Source: Documentation/driver-api/thermal/power_allocator.rst of the kernel; K. J. Astrom and R. M. Murray,
Feedback Systems, 2nd edition, section 11.4 (integrator wind-up); H. Hoffmann, JouleGuard, SOSP 2015 (an
energy goal as a rate that is corrected by what was used).
"""

from dataclasses import replace
from typing import Final

from edgekit_runtime.power.governor.settings import BatteryLimit
from edgekit_runtime.power.sensors.readings import Battery
from edgekit_runtime.records import dataclass

_BAND_C: Final = 10.0  # degrees that correspond to the whole range of watts
_INTEGRAL_S: Final = 60.0
_FILTER_S: Final = 4.0  # zones step by 0.5 to 1 degree
_BLIND_S: Final = 30.0  # time without a temperature before caution
_CAUTION: Final = 0.9
_COUNTED_S: Final = 60.0
_LEAST_TIME_LEFT_S: Final = 1.0
_AFTERWARDS_S: Final = 60.0  # after the end, the energy left above the floor is used up over this time
_GAUGE_S: Final = 60.0  # time in which the gauge corrects the charge counted from power


@dataclass(frozen=True, slots=True)
class Heat:
    """The state of the temperature control.

    Attributes:
        budget_w: The mean power in watts at which the temperature stays within the limit. None before the
            first reading.
    """

    budget_w: float | None = None
    _integral: float = 0.0  # share of the range of watts, which moves with the load
    _filtered_c: float | None = None
    _seen_s: float = 0.0

    def step(
        self,
        limit_c: float,
        temperature_c: float | None,
        range_w: tuple[float, float],
        now_s: float,
        dt_s: float,
    ) -> "Heat":
        """Return the state after `dt_s` seconds.

        If `temperature_c` is None for 30 s, the budget is reduced as a precaution.
        `range_w` holds the lowest and the highest power of all settings. `now_s` is the time of a monotonic
        clock.
        """
        if temperature_c is None:
            return self._go_blind(range_w, now_s)
        before_c = temperature_c if self._filtered_c is None else self._filtered_c
        filtered_c = before_c + min(1.0, dt_s / _FILTER_S) * (temperature_c - before_c)
        low_w, high_w = range_w
        error = (limit_c - filtered_c) / _BAND_C
        # The first reading starts from full power.
        integral = 1.0 if self.budget_w is None else self._integral
        integral += error * dt_s / _INTEGRAL_S
        share = min(max(integral + error, 0.0), 1.0)
        return Heat(low_w + share * (high_w - low_w), share - error, filtered_c, now_s)

    def _go_blind(self, range_w: tuple[float, float], now_s: float) -> "Heat":
        if self.budget_w is None or now_s - self._seen_s < _BLIND_S:
            return self
        low_w, high_w = range_w
        integral_w = low_w + self._integral * (high_w - low_w)
        return replace(self, budget_w=max(low_w, _CAUTION * min(integral_w, high_w)))


@dataclass(frozen=True, slots=True)
class Charge:
    """The state of the battery control.

    Attributes:
        budget_w: The mean power in watts at which the battery has the required charge at `until_s`. None
            before the first reading and while the battery is charging. If the capacity is unknown, None above
            the required charge, else 0.
    """

    budget_w: float | None = None
    _above_j: float | None = None

    def step(
        self, limit: BatteryLimit, battery: Battery | None, used_w: float, now_s: float, dt_s: float
    ) -> "Charge":
        """Return the state after `dt_s` seconds.

        Without a reading of the battery, the charge is estimated from `used_w`, the mean power since the last
        step. `now_s` is the time on the clock of `limit.until_s`.
        """
        if battery is None:
            counted_j = None if self._above_j is None else self._above_j - used_w * dt_s
            return self if counted_j is None else Charge(_spread(counted_j, limit, now_s), counted_j)
        if battery.discharge_w is not None and battery.discharge_w < 0:
            return Charge()
        if battery.capacity_j is None:
            return Charge(None if battery.charge > limit.floor else 0.0)
        gauge_j = (battery.charge - limit.floor) * battery.capacity_j
        counted_j = gauge_j if self._above_j is None else self._above_j - used_w * dt_s
        # Near the end one step of the gauge would swing the budget, so then only power is counted.
        gain = 0.0 if 0 < limit.until_s - now_s < _COUNTED_S else min(1.0, dt_s / _GAUGE_S)
        above_j = counted_j + gain * (gauge_j - counted_j)
        return Charge(0.0 if battery.charge < limit.floor else _spread(above_j, limit, now_s), above_j)


def _spread(above_j: float, limit: BatteryLimit, now_s: float) -> float:
    left_s = limit.until_s - now_s
    return max(0.0, above_j) / (max(left_s, _LEAST_TIME_LEFT_S) if left_s > 0 else _AFTERWARDS_S)
