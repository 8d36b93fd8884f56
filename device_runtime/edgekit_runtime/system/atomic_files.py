"""Atomic file writing, and digests of files."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from edgekit_runtime.errors import OutputError


class Disk:
    """Operations that change files durably. Tests override them to simulate failures.

    All methods raise OSError on failure. The umask applies to each `mode`.
    """

    __slots__ = ()

    def create(self, path: Path, mode: int) -> BinaryIO:
        """Create a file and return it, open for writing. `path` must not exist."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        return os.fdopen(descriptor, "wb")

    def append(self, path: Path, begin: int) -> BinaryIO:
        """Open or create a file, resize it to `begin` bytes, and return it for appending."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(descriptor, begin)
        os.lseek(descriptor, begin, os.SEEK_SET)
        return os.fdopen(descriptor, "wb")

    def sync(self, file: BinaryIO) -> None:
        """Wait until the content of `file` is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def replace(self, source: Path, target: Path) -> None:
        """Rename `source` to `target` atomically. An existing `target` is replaced."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove the file at `path` if it exists."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path, mode: int) -> None:
        """Create the folder `path`. It must not exist, but its parent must."""
        path.mkdir(mode)

    def sync_folder(self, path: Path) -> None:
        """Wait until the entries of the folder `path` are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK: Final = Disk()


def make_folders(path: Path, mode: int = 0o777, disk: Disk = DISK) -> None:
    """Create the folder `path` and its missing parents, so that they survive a power cut.

    The umask applies to `mode`. New parents get the mode 0o777.

    Raises:
        OutputError: The folder cannot be created.
    """
    try:
        for folder in reversed([parent for parent in (path, *path.parents) if not parent.is_dir()]):
            try:
                disk.make_folder(folder, mode if folder == path else 0o777)
            except FileExistsError:
                if not folder.is_dir():  # else another process has just created it
                    raise
            disk.sync_folder(folder.parent)
    except OSError as cause:
        raise OutputError(f"cannot make {path}: {cause.strerror}") from cause


def check_target(path: Path) -> None:
    """Check that `write_atomically` can write `path`, before a long computation.

    Raises:
        OutputError: `path` is a folder, or its parent is missing or not writable.
    """
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: No such file or directory; make its folder first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: Permission denied; choose another folder")


@contextlib.contextmanager
def write_atomically(path: Path, *, mode: int = 0o666, disk: Disk = DISK) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` if the block succeeds, and is removed otherwise.

    The content and the name are on the disk when this returns. Until then, an existing file at `path` is
    unchanged. A power cut or SIGKILL may leave the temporary file, which is named `.NAME.<16 digits>.tmp`.

    The folder of `path` must exist. The umask applies to `mode`.

    Raises:
        OutputError: The folder is missing or not writable, the disk is full, or writing fails otherwise.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        try:
            with disk.create(temporary, mode) as file:
                yield file
                disk.sync(file)
            disk.replace(temporary, path)
            disk.sync_folder(path.parent)
        finally:
            # Also on KeyboardInterrupt; after the rename there is nothing left to remove. A second error here
            # would hide the first, and a folder that refuses the removal has also refused the creation.
            with contextlib.suppress(OSError):
                disk.remove(temporary)
    except OSError as cause:
        reason = cause.strerror or str(cause)
        raise OutputError(f"cannot write {path}: {reason}; free space or choose another folder") from cause


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text as UTF-8, see `write_atomically`."""
    with write_atomically(path) as file:
        file.write(text.encode())


def find_size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if it is missing or not accessible."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_stamp(path: Path) -> tuple[int, ...]:
    """Return a tuple that changes when the file changes, or () if the file is not accessible."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as lower-case hexadecimal digits. The file is read in parts.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
