"""Folders of which no disk gets a byte."""

import os
from pathlib import Path

import pytest

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.system.memory_folder import MEMORY, open_memory_folder


def test_folder_lies_in_memory_and_ends_with_its_block() -> None:
    with open_memory_folder("edgekit-test-") as folder:
        assert folder.parent == MEMORY and folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_bytes(b"secret")
    assert not folder.exists()


def test_folder_on_a_disk_is_refused() -> None:
    """Such as the `/dev/shm` of an image that mounts none: an ordinary folder of its disk."""
    disk = Path(__file__).parent
    if not os.access(disk, os.W_OK):
        pytest.skip("needs a checkout that can be written")
    with (
        pytest.raises(UnavailableError, match="not in memory; mount it"),
        open_memory_folder("edgekit-test-", disk),
    ):
        pass
    assert list(disk.glob("edgekit-test-*")) == []
