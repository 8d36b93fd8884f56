"""Facts about this machine. Run as a program, this module prints them as JSON."""

import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from edgekit_runtime import __version__
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.engines import find_version, list_registered
from edgekit_runtime.system.processor_speed import find_cpu

_CLOCK: Final = {
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "at most kHz": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq",
    "nvpmodel": "/var/lib/nvpmodel/status",  # of a Jetson
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Facts that a device reports about itself.

    Attributes:
        model: model of the board, or the name of the processor if the board states none.
        architecture: output of `uname -m`.
        runtime: version of edgekit.
        os, kernel: operating system and kernel, each with its release.
        python: version of the Python that runs edgekit.
        engines: a dict from each installed distribution of an engine to its version.
        free_bytes: free space on the disk of the current working directory.
        clock: governor and highest clock of the first processor, and the power mode of a Jetson. It contains
            only what the device reports, and may be empty.
    """

    model: str
    architecture: str
    os: str
    kernel: str
    python: str
    runtime: str
    engines: Mapping[str, str]
    memory_bytes: int
    free_bytes: int
    clock: str = ""

    def has_engine(self, named: str) -> bool:
        """Return whether an engine, or the `-gpu` variant of its package, is installed.

        `named` is the name and version of the engine, such as `onnxruntime 1.24.4`.
        """
        return named in {f"{name.removesuffix('-gpu')} {release}" for name, release in self.engines.items()}


def read_device_facts() -> DeviceFacts:
    """Return the facts about this machine."""
    names = [name for engine in list_registered() for name in engine.installation.distributions]
    clock = {name: " ".join(_read(path).split()) for name, path in _CLOCK.items()}
    return DeviceFacts(
        model=find_cpu(),
        architecture=platform.machine(),
        os=_find_os(),
        kernel=platform.release(),
        python=platform.python_version(),
        runtime=__version__,
        engines={name: version for name in names if (version := find_version([name]))},
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_bytes=shutil.disk_usage(".").free,
        clock=", ".join(f"{name} {text}" for name, text in clock.items() if text),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _find_os() -> str:
    lines = [line for line in _read("/etc/os-release").splitlines() if line.startswith("PRETTY_NAME=")]
    return lines[0].partition("=")[2].strip('"') if lines else platform.system()


if __name__ == "__main__":
    print(json.dumps(to_plain(read_device_facts())))
