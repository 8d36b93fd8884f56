"""Maps a package file into memory. An encrypted file is decrypted into memory first."""

import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from edgekit_runtime.encryption import MAGIC
from edgekit_runtime.errors import PackageError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.resource_errors import check_lack

if TYPE_CHECKING:
    from edgekit_runtime.encryption.opening import Decrypted

Decrypt: TypeAlias = Callable[[Path, int], "Decrypted"]
"""See `decrypt_file`. A service decrypts in another process."""


@dataclass(frozen=True, slots=True, eq=False)
class PackageFile:
    """A package file, mapped into memory.

    Attributes:
        stored: The bytes of the file.
        content: The bytes of the plain package, which differ from `stored` if the file is encrypted.
        decrypted: The plaintext and keys of an encrypted file, or None.
    """

    stored: memoryview
    content: memoryview
    decrypted: "Decrypted | None" = None


def map_file(path: Path, max_bytes: int, decrypt: Decrypt | None = None) -> PackageFile:
    """Map a package file into memory. An encrypted file is decrypted into memory first.

    The first encrypted package disables core dumps for this process, since they would contain the plaintext.

    Raises:
        PackageError: The file is unreadable, empty, not a regular file or larger than `max_bytes`, or an
            encrypted file is damaged or not for this device.
        UnavailableError: The machine has too little memory or too few file descriptors.
    """
    try:
        # Not blocking, since opening a FIFO for reading would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
                raise PackageError(f"{path}: is empty or not a regular file, expected a package")
            if status.st_size > max_bytes:
                raise PackageError(
                    f"{path}: the package has {status.st_size} bytes, the limit is {max_bytes}"
                )
            stored = _map(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        if bytes(stored[: len(MAGIC)]) != MAGIC:
            return PackageFile(stored, stored)
        return _decrypt(path, max_bytes, stored, decrypt)
    except (OSError, ValueError, OverflowError) as cause:
        check_lack(cause, f"cannot read package {path}")
        raise PackageError(f"cannot read package {path}: {cause}") from cause


def _decrypt(path: Path, max_bytes: int, stored: memoryview, decrypt: Decrypt | None) -> PackageFile:
    from edgekit_runtime.encryption.opening import decrypt_file  # which plain packages do without
    from edgekit_runtime.system.own_process import forbid_dumps

    forbid_dumps()
    decrypted = (decrypt or decrypt_file)(path, max_bytes)
    size_bytes = os.fstat(decrypted.memory.descriptor).st_size
    if size_bytes == 0:
        raise PackageError(f"{path}: holds nothing, expected a package")
    return PackageFile(stored, _map(decrypted.memory.descriptor, size_bytes), decrypted)


def _map(descriptor: int, size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ))
