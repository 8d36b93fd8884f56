"""What a process takes, read from /proc, and work in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgekit_runtime.errors import EdgekitError


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


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep `count` processors busy during the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_apart(work: Callable[[], str]) -> str:
    """Return what `work` returns in a process of its own, or how it failed: an engine may end the process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = work()
        except EdgekitError as error:
            text = f"refused: {error}"
        except Exception as error:  # a traceback is a fault, and is counted as one
            text = f"TRACEBACK: {type(error).__name__}: {error}"
        os.write(write_end, text.encode()[:4000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        text = stream.read().decode()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"DIED: {died}" if code else text
