"""Reads a mapped file without keeping its pages in the memory of this process."""

import mmap
from collections.abc import Iterator
from typing import Final

_PART_BYTES: Final = 1 << 20  # small enough to stay in the cache while it is used


def parts(content: bytes | memoryview) -> Iterator[memoryview]:
    """Yield `content` in parts of 1 MiB, as views.

    If `content` is a mapped file, its pages are released after each part and mapped again when read.
    """
    view = memoryview(content)
    mapping = view.obj if isinstance(view.obj, mmap.mmap) else None
    for start in range(0, len(view), _PART_BYTES):
        yield view[start : start + _PART_BYTES]
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)
