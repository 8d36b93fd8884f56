"""Waves of a rollout: how many devices get a release before it is judged, and in which order.

Waves are written as `1%,10%,50%,100%` or `5,50,100%`. The order is random but reproducible. The cohort is
fixed at the start of a rollout. Each device class is spread evenly over the order, so that the first devices
test every package of the release.
"""

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from typing import Final

from edgekit_runtime.errors import FleetError

DEFAULT_WAVES: Final = "1%,10%,50%,100%"
_MOST_MINIMUM: Final = 30
_MAX_WAVES: Final = 50
_WAVE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(%?)")


def plan_waves(text: str, devices: int, minimum: int) -> tuple[int, ...]:
    """Return the total number of devices with the release at the end of each wave, in ascending order.

    Args:
        text: Numbers or percentages of devices in ascending order, separated by commas. The last wave must
            include all devices.
        devices: The number of devices, at least 1.
        minimum: The minimum number of devices at the end of a wave. Waves that add no device are left out.

    Raises:
        FleetError: The text is malformed, or the last wave does not include all devices.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > _MAX_WAVES:
        raise FleetError(f"waves: {len(parts)} of them, at most {_MAX_WAVES} are allowed")
    sizes = [_read_size(part, text, devices) for part in parts]
    if sizes[-1] < devices:
        raise FleetError(
            f"waves {text!r}: the last one ends at {sizes[-1]} of {devices} devices; end with 100%"
        )
    for part, earlier, later in zip(parts[1:], sizes, sizes[1:], strict=False):
        if later < earlier:
            raise FleetError(f"waves {text!r}: '{part}' is less than the wave before it; each must be larger")
    waves: list[int] = []
    for size in sizes:
        end = min(max(math.ceil(size), minimum, 1), devices)
        if not waves or end > waves[-1]:
            waves.append(end)
    return tuple(waves)


def default_minimum(devices: int) -> int:
    """Return the default number of devices in the first step: a tenth, but at least 1 and at most 30."""
    return min(max(math.ceil(devices / 10), 1), _MOST_MINIMUM)


def freeze_cohort(rollout: str, classes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices in random order, seeded by the rollout's name, with each class spread evenly.

    Args:
        rollout: The name of the rollout.
        classes: A dict from device name to class.
    """
    of_class: dict[str, list[str]] = {}
    for device in sorted(classes, key=lambda device: _draw(rollout, device)):
        of_class.setdefault(classes[device], []).append(device)
    order = {
        device: ((rank + 0.5) / len(devices), _draw(rollout, device))
        for devices in of_class.values()
        for rank, device in enumerate(devices)
    }
    return tuple(sorted(order, key=lambda device: order[device]))


def join_cohort(rollout: str, cohort: tuple[str, ...], devices: Collection[str]) -> tuple[str, ...]:
    """Return a cohort with new devices appended in random order. Devices in the cohort are not repeated."""
    return (*cohort, *sorted(set(devices) - set(cohort), key=lambda device: _draw(rollout, device)))


def draw_delay(rollout: str, device: str, spread_s: float) -> float:
    """Return a random but reproducible delay before a device begins, 0 to `spread_s` seconds."""
    return round(int.from_bytes(_draw(rollout, device)[-4:], "big") / (1 << 32) * spread_s, 1)


def _read_size(part: str, text: str, devices: int) -> float:
    match = _WAVE.fullmatch(part)
    if match is None or float(match[1]) <= 0 or (match[2] and float(match[1]) > 100):
        raise FleetError(
            f"waves {text!r}: {part!r} is no wave; expected counts or shares as in {DEFAULT_WAVES}"
        )
    if not match[2] and "." in match[1]:
        raise FleetError(f"waves {text!r}: {part!r} is no whole number of devices; a share ends with %")
    # Rounded to millionths first: otherwise 1 % of 1,000 would be 11 devices, since 0.01 is no binary
    # fraction.
    return (
        round(float(match[1]) * 10_000) * devices / 1_000_000 if match[2] else min(float(match[1]), devices)
    )


def _draw(rollout: str, device: str) -> bytes:
    return hashlib.sha256(f"{rollout}\0{device}".encode()).digest()
