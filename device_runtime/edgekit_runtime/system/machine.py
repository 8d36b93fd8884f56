"""Memory of this machine."""

import os
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the available memory in bytes, limited by the control group, or 2^62 if it is unknown."""
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


def machine_bytes() -> int:
    """Return the memory of the machine in bytes, or the limit of the control group if that is lower."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return total_bytes if limit == "max" else min(total_bytes, int(limit))
    except (OSError, ValueError):  # no such limit here
        return total_bytes
