"""Reads attributes below `/sys`, limited in size."""

import os
from pathlib import Path
from typing import Final

from edgekit_runtime.records import dataclass

SYSFS_ROOT: Final = Path("/sys")
_MAX_BYTES: Final = 4096  # one page, the largest attribute of sysfs


@dataclass(frozen=True, slots=True)
class Sysfs:
    """A tree of attributes below the folder `root`, which is `/sys` by default.

    Attributes:
        vcgencmd: The path of the Raspberry Pi's `vcgencmd`, or None.
    """

    root: Path = SYSFS_ROOT
    vcgencmd: str | None = None

    def find(self, pattern: str) -> tuple[Path, ...]:
        """Return the matching paths below `root` in natural order, or none if a folder cannot be read."""
        try:
            return tuple(sorted(self.root.glob(pattern), key=lambda path: (len(str(path)), str(path))))
        except OSError:
            return ()


def read_text(path: Path) -> str:
    """Return the text of an attribute, at most 4,096 bytes, without surrounding white space.

    Raises:
        OSError: The attribute cannot be read, or its driver failed (EIO, or EAGAIN of a sleeping device).
        ValueError: The content is not text.
    """
    # Without O_NONBLOCK a pipe instead of an attribute would block the sampling thread for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MAX_BYTES).decode("utf-8").strip()
    finally:
        os.close(descriptor)


def read_number(path: Path) -> int:
    """Return the integer in an attribute.

    Raises:
        OSError: As for `read_text`.
        ValueError: The attribute is not an integer.
    """
    text = read_text(path)
    digits = text.removeprefix("-")
    # int() accepts underscores and digits of any script, and turns a page of digits into a huge number.
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 20):
        raise ValueError(f"{path} holds {text[:40]!r}, expected a whole number")
    return int(text)


def read_label(path: Path, default: str) -> str:
    """Return the text of an attribute, or `default` if it is absent, empty or not readable."""
    try:
        return read_text(path) or default
    except (OSError, ValueError):
        return default
