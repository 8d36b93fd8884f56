"""Encryption at rest: files that only certain devices can read, and the key of this device."""

from pathlib import Path
from typing import Final

KEY_SUFFIX: Final = ".key"
"""Suffix of the file with the wrapped key beside an encrypted file, see `opening`."""

MAGIC: Final = b"EDGEENC1"
"""The first bytes of an encrypted file, here for readers of plain files, which need nothing else."""

DEVICE_KEY: Final = "device-key.json"
"""Name of the file of this device's key in the folder of keys, see `device_key`."""


def key_path(path: Path) -> Path:
    """Return the path of the file that contains the wrapped key of the encrypted file at `path`."""
    return path.with_name(path.name + KEY_SUFFIX)
