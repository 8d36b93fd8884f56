"""Power rails measured by an INA3221, which every Jetson board and some add-on boards have.

There are two drivers. The kernel's driver (JetPack 5 and later) has its files below `class/hwmon`, or below
the I2C driver if a container hides that folder. NVIDIA's older driver `ina3221x` (JetPack 4) has them below
`iio:device*`.

Source: Documentation/hwmon/ina3221.rst of the kernel; rail names: NVIDIA Jetson Linux Developer Guide,
"Platform Power and Performance", tables of INA3221 channels.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from edgekit_runtime.power.sensors.family import Family
from edgekit_runtime.power.sensors.power_source import PowerSource
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.power.sensors.sysfs import Sysfs, read_label, read_number

# Rails at the board's input, which carry everything: Orin Nano/NX and Xavier NX, then Nano and TX.
_AT_INPUT: Final = frozenset({"VDD_IN", "POM_5V_IN"})
_CHANNELS: Final = (1, 2, 3)  # 4 to 7 are shunt voltages and their sum


def find_sensors(sysfs: Sysfs) -> Family:
    """Return a probe for each connected rail, which reads its power in watts."""
    rails = [*_hwmon_rails(sysfs), *_iio_rails(sysfs)]
    if not rails:
        return Family(name="ina3221", missing="no INA3221 (they are on Jetson boards)")
    names = tuple(rail.name for rail in rails)
    inputs = [name for name in names if name.removeprefix("ina3221/") in _AT_INPUT]
    sources = [
        PowerSource(scope="the whole board", names=(name,), counts=False, rank=0, is_whole=True)
        for name in inputs[:1]
    ]
    sources.append(PowerSource(scope="all rails of the board", names=names, counts=False, rank=1))
    return Family(name="ina3221", probes=tuple(rails), sources=tuple(sources))


def _hwmon_rails(sysfs: Sysfs) -> Iterator[Probe]:
    folders = [
        folder
        for folder in sysfs.find("class/hwmon/hwmon*")
        if read_label(folder / "name", "").startswith("ina3221")
    ] or list(sysfs.find("bus/i2c/drivers/ina3221/*/hwmon/hwmon*"))
    for folder in folders:
        for channel in _CHANNELS:
            if not (folder / f"curr{channel}_input").exists():
                continue
            label = read_label(folder / f"in{channel}_label", f"{folder.name}.{channel}")
            if label == "NC" or read_label(folder / f"in{channel}_enable", "1") == "0":
                continue  # not connected: it would read noise
            yield Probe(f"ina3221/{label}", "power_w", partial(_read_hwmon, folder, channel))


def _read_hwmon(folder: Path, channel: int, _now_s: float) -> float:
    millivolts = read_number(folder / f"in{channel}_input")
    milliamperes = read_number(folder / f"curr{channel}_input")
    return millivolts * milliamperes * 1e-6


def _iio_rails(sysfs: Sysfs) -> Iterator[Probe]:
    for name in sysfs.find("bus/i2c/drivers/ina3221x/*/iio:device*/rail_name_*"):
        folder, channel = name.parent, name.name.removeprefix("rail_name_")
        label = read_label(name, f"{folder.name}.{channel}")
        path = folder / f"in_power{channel}_input"
        if label != "NC" and path.exists():
            yield Probe(f"ina3221/{label}", "power_w", partial(_read_iio, path))


def _read_iio(path: Path, _now_s: float) -> float:
    return read_number(path) * 1e-3
