"""The log of all writes and flushes of a block device, in their order.

This reads the format of the kernel's dm-log-writes, which qemu's driver blklogwrites writes too.

Source: linux/drivers/md/dm-log-writes.c (`struct log_write_super`, `struct log_write_entry`).
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from edgekit_runtime.errors import DataError

Buffer: TypeAlias = bytes | mmap.mmap

_MAGIC: Final = 0x6A736677736872
_HEAD: Final = struct.Struct("<QQQI")
_ENTRY: Final = struct.Struct("<QQQQ")
_FLUSH: Final = 1
_FUA: Final = 2
_DISCARD: Final = 4


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One write or flush.

    Attributes:
        offset_bytes: offset on the device.
        data: written data; empty for a flush.
        is_flush: whether this makes all earlier writes durable.
        is_durable: whether this write is durable at once (FUA).
    """

    offset_bytes: int
    data: memoryview
    is_flush: bool
    is_durable: bool


def count_entries(log: Buffer) -> int:
    """Return how many entries a log has so far; its first bytes are enough.

    Raises:
        DataError: it is no such log.
    """
    return _read_head(log)[0]


def trim_log(log: Buffer) -> bytes:
    """Return a log cut off after its last entry.

    Raises:
        DataError: see `read_log`.
    """
    end = _read_head(log)[1]
    for _, _, data_at, size in _walk(log):
        end = data_at + size
    return bytes(log[:end])


def read_log(log: bytes) -> list[LogEntry]:
    """Return the entries of a log.

    Raises:
        DataError: it is no such log, is cut off, or holds a discard, which a replay cannot undo.
    """
    view = memoryview(log)
    return [
        LogEntry(offset, view[at : at + size], bool(flags & _FLUSH), bool(flags & _FUA))
        for offset, flags, at, size in _walk(log)
    ]


def _walk(log: Buffer) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each entry its offset on the device, its flags, the position of its data, and their size."""
    count, sector_bytes = _read_head(log)
    at = sector_bytes
    for number in range(count):
        if at + _ENTRY.size > len(log):
            raise DataError(f"write log: ends before entry {number} of {count}")
        sector, sectors, flags, _ = _ENTRY.unpack_from(log, at)
        if flags & _DISCARD:
            raise DataError(f"write log: entry {number} is a discard; mount the file system without discard")
        at += sector_bytes
        size = sectors * sector_bytes
        if at + size > len(log):
            raise DataError(f"write log: ends in entry {number} of {count}")
        yield sector * sector_bytes, flags, at, size
        at += size


def _read_head(log: Buffer) -> tuple[int, int]:
    """Return how many entries a log has, and the size of a sector."""
    if len(log) < _HEAD.size or (head := _HEAD.unpack_from(log))[0] != _MAGIC:
        raise DataError("write log: does not begin with the number of a dm-log-writes log")
    return head[2], head[3]
