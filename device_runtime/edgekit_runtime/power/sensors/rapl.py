"""Energy counters of x86 processors (RAPL), read through the kernel's powercap tree.

The counters cover the processor and, if available, the memory. They cover disks, screens and power supplies
only if the board has the domain `psys`.

Source: Documentation/power/powercap/powercap.rst of the kernel.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgekit_runtime.power.sensors.family import Family
from edgekit_runtime.power.sensors.power_source import PowerSource
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.power.sensors.sysfs import Sysfs, read_label, read_number
from edgekit_runtime.records import dataclass

# core and uncore are parts of a package: adding them would count twice.
_COUNTED: Final = ("psys", "package", "dram")
_READ_PROTECTED: Final = (
    "the counters are there, but only root may read them (the kernel protects them since CVE-2020-8694):"
    " let an administrator give the service's group read access to energy_uj, or run as root"
)


@dataclass(slots=True)
class EnergyCounter:
    """Computes energy from a counter of microjoules that returns to 0 after `range_uj`.

    Between two readings, the counter must increase by less than `range_uj`.
    """

    range_uj: int
    last_uj: int | None = None
    total_uj: int = 0

    def add(self, counted_uj: int) -> float:
        """Record a reading of the counter, and return the energy since the first reading in joules.

        Raises:
            ValueError: `counted_uj` is negative or larger than the range.
        """
        if not 0 <= counted_uj <= self.range_uj:
            raise ValueError(f"{counted_uj} uJ, expected 0 to {self.range_uj}")
        if self.last_uj is not None:
            self.total_uj += (counted_uj - self.last_uj) % self.range_uj
        self.last_uj = counted_uj
        return self.total_uj * 1e-6


def find_sensors(sysfs: Sysfs) -> Family:
    """Return a probe in joules for each domain (`psys`, packages, memory), and the power sources."""
    zones = [
        *sysfs.find("class/powercap/intel-rapl:*"),
        *sysfs.find("class/powercap/intel-rapl:*/intel-rapl:*"),
    ]
    named = {zone.name: (zone, read_label(zone / "name", "")) for zone in zones}
    counted = [(zone, label) for zone, label in named.values() if label.startswith(_COUNTED)]
    if not counted:
        missing = "no RAPL counters (x86 processors have them; virtual machines hide them)"
        return Family(name="rapl", missing=missing)
    try:
        probes = tuple(_probes(counted))
    except PermissionError:
        return Family(name="rapl", missing=_READ_PROTECTED)
    except (OSError, ValueError) as cause:
        return Family(name="rapl", missing=f"the counters cannot be read: {cause}")
    names = tuple(probe.name for probe in probes)
    sources = [
        PowerSource(scope="the platform", names=(name,), counts=True, rank=2, is_whole=True)
        for name in names
        if name.startswith("rapl/psys")
    ]
    sources.append(PowerSource(scope="processor and memory", names=names, counts=True, rank=3))
    return Family(name="rapl", probes=probes, sources=tuple(sources))


def _probes(zones: list[tuple[Path, str]]) -> Iterator[Probe]:
    for zone, label in zones:
        path = zone / "energy_uj"
        read_number(path)  # now, so that a missing permission is reported once, as itself
        counter = EnergyCounter(read_number(zone / "max_energy_range_uj"))
        if counter.range_uj <= 0:
            raise ValueError(f"{zone}/max_energy_range_uj is {counter.range_uj}, expected more than 0")

        def read(_now_s: float, path: Path = path, counter: EnergyCounter = counter) -> float:
            return counter.add(read_number(path))

        # The folder's number distinguishes two memories or two sockets of one name.
        yield Probe(f"rapl/{label}@{zone.name.partition(':')[2]}", "energy_j", read)
