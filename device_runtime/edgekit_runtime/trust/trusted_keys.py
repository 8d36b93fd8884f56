"""Lists, adds and removes the public keys that are trusted on this machine.

`edgekit_toolkit.packaging.signing_keys` stores private keys in the same folder.
"""

import re
from pathlib import Path

from edgekit_runtime.errors import OutputError, SignatureError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import DISK, write_atomically
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX, list_keys
from edgekit_runtime.trust.trust_store import read_public_file, read_public_key

_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII
)  # no dot, so that the suffixes stay unambiguous
_SIGNING_SUFFIXES = (".pem", ".uri")  # of the toolkit's signing keys of the same name


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key in the folder.

    Attributes:
        name: The file name without `.pub.pem`.
        key_id: The SHA-256 of the key, as in signatures.
    """

    name: str
    key_id: str


def list_trusted(folder: Path) -> tuple[TrustedKey, ...]:
    """Return the keys in `folder`, sorted by name, or no keys if it is missing.

    Raises:
        SignatureError: `folder` is not a folder, or a `*.pub.pem` in it is not a public key.
        UnavailableError: The folder or a file in it cannot be read now.
    """
    return tuple(
        TrustedKey(path.name.removesuffix(PUBLIC_KEY_SUFFIX), read_public_key(path).keyid)
        for path in list_keys(folder)
    )


def trust_key(source: Path, name: str, folder: Path) -> TrustedKey:
    """Copy the public key at `source` to `folder`, so that it is trusted as `name`, and return it.

    Raises:
        SignatureError: The file is not a public key, the name is malformed, or another key has the name.
        OutputError: The folder cannot be created or written.
    """
    check_name(name)
    public_key, pem = read_public_file(source)
    make_keys_folder(folder, 0o755)  # the service's user reads it, too
    path = folder / f"{name}{PUBLIC_KEY_SUFFIX}"
    if path.exists() and read_public_key(path).keyid != public_key.keyid:
        raise SignatureError(
            f"key '{name}' in {folder} is another key; choose another name", public_key.keyid
        )
    write_public_file(path, pem)
    return TrustedKey(name, public_key.keyid)


def remove_key(name: str, folder: Path) -> TrustedKey:
    """Delete the public key `name` from `folder`, and return it.

    Raises:
        SignatureError: There is no such key, or the folder also contains its signing key.
        OutputError: The file cannot be removed.
    """
    path = folder / f"{check_name(name)}{PUBLIC_KEY_SUFFIX}"
    if path not in list_keys(folder):
        names = ", ".join(key.name.removesuffix(PUBLIC_KEY_SUFFIX) for key in list_keys(folder)) or "none"
        raise SignatureError(f"no key '{name}' in {folder}, there are: {names}")
    if _signs_here(name, folder):
        raise SignatureError(f"key '{name}' in {folder} signs on this machine; remove its files yourself")
    key = TrustedKey(name, read_public_key(path).keyid)
    try:
        path.unlink()
    except OSError as cause:
        raise OutputError(f"cannot remove {path}: {cause.strerror}") from cause
    return key


def forget_key(folder: Path, name: str, pem: bytes) -> None:
    """Delete the public key `name` if its file contains `pem` and `folder` has no signing key `name`.

    Raises:
        OutputError: The file cannot be removed.
    """
    path = folder / f"{name}{PUBLIC_KEY_SUFFIX}"
    try:
        if path.read_bytes() == pem and not _signs_here(name, folder):
            path.unlink()
            DISK.sync_folder(folder)
    except FileNotFoundError:
        return
    except OSError as cause:
        raise OutputError(f"cannot remove {path}: {cause.strerror}") from cause


def _signs_here(name: str, folder: Path) -> bool:
    return any((folder / f"{name}{suffix}").exists() for suffix in _SIGNING_SUFFIXES)


def check_name(name: str) -> str:
    """Return `name` if it has 1 to 64 letters, digits, `_` or `-`, or else raise SignatureError."""
    if not _NAME.fullmatch(name):
        raise SignatureError(f"key name is {name!r}, expected 1 to 64 letters, digits, '_' or '-'")
    return name


def make_keys_folder(folder: Path, mode: int) -> None:
    """Create the folder if it is missing, or raise `OutputError`. The umask applies to `mode`."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as cause:
        raise OutputError(
            f"cannot make the key folder {folder}: {cause.strerror}; set EDGEKIT_HOME"
        ) from cause


def write_public_file(path: Path, pem: bytes) -> None:
    """Write a public key atomically.

    Raises:
        OutputError: The folder cannot be written.
    """
    with write_atomically(path) as file:
        file.write(pem)
