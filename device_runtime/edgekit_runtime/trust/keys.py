"""Lists the files of the trusted public keys without the libraries that use them (`trust_store`)."""

from pathlib import Path
from typing import Final, TypeAlias

from edgekit_runtime.errors import SignatureError, UnavailableError

PUBLIC_KEY_SUFFIX: Final = ".pub.pem"

KeysStamp: TypeAlias = "tuple[tuple[str, int, int, int, int], ...]"
"""For each file: name, inode, size, and the last change times of content and inode."""


def list_keys(folder: Path) -> list[Path]:
    """Return the sorted paths of all keys in `folder`, or none if it is missing or not readable.

    Raises:
        SignatureError: `folder` is not a folder.
        UnavailableError: The folder cannot be listed now. An empty list would mean that no key is trusted.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(PUBLIC_KEY_SUFFIX))
    except (FileNotFoundError, PermissionError):
        return []
    except NotADirectoryError as cause:
        if not folder.exists():  # something above it is not a folder, such as the home of a user without one
            return []
        raise SignatureError(
            f"{folder} is not a folder of keys; to trust a key in a file: edgekit-device keys trust {folder}"
        ) from cause
    except OSError as cause:
        raise UnavailableError(f"{folder}: the keys cannot be listed: {cause.strerror}; try again") from cause


def stamp_keys(folder: Path) -> KeysStamp:
    """Return a value that changes when a key in `folder` is added, removed or replaced. No key is opened.

    Raises:
        SignatureError, UnavailableError: See `list_keys`.
    """
    keys = []
    for path in list_keys(folder):
        try:
            status = path.stat()  # of what a link leads to
        except OSError:  # reading it will say why
            keys.append((path.name, 0, 0, 0, 0))
            continue
        keys.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(keys)
