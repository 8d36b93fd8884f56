"""Disks that fail, kill or record at a step; a step is one call of the system that changes the disk."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from edgekit_runtime.system.atomic_files import Disk

PIECE_BYTES = 2048  # a package is written in several steps

AtStep: TypeAlias = Callable[[int, str], None]
"""Takes the number of a step, from 0, and the name of its call, before it happens."""


class SteppedFile(io.FileIO):
    """A file of which each write is a step, and half of a write is one too.

    Attributes:
        path: at which it was created.
    """

    def __init__(self, disk: "SteppedDisk", path: Path, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._disk = disk
        self.path = path

    def write(self, data: object) -> int:
        content = bytes(cast("bytes", data))
        half = len(content) // 2
        for piece in (content[:half], content[half:]):
            self._disk.step("write")
            super().write(piece)
            self._disk.written(self.path, piece)
        return len(content)


class SteppedDisk(Disk):
    """Calls `at_step` before each step, and then does what it should."""

    def __init__(self, at_step: AtStep) -> None:
        self.count = 0
        self._at_step = at_step

    def step(self, name: str) -> None:
        self.count += 1
        self._at_step(self.count - 1, name)

    def written(self, path: Path, data: bytes) -> None:
        """Take note of what a write added to the file that was created at `path`."""

    def create(self, path: Path, mode: int) -> BinaryIO:
        self.step("open")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        return io.BufferedWriter(SteppedFile(self, path, descriptor), PIECE_BYTES)

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        self.step("fsync")
        super().sync(file)

    def replace(self, source: Path, target: Path) -> None:
        self.step("rename")
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        if path.exists():
            self.step("unlink")
        super().remove(path)

    def make_folder(self, path: Path, mode: int) -> None:
        self.step("mkdir")
        super().make_folder(path, mode)

    def sync_folder(self, path: Path) -> None:
        self.step("fsync folder")
        super().sync_folder(path)
