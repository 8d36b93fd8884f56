"""Functions for the current process: standard descriptors, core dumps, free memory and exit."""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Final, NoReturn

_M_ARENA_MAX: Final = -8  # see malloc.h of glibc


def open_standard_descriptors() -> None:
    """Open `/dev/null` for each standard descriptor that is closed.

    Otherwise, a new file or socket would get the descriptor, and engines would print into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # noqa: PERF203  # each is a try of its own
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(descriptor, True)


def end_now(exit_code: int) -> NoReturn:
    """End this process immediately, even if its threads run an engine.

    A normal exit would wait for the engine, or could abort when the engine returns.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forbid_dumps() -> None:
    """Prevent crashes of this process and its future children from writing memory to the disk.

    Core files are limited to 1 byte. Linux ignores a limit of 0 if it pipes core files to a program.
    If it ignores 1 too, the core dump filter leaves all memory out of the core file.

    Source: core(5).
    """
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 1 if hard == resource.RLIM_INFINITY else min(hard, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")


def trim_memory() -> None:
    """Return free heap memory of the C library to the system. Without glibc, this does nothing."""
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def share_heap() -> None:
    """Make all new threads share one heap, so that `trim_memory` can return more memory.

    By default, glibc uses up to eight heaps for each core. Without glibc, this does nothing.
    """
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)
