"""The readings of a device at one point in time."""

from collections.abc import Mapping
from dataclasses import field

from edgekit_runtime.records import dataclass


@dataclass(frozen=True, slots=True)
class Battery:
    """The state of a battery.

    Attributes:
        charge: The charge, 0 to 1.
        discharge_w: The power that the battery delivers, in watts. Negative while charging, None if unknown.
        capacity_j: The energy of the full battery in joules, or None if unknown.
    """

    charge: float
    discharge_w: float | None = None
    capacity_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """The readings of all sensors. None for values that are not measured or could not be read.

    Attributes:
        at_s: The time of the readings, on a monotonic clock.
        power_w: The current power of the device in watts. For counters, the mean since the previous readings.
        interval_j: The energy since the previous readings, in joules.
        interval_s: The time since the previous readings, in seconds. 0 for the first.
        temperature_c: The highest temperature of all thermal zones with a probe.
        throttle_bits: The throttling bits of a Raspberry Pi, see `raspberry`.
        clock_share: The lowest clock limit of all CPU clusters, as a fraction of the highest clock.
        values: A dict from probe names to their numbers.
    """

    at_s: float
    power_w: float | None = None
    interval_j: float | None = None
    interval_s: float = 0.0
    temperature_c: float | None = None
    battery: Battery | None = None
    throttle_bits: int | None = None
    clock_share: float | None = None
    values: Mapping[str, float | None] = field(default_factory=dict, hash=False)
