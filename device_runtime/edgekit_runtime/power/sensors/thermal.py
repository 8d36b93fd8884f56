"""Temperatures of the kernel's thermal zones.

Source: Documentation/driver-api/thermal/sysfs-api.rst of the kernel (millidegrees Celsius).
"""

from functools import partial
from pathlib import Path
from typing import Final

from edgekit_runtime.power.sensors.family import Family
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.power.sensors.sysfs import Sysfs, read_label, read_number

# No model computes there: radios, batteries, chargers; and the zone of old Jetsons that always shows 100 C.
_ELSEWHERE: Final = ("wifi", "iwl", "bat", "charger", "pmic", "skin", "modem", "nvme", "fan")


def find_sensors(sysfs: Sysfs) -> Family:
    """Return a probe in degrees Celsius for each thermal zone.

    Zones where no model runs, such as the battery, are included only if there are no others.
    """
    zones = {
        zone: read_label(zone / "type", zone.name)
        for zone in sysfs.find("class/thermal/thermal_zone*")
        if (zone / "temp").exists()
    }
    near = {
        zone: label for zone, label in zones.items() if not any(word in label.lower() for word in _ELSEWHERE)
    }
    labels = list((near or zones).values())
    probes = tuple(
        Probe(_name(zone, label, labels), "temperature_c", partial(_read, zone / "temp"))
        for zone, label in (near or zones).items()
    )
    missing = "" if probes else "no thermal zones (virtual machines have none)"
    return Family(name="thermal", probes=probes, missing=missing)


def _name(zone: Path, label: str, labels: list[str]) -> str:
    alone = labels.count(label) == 1
    return f"thermal/{label}" if alone else f"thermal/{label}@{zone.name.removeprefix('thermal_zone')}"


def _read(path: Path, _now_s: float) -> float:
    return read_number(path) * 1e-3
