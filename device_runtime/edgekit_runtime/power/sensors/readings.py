"""The readings of a device at one moment: plain values, or None."""

from collections.abc import Mapping
from dataclasses import field

from edgekit_runtime.records import dataclass


@dataclass(frozen=True, slots=True)
class Battery:
    """A battery.

    Attributes:
        charge: 0..1.
        discharge_w: power that it delivers, watts; negative while it is charged, None if unknown.
        capacity_j: energy when full, joules, or None if unknown.
    """

    charge: float
    discharge_w: float | None = None
    capacity_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """The readings of all sensors; None for what is not measured or could not be read.

    Attributes:
        at_s: time of the readings, on a monotonic clock.
        power_w: present power of the device (counters: mean since the last reading), watts.
        interval_j: joules since the reading before.
        interval_s: seconds since the reading before; 0 for the first.
        temperature_c: temperature of the hottest zone where a model computes.
        throttle_bits: throttling bits of a Raspberry Pi, see `raspberry`.
        clock_share: the lowest cap of a CPU cluster, as a share of its highest clock.
        values: probe name -> its number.
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
