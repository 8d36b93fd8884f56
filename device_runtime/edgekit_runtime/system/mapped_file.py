"""Reading a mapped file without keeping its pages, since each one that was read is memory of this process."""

import mmap
from collections.abc import Iterator
from typing import Final

_PART_BYTES: Final = 1 << 20  # stays in the cache for what is done with it


def parts(content: bytes | memoryview) -> Iterator[memoryview]:
    """Yield all of `content`, a part at a time.

    Args:
        content: where it is a view of a mapped file, the pages of that file are given back after each part;
            reading them again maps them again.
    """
    view = memoryview(content)
    mapping = view.obj if isinstance(view.obj, mmap.mmap) else None
    for start in range(0, len(view), _PART_BYTES):
        yield view[start : start + _PART_BYTES]
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)
