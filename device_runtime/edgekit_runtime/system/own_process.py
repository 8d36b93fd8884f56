"""The process of a command: its standard descriptors, its free memory, its end at any time.

An idle agent imports this module, but no ctypes.
"""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Final, NoReturn

_M_ARENA_MAX: Final = -8  # see malloc.h of glibc


def open_standard_descriptors() -> None:
    """Open `/dev/null` for each standard descriptor that this process was started without.

    Otherwise the next file or socket gets that number: engines print into it, and children cannot inherit it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # noqa: PERF203  # each is a try of its own
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(descriptor, True)


def end_now(exit_code: int) -> NoReturn:
    """End this process at once, even while its threads run in an engine.

    A normal exit waits for such threads, or leaves them running and may abort when the engine returns.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forbid_dumps() -> None:
    """Let no crash of this process, or of children that it starts from now on, write memory to the disk.

    Core files are limited to 1 byte, since a kernel that pipes cores to a program ignores a limit of 0. Where
    it ignores 1, too, the core dump filter leaves all memory out of the core.

    Source: core(5).
    """
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 1 if hard == resource.RLIM_INFINITY else min(hard, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")


def trim_memory() -> None:
    """Return free memory of the C library's heap to the system; do nothing without glibc."""
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def share_heap() -> None:
    """Let threads that start from now on share one heap, so that `trim_memory` finds more whole pages.

    glibc gives each thread a heap of its own, up to eight a core. Without glibc this does nothing.
    """
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)
