"""`edgekit-device sensors`."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgekit_runtime.commands.command import Outcome, seconds
from edgekit_runtime.power.sensors.discovery import Sensors, discover
from edgekit_runtime.power.sensors.raspberry import BIT_NAMES
from edgekit_runtime.power.sensors.readings import Readings
from edgekit_runtime.power.sensors.sysfs import Sysfs

_UNITS = {
    "power_w": "W",
    "energy_j": "J",
    "temperature_c": "C",
    "charge": "of 1",
    "discharge_w": "W",
    "capacity_j": "J",
    "throttle_bits": "bits",
    "clock_share": "of 1",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "sensors",
        help="show the power and temperature sensors of this device",
        description="List the sensors of this device with their values, and why others are missing. Counters"
        " need two readings, so this takes a period.",
    )
    parser.add_argument("--watch", action="store_true", help="print a line each period until interrupted")
    parser.add_argument("--period", type=seconds, default=1.0, help="time between readings [%(default)s s]")
    parser.add_argument(
        "--sysfs", type=Path, help="where the kernel's tree is, if not at /sys (in a container: /host/sys)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object (with --watch: a line each)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Read the sensors twice. With `--watch`, read them repeatedly until interrupted."""
    sensors = discover() if arguments.sysfs is None else discover(Sysfs(arguments.sysfs))
    sensors.read(time.monotonic())
    time.sleep(arguments.period)
    readings = sensors.read(time.monotonic())
    if arguments.watch:
        _watch(sensors, readings, arguments.period, as_json=arguments.json)
    return Outcome(_document(sensors, readings), _lines(sensors, readings))


def _watch(sensors: Sensors, readings: Readings, period_s: float, *, as_json: bool) -> None:
    while True:
        line = {"at_s": round(readings.at_s, 3), **_describe(sensors, readings)}  # of the system's own clock
        print(json.dumps(line) if as_json else _summary(readings), flush=True)
        time.sleep(period_s)
        readings = sensors.read(time.monotonic())


def _describe(sensors: Sensors, readings: Readings) -> dict[str, Any]:
    battery = readings.battery
    return {
        "label": "measured",
        "power_w": readings.power_w,
        "power_of": None if sensors.source is None else sensors.source.scope,
        "is_whole_device": sensors.source is not None and sensors.source.is_whole,
        "temperature_c": readings.temperature_c,
        "battery_charge": None if battery is None else battery.charge,
        "battery_discharge_w": None if battery is None else battery.discharge_w,
        "throttled": _name_bits(readings.throttle_bits),
        "clock_share": readings.clock_share,
    }


def _document(sensors: Sensors, readings: Readings) -> dict[str, Any]:
    return {
        **_describe(sensors, readings),
        "sensors": [
            {
                "name": probe.name,
                "quantity": probe.quantity,
                "value": readings.values[probe.name],
                "fault": probe.fault,
            }
            for probe in sensors.probes
        ],
        "missing": {family.name: family.missing for family in sensors.families if family.missing},
    }


def _lines(sensors: Sensors, readings: Readings) -> Iterator[str]:
    for probe in sensors.probes:
        value, unit = readings.values[probe.name], _UNITS[probe.quantity]
        reading = f"no reading: {probe.fault}" if value is None else f"{value:.3f} {unit}"
        yield f"  {probe.name:32} {reading}"
    for family in sensors.families:
        if family.missing:
            yield f"  {family.name:32} {family.missing}"
    yield f"  {_summary(readings)}"
    if sensors.source is not None:
        yield f"  watts are those of {sensors.source.scope}: {', '.join(sensors.source.names)}"


def _summary(readings: Readings) -> str:
    parts = [
        _show("power", readings.power_w, "W"),
        _show("hottest zone", readings.temperature_c, "C"),
        _show("battery", None if readings.battery is None else readings.battery.charge * 100, "%"),
        _show("clock cap", None if readings.clock_share is None else readings.clock_share * 100, "%"),
    ]
    names = _name_bits(readings.throttle_bits)
    parts.append("throttling unknown" if names is None else ", ".join(names) or "not throttled")
    return "; ".join(parts)


def _show(quantity: str, value: float | None, unit: str) -> str:
    return f"{quantity} unknown" if value is None else f"{quantity} {value:.2f} {unit}"


def _name_bits(bits: int | None) -> list[str] | None:
    return None if bits is None else [name for bit, name in BIT_NAMES.items() if bits & bit]
