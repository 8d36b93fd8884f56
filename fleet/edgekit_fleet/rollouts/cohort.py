"""The order in which the devices of a rollout get it: random, but the same whenever it is worked out again.

A cohort is frozen at the start. Each class is spread evenly over the order, so that the first devices show
every package of the release.
"""

import hashlib
from collections.abc import Collection, Mapping


def freeze_cohort(rollout: str, classes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices in the order of the rollout.

    Args:
        rollout: its name; another one has another order.
        classes: device -> its class.
    """
    of_class: dict[str, list[str]] = {}
    for device in sorted(classes, key=lambda device: _draw(rollout, device)):
        of_class.setdefault(classes[device], []).append(device)
    places = {
        device: ((rank + 0.5) / len(devices), _draw(rollout, device))
        for devices in of_class.values()
        for rank, device in enumerate(devices)
    }
    return tuple(sorted(places, key=lambda device: places[device]))


def join_cohort(rollout: str, cohort: tuple[str, ...], devices: Collection[str]) -> tuple[str, ...]:
    """Return the cohort with devices that joined later, at its end.

    Args:
        rollout: as for `freeze_cohort`.
        cohort: so far.
        devices: that shall be in it, also those that are already.
    """
    return (*cohort, *sorted(set(devices) - set(cohort), key=lambda device: _draw(rollout, device)))


def _draw(rollout: str, device: str) -> bytes:
    return hashlib.sha256(f"{rollout}\0{device}".encode()).digest()
