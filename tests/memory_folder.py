"""Folders in memory: a sync to a disk takes 2 ms, and a fleet syncs at each step.

A test whose files are synced has `from tests.memory_folder import tmp_path` in its conftest.py.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")  # noqa: S108  # folders in it are new ones of random names
_LEAST_BYTES = 1 << 30


def _find_memory() -> Path | None:
    """Return where files lie in memory, with room, and can be executed; None on other machines."""
    if not os.access(_MEMORY, os.W_OK):
        return None
    status = os.statvfs(_MEMORY)
    has_room = status.f_bavail * status.f_frsize >= _LEAST_BYTES
    return _MEMORY if has_room and not status.f_flag & os.ST_NOEXEC else None


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield a new folder, in memory where that is possible."""
    with tempfile.TemporaryDirectory(
        prefix="edgekit-", dir=_find_memory(), ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's."""
    with memory_folder() as folder:
        yield folder
