"""A folder in memory, for programs whose files must not be written to a disk."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import UnavailableError

MEMORY: Final = Path("/dev/shm")  # noqa: S108  # a file system in memory, see `_find_type`
_MOUNTS: Final = Path("/proc/self/mounts")
_TYPES: Final = ("tmpfs", "devtmpfs", "ramfs")


@contextlib.contextmanager
def open_memory_folder(prefix: str, memory: Path = MEMORY) -> Iterator[Path]:
    """Yield a new folder in memory, which is removed after the block.

    Args:
        prefix: The start of the name.
        memory: The parent folder.

    Raises:
        UnavailableError: This machine has no writable file system in memory.
    """
    import tempfile  # which most processes do without

    if not os.access(memory, os.W_OK):
        raise UnavailableError(f"{memory}, a file system in memory, is missing or cannot be written here")
    if (kind := _find_type(memory)) not in _TYPES:
        raise UnavailableError(
            f"{memory} lies on '{kind}', not in memory; mount it: `mount -t tmpfs tmpfs {memory}`"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=memory) as name:
        yield Path(name)


def _find_type(folder: Path) -> str:
    """Return the type of the file system of a folder."""
    fields = [line.split() for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    folders = (folder.resolve(), *folder.resolve().parents)
    # Of two mounts on one folder the later one counts.
    types = {Path(mount): kind for _, mount, kind, *_ in fields}
    return next((types[path] for path in folders if path in types), "unknown")
