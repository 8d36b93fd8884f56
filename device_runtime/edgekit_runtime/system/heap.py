"""The heap of the C library. Apart from `own_process`: an idle agent does not import ctypes."""

import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8  # see malloc.h of glibc


def trim_memory() -> None:
    """Return free memory of the C library's heap to the system; do nothing without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def share_heap() -> None:
    """Let threads that start from now on share one heap, so that `trim_memory` finds more whole pages.

    glibc gives each thread a heap of its own, up to eight a core. Without glibc this does nothing.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)
