"""Restores the disk of a recording at any instant of a power failure, mounted as after a start."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.hil.power_cuts.cuts import Cut, find_flushes, pick_writes
from tests.hil.power_cuts.mounts import LoopDevice, mount, unmount
from tests.hil.power_cuts.recording import MOUNT_OPTIONS, Recording

from edgekit_runtime.errors import OutputError
from edgekit_runtime.system.child_process import run_program

_REPAIR_LIMIT_S: Final = 30.0
_REPAIRED: Final = (0, 1, 2)  # exit codes of e2fsck


class Replay:
    """Replays cuts of one recording, in the order of time.

    Attributes:
        mended: how many file systems needed a repair first, as a device does at its start.
    """

    def __init__(self, recording: Recording, folder: Path) -> None:
        """Prepare the disk.

        Args:
            recording: the recording.
            folder: folder in memory, only for this replay.
        """
        self._entries = recording.entries
        self._flushes = find_flushes(self._entries)
        self._applied = 0
        self._durable = _SparseDisk(folder / "durable", recording.size_bytes)
        self._disk = _SparseDisk(folder / "disk", recording.size_bytes)
        self._device = LoopDevice(self._disk.path)
        self._root = folder / "root"
        self._root.mkdir()
        self.mended = 0

    @contextlib.contextmanager
    def mounted(self, cut: Cut) -> Iterator[Path]:
        """Yield the root of the file system after a cut, which must not be before the last one.

        Raises:
            OutputError: it cannot be mounted, not even after a repair.
        """
        durable, kept = pick_writes(self._entries, self._flushes, cut)
        if durable < self._applied:
            raise ValueError(f"{cut} is before the last one")
        for entry in self._entries[self._applied : durable]:
            for disk in (self._durable, self._disk):
                disk.write(entry.offset_bytes, entry.data)
        self._applied = durable
        self._disk.restore(self._durable)
        for number, size in kept:
            self._disk.write(self._entries[number].offset_bytes, self._entries[number].data[:size])
        self._mount()
        try:
            yield self._root
        finally:
            unmount(self._root)
            self._device.forget()

    def _mount(self) -> None:
        try:
            mount(self._device.path, self._root, MOUNT_OPTIONS)
        except OutputError as cause:  # such as a half-written superblock
            self._device.forget()
            result = run_program(["e2fsck", "-y", str(self._device.path)], (), _REPAIR_LIMIT_S, 1 << 12)
            self._device.forget()
            if result.exit_code not in _REPAIRED:
                printed = " ".join(result.output.decode(errors="replace").split())
                raise OutputError(f"{cause}; e2fsck ended with {result.exit_code}: {printed}") from cause
            mount(self._device.path, self._root, MOUNT_OPTIONS)
            self.mended += 1

    def close(self) -> None:
        """Release the device."""
        self._device.close()


class _SparseDisk:
    """A file of a disk's size; only written parts take memory."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, size_bytes)
        self._content = mmap.mmap(self._descriptor, size_bytes)

    def write(self, offset: int, data: memoryview) -> None:
        self._content[offset : offset + len(data)] = data

    def restore(self, other: "_SparseDisk") -> None:
        """Make this disk equal to another one, whose writes have all been made here."""
        end, size = 0, len(self._content)
        while end < size:
            try:
                begin = os.lseek(self._descriptor, end, os.SEEK_DATA)
            except OSError:  # only a hole is left
                return
            end = os.lseek(self._descriptor, begin, os.SEEK_HOLE)
            self._content[begin:end] = other._content[begin:end]
