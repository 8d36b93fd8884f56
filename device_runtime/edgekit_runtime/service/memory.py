"""How much memory is free for another model, and about how much one needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.service.versions import Installed

_PER_PACKAGE_BYTE: Final = 3  # weights, their packed copy, activations; see docs/memory.md
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def needed_bytes(packages: Sequence[Installed]) -> int:
    """Return about how much memory the sessions of `packages` take; 0 for those that cannot be read."""
    return package_bytes([package.path for package in packages])


def package_bytes(paths: Sequence[Path]) -> int:
    """Return about how much memory the sessions of the packages at `paths` take."""
    return sum(map(_size_bytes, paths)) * _PER_PACKAGE_BYTE


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return what can still be used: of the machine, or of this process's limit if that is less."""
    free_bytes = 1 << 62
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free_bytes = int(line.split()[1]) * 1024
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            used_bytes = int((cgroup / "memory.current").read_text())
            free_bytes = min(free_bytes, max(0, int(limit) - used_bytes))
    except (OSError, ValueError, IndexError):  # no such limit here
        pass
    return free_bytes


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
