"""The names, versions and hashes of the packages for devices, from `requirements/device*.txt`."""

from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from edgekit_runtime.errors import ProvisioningError
from edgekit_runtime.system.engines import find_engine, list_registered

PINNED_ENGINES: Final = tuple(engine.name for engine in list_registered() if engine.installation.pinned_list)
"""The engines that a device installs with pip."""


def read_pinned(engine: str, machine: str, python: str) -> list[str]:
    """Return the packages of an engine as pip requirements with hashes.

    Environment markers are evaluated for the device, because pip would evaluate them for this machine.

    Args:
        engine: The engine of the device.
        machine: The architecture of the device, such as `aarch64`.
        python: The CPython version on the device, such as `3.11.2`.

    Raises:
        ProvisioningError: The package list of the engine is missing.
    """
    environment = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "sys_platform": "linux",
    }
    chosen = []
    for line in find_list(engine).read_text().replace("\\\n", " ").splitlines():
        words = line.split(" --hash=")
        if not words[0].strip() or words[0].startswith("#"):
            continue
        requirement = Requirement(words[0])
        if requirement.marker is None or requirement.marker.evaluate(environment):
            hashes = "".join(f" --hash={word.strip()}" for word in words[1:])
            chosen.append(f"{requirement.name}{requirement.specifier}{hashes}")
    return chosen


def find_list(engine: str) -> Path:
    """Return the path of an engine's package list in this installation or checkout.

    Raises:
        ProvisioningError: The list is missing, or no list pins the packages of this engine.
    """
    here, name = Path(__file__).parent, find_engine(engine).installation.pinned_list
    if not name:
        raise ProvisioningError(f"no list pins the packages of {find_engine(engine).title}")
    for folder in (here / "requirements", here.parents[1] / "requirements"):
        if (folder / name).is_file():
            return folder / name
    raise ProvisioningError(f"the list of packages {name} is missing; install edgekit again")
