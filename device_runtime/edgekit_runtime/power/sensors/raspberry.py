"""The throttling bits of a Raspberry Pi, and the power measured by the power chip of the Pi 5.

The bits are read from sysfs if the kernel provides them, else from `vcgencmd`. The power is read only from
`vcgencmd`. This module was not tested on a Pi. The formats come from the documentation and from outputs that
users posted.

Source: raspberrypi.com/documentation/computers/os.html, `get_throttled` and `pmic_read_adc`; the kernel's
drivers/firmware/raspberrypi.c (`get_throttled` in hexadecimal).
"""

import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from edgekit_runtime.power.sensors.family import Family
from edgekit_runtime.power.sensors.power_source import PowerSource
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.power.sensors.sysfs import Sysfs, read_text
from edgekit_runtime.records import dataclass

UNDER_VOLTAGE: Final = 1 << 0
CLOCK_CAPPED: Final = 1 << 1
THROTTLED: Final = 1 << 2
SOFT_TEMPERATURE_LIMIT: Final = 1 << 3
NOW: Final = (
    UNDER_VOLTAGE | CLOCK_CAPPED | THROTTLED | SOFT_TEMPERATURE_LIMIT
)  # 16 to 19: the same, since boot
BIT_NAMES: Final = {
    UNDER_VOLTAGE: "under-voltage",
    CLOCK_CAPPED: "clock capped",
    THROTTLED: "throttled",
    SOFT_TEMPERATURE_LIMIT: "soft temperature limit",
}

_PATTERNS: Final = (
    "devices/platform/soc/soc:firmware/get_throttled",
    "devices/platform/soc*/*firmware*/get_throttled",
)
_ASK_EVERY_S: Final = 5.0
_TIMEOUT_S: Final = 2.0
_ADC: Final = re.compile(r"^\s*(\S+)_([AV]) \w+\(\d+\)=([0-9.]+)[AV]\s*$", re.MULTILINE | re.ASCII)


@dataclass(slots=True)
class Vcgencmd:
    """Runs `vcgencmd` and caches its output for 5 s.

    Attributes:
        words: The argument of the command, such as `get_throttled`.
    """

    program: str
    words: str
    answer: str = ""
    until_s: float = float("-inf")

    def ask(self, now_s: float) -> str:
        """Return the output of `vcgencmd`, at most 5 s old.

        Raises:
            OSError: The command could not be started, failed or took too long, now or in the last 5 s.
        """
        if now_s >= self.until_s:
            self.until_s = now_s + _ASK_EVERY_S
            self.answer = ""
            try:
                done = subprocess.run(
                    [self.program, self.words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
                )
            except subprocess.SubprocessError as cause:
                raise OSError(f"{self.program} {self.words}: {cause}") from cause
            self.answer = done.stdout[:4096]
        if not self.answer:
            raise OSError(f"{self.program} {self.words}: no answer")
        return self.answer


def find_sensors(sysfs: Sysfs) -> Family:
    """Return a probe for the throttling bits and, on a Pi 5, a probe for the watts. Runs `vcgencmd`."""
    vcgencmd = sysfs.vcgencmd
    path = next((path for pattern in _PATTERNS for path in sysfs.find(pattern)), None)
    probes: list[Probe] = []
    if path is not None:
        probes.append(Probe("raspberry/throttled", "throttle_bits", partial(_read_bits, path)))
    elif vcgencmd is not None:
        from_command = _asked(Vcgencmd(vcgencmd, "get_throttled"), parse_bits)
        probes.append(Probe("raspberry/throttled", "throttle_bits", from_command))
    if vcgencmd is not None:
        power = Vcgencmd(vcgencmd, "pmic_read_adc")
        try:
            parse_pmic(power.ask(0.0))
            power.until_s = float("-inf")
            probes.append(Probe("raspberry/pmic", "power_w", _asked(power, parse_pmic)))
        except (OSError, ValueError):
            missing = "no power chip that measures (the Pi 5 has one)"
            return Family(name="raspberry", probes=tuple(probes), missing=missing)
        chip = PowerSource(
            scope="the rails of the power chip", names=("raspberry/pmic",), counts=False, rank=4
        )
        return Family(name="raspberry", probes=tuple(probes), sources=(chip,))
    missing = "no power of a Pi 5 without vcgencmd" if probes else "no Raspberry Pi firmware, no vcgencmd"
    return Family(name="raspberry", probes=tuple(probes), missing=missing)


def _asked(question: Vcgencmd, parse: Callable[[str], float]) -> Callable[[float], float]:
    return lambda now_s: parse(question.ask(now_s))


def _read_bits(path: Path, _now_s: float) -> float:
    return parse_bits(read_text(path))


def parse_bits(text: str) -> float:
    """Return the hexadecimal number in `50005`, `0x50005` or `throttled=0x50005`.

    Raises:
        ValueError: The text is not a hexadecimal number of up to 32 bits.
    """
    digits = text.strip().removeprefix("throttled=").removeprefix("0x")
    if not re.fullmatch("[0-9a-fA-F]{1,8}", digits):
        raise ValueError(f"throttling bits {text[:40]!r}, expected a hexadecimal number")
    return float(int(digits, 16))


def parse_pmic(text: str) -> float:
    """Return the total watts of the rails for which `pmic_read_adc` prints volts and amperes.

    USB devices and the losses of the power chip are not included.

    Raises:
        ValueError: No rail has volts and amperes.
    """
    values: dict[str, dict[str, float]] = {}
    for rail, unit, number in _ADC.findall(text):
        values.setdefault(rail, {})[unit] = float(number)
    watts = [value["A"] * value["V"] for value in values.values() if len(value) == 2]
    if not watts:
        raise ValueError("pmic_read_adc gave no rail with volts and amperes")
    return sum(watts)
