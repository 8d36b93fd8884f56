"""Reads a mapped file without keeping its pages, which count as memory of this process."""

import mmap
from collections.abc import Iterator
from typing import Final

_PART_BYTES: Final = 1 << 20  # small enough to stay in the cache while it is used


def parts(content: bytes | memoryview) -> Iterator[memoryview]:
    """Yield all of `content` in parts of 1 MiB, as views.

    If it is a view of a mapped file, the file's pages are released after each part; reading maps them again.
    """
    view = memoryview(content)
    mapping = view.obj if isinstance(view.obj, mmap.mmap) else None
    for start in range(0, len(view), _PART_BYTES):
        yield view[start : start + _PART_BYTES]
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)
