"""Finding the sensors of this device, and reading them all at once.

Reading takes a few hundred microseconds to milliseconds (an INA3221 sits on a slow bus): `sampling` does
it on a thread of its own.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from edgekit_runtime.power.sensors.battery import find_battery
from edgekit_runtime.power.sensors.clocks import find_clocks
from edgekit_runtime.power.sensors.ina3221 import find_rails
from edgekit_runtime.power.sensors.power_source import Interval, PowerSource, choose_source
from edgekit_runtime.power.sensors.probe import Family, Probe, Quantity
from edgekit_runtime.power.sensors.rapl import find_counters
from edgekit_runtime.power.sensors.raspberry import find_raspberry
from edgekit_runtime.power.sensors.readings import Battery, Readings
from edgekit_runtime.power.sensors.sysfs import Sysfs
from edgekit_runtime.power.sensors.thermal import find_zones


@dataclass(slots=True)
class Sensors:
    """The sensors of power, heat and battery of a device.

    Attributes:
        families: the kinds of sensors that were searched for, with missing ones and why.
        source: source of power and energy, or None if nothing measures them.
    """

    families: tuple[Family, ...]
    probes: tuple[Probe, ...]
    source: PowerSource | None

    def read(self, now_s: float) -> Readings:
        """Return a number or None for each; raises nothing.

        Args:
            now_s: time on a monotonic clock; not before the time of the last call.
        """
        values = {probe.name: probe.read(now_s) for probe in self.probes}

        def numbers(quantity: Quantity) -> list[float]:
            read = (values[probe.name] for probe in self.probes if probe.quantity == quantity)
            return [value for value in read if value is not None]

        interval = Interval(0.0, None, None) if self.source is None else self.source.measure(values, now_s)
        bits = _first(numbers("throttle_bits"))
        charge = _first(numbers("charge"))
        return Readings(
            at_s=now_s,
            power_w=interval.power_w,
            interval_j=interval.energy_j,
            interval_s=interval.seconds,
            temperature_c=max(numbers("temperature_c"), default=None),
            battery=None
            if charge is None
            else Battery(charge, _first(numbers("discharge_w")), _first(numbers("capacity_j"))),
            throttle_bits=None if bits is None else int(bits),
            clock_share=min(numbers("clock_share"), default=None),
            values=values,
        )


def discover(sysfs: Sysfs | None = None, vcgencmd: str | None = None) -> Sensors:
    """Return the sensors below a tree.

    Args:
        sysfs: tree to search; by default the device's own `/sys`, with `vcgencmd` from the search path.
        vcgencmd: path of a Raspberry Pi's tool.
    """
    if sysfs is None:
        sysfs, vcgencmd = Sysfs(), shutil.which("vcgencmd") if vcgencmd is None else vcgencmd
    families = (
        find_rails(sysfs),
        find_counters(sysfs),
        find_raspberry(sysfs, vcgencmd),
        find_battery(sysfs),
        find_zones(sysfs),
        find_clocks(sysfs),
    )
    probes = tuple(probe for family in families for probe in family.probes)
    return Sensors(families, probes, choose_source(probes))


def _first(numbers: Iterable[float]) -> float | None:
    return next(iter(numbers), None)
