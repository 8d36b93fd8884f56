"""Settings that reduce the memory of onnxruntime sessions without adding latency.

By default, the C library keeps memory that was freed during loading, and memory patterns allocate the
activations twice. docs/explanation/memory.md has measurements.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_M_TRIM_THRESHOLD: Final = -1  # mallopt's names, see malloc.h of glibc
_M_MMAP_THRESHOLD: Final = -3
_LOADING_THRESHOLD_BYTES: Final = 64 * 1024
# The values that glibc itself reaches in a process that has freed large blocks. They keep runs fast.
_RUNNING_THRESHOLD_BYTES: Final = 32 * 1024 * 1024
_OTHERS_S: Final = 10.0  # wait for a session under creation: longer than most take
_loading = threading.Lock()


@contextmanager
def lean_loading() -> Iterator[None]:
    """Return freed memory to the system while the `with` block creates a session.

    This changes settings of the whole process, so only one thread can use it at a time. Other threads wait
    for up to ten seconds and then continue. Without glibc, this does nothing.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    if not _loading.acquire(timeout=_OTHERS_S):
        yield  # with the thresholds of the hanging body
        return
    try:
        library.mallopt(_M_MMAP_THRESHOLD, _LOADING_THRESHOLD_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LOADING_THRESHOLD_BYTES)
        yield
    finally:
        library.malloc_trim(0)
        library.mallopt(_M_MMAP_THRESHOLD, _RUNNING_THRESHOLD_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _RUNNING_THRESHOLD_BYTES)
        _loading.release()
