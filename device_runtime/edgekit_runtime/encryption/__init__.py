"""Encryption at rest: files that only certain devices can read, and the key of this device."""

from pathlib import Path
from typing import Final

KEY_SUFFIX: Final = ".key"
"""The suffix of the file with the wrapped key of an encrypted file. See `opening`."""

MAGIC: Final = b"EDGEENC1"
"""The first bytes of an encrypted file, defined here for readers of plain files."""

DEVICE_KEY: Final = "device-key.json"
"""The name of the file with this device's key. See `device_key`."""


def key_path(path: Path) -> Path:
    """Return the path of the file that contains the wrapped key of the encrypted file at `path`."""
    return path.with_name(path.name + KEY_SUFFIX)
