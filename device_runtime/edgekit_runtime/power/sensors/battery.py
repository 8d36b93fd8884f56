"""The battery of the device, read through the kernel's power_supply class. Ignores batteries of peripherals.

Source: Documentation/ABI/testing/sysfs-class-power of the kernel (micro-units; fields are optional).
"""

from functools import partial
from pathlib import Path
from typing import Final

from edgekit_runtime.power.sensors.family import Family
from edgekit_runtime.power.sensors.power_source import PowerSource
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.power.sensors.sysfs import Sysfs, read_label, read_number

_J_PER_UWH: Final = 3.6e-3
_PICO: Final = 1e-12  # microamperes times microvolts are picowatts


def find_sensors(sysfs: Sysfs) -> Family:
    """Return probes for the charge, the discharge and the capacity of the first battery, if available."""
    for folder in sysfs.find("class/power_supply/*"):
        is_battery = read_label(folder / "type", "") == "Battery"
        if is_battery and read_label(folder / "scope", "System") != "Device":
            return _describe(folder)
    return Family(name="battery", missing="no battery that the kernel knows of")


def read_battery() -> tuple[float | None, bool]:
    """Return the battery's charge, 0 to 1 or None if unknown, and whether it is charging.

    Every known state except `Discharging` counts as charging.
    """
    sysfs = Sysfs()
    charges = [probe for probe in find_sensors(sysfs).probes if probe.quantity == "charge"]
    if not charges:
        return None, False
    folder = sysfs.root / "class/power_supply" / charges[0].name.split("/")[1]
    return charges[0].read(0.0), read_label(folder / "status", "") not in ("Discharging", "")


def _describe(folder: Path) -> Family:
    name = f"battery/{folder.name}"
    probes = [Probe(f"{name}/charge", "charge", partial(_read_charge, folder))]
    sources: tuple[PowerSource, ...] = ()
    if _exist(folder, "power_now") or _exist(folder, "current_now", "voltage_now"):
        probes.append(Probe(f"{name}/discharge", "discharge_w", partial(_read_discharge, folder)))
        scope = "the device, while on battery"
        sources = (PowerSource(scope=scope, names=(probes[-1].name,), counts=False, rank=5, is_whole=True),)
    if _exist(folder, "energy_full") or _exist(folder, "charge_full", "voltage_now"):
        probes.append(Probe(f"{name}/capacity", "capacity_j", partial(_read_capacity, folder)))
        return Family(name="battery", probes=tuple(probes), sources=sources)
    missing = "the battery does not report its capacity: a floor can be kept, but not until a given time"
    return Family(name="battery", probes=tuple(probes), missing=missing, sources=sources)


def _exist(folder: Path, *attributes: str) -> bool:
    return all((folder / attribute).exists() for attribute in attributes)


def _read_charge(folder: Path, _now_s: float) -> float:
    if _exist(folder, "energy_now", "energy_full"):  # finer than whole percents
        return read_number(folder / "energy_now") / max(1, read_number(folder / "energy_full"))
    if _exist(folder, "charge_now", "charge_full"):
        return read_number(folder / "charge_now") / max(1, read_number(folder / "charge_full"))
    return read_number(folder / "capacity") / 100


def _read_discharge(folder: Path, _now_s: float) -> float:
    if _exist(folder, "power_now"):
        watts = abs(read_number(folder / "power_now")) * 1e-6
    else:
        current_ua, voltage_uv = read_number(folder / "current_now"), read_number(folder / "voltage_now")
        watts = abs(current_ua) * voltage_uv * _PICO
    # Drivers do not agree on the sign of the current; the status shows its direction.
    return -watts if read_label(folder / "status", "") == "Charging" else watts


def _read_capacity(folder: Path, _now_s: float) -> float:
    if _exist(folder, "energy_full"):
        return read_number(folder / "energy_full") * _J_PER_UWH
    amperehours_u, voltage_uv = read_number(folder / "charge_full"), read_number(folder / "voltage_now")
    return amperehours_u * 1e-6 * 3600 * voltage_uv * 1e-6
