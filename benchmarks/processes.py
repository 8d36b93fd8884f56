"""What a process takes, read from /proc."""

import time
from pathlib import Path


def read_memory(pid: int) -> dict[str, int]:
    """Return the memory of a process in bytes by kind: Rss, Pss, Anonymous, Private_Dirty and others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}


def read_cpu_s(pid: int) -> float:
    """Return the processor time of a process, with that of threads that have ended."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it


def list_children(pid: int) -> list[int]:
    """Return the ids of the child processes, the oldest first."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return sorted(int(word) for text in texts for word in text.split())
