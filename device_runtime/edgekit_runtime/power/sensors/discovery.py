"""Finds the sensors of this device, and reads them all at once.

Each module of this folder that has a function `find_sensors` finds one family of sensors. Reading takes up to
some milliseconds, so `sampling` does it on a separate thread.
"""

import shutil
from collections.abc import Iterable

from edgekit_runtime.power import sensors
from edgekit_runtime.power.sensors.family import Family
from edgekit_runtime.power.sensors.power_source import Interval, PowerSource
from edgekit_runtime.power.sensors.probe import Probe, Quantity
from edgekit_runtime.power.sensors.readings import Battery, Readings
from edgekit_runtime.power.sensors.sysfs import Sysfs
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.folder_modules import import_modules


@dataclass(slots=True)
class Sensors:
    """The sensors of power, heat and battery of a device.

    Attributes:
        families: All kinds of sensors that were searched for, including those that were not found.
        source: The source of power and energy, or None if there is none.
    """

    families: tuple[Family, ...]
    probes: tuple[Probe, ...]
    source: PowerSource | None

    def read(self, now_s: float) -> Readings:
        """Read all sensors. A sensor that fails gives None. Raises no errors.

        `now_s` is the time of a monotonic clock. It must not decrease between calls.
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


def discover(sysfs: Sysfs | None = None) -> Sensors:
    """Return the sensors of `sysfs`. The default is `/sys`, with `vcgencmd` if it is installed."""
    if sysfs is None:
        sysfs = Sysfs(vcgencmd=shutil.which("vcgencmd"))
    finders = [getattr(module, "find_sensors", None) for module in import_modules(sensors)]
    families: list[Family] = [find(sysfs) for find in finders if find is not None]
    sources = [source for family in families for source in family.sources]
    return Sensors(
        tuple(families),
        tuple(probe for family in families for probe in family.probes),
        min(sources, key=lambda source: source.rank, default=None),
    )


def _first(numbers: Iterable[float]) -> float | None:
    return next(iter(numbers), None)
