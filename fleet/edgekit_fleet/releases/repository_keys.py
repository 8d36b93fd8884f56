"""The private keys that sign the metadata of the repository, as PEM files in a separate folder.

`timestamp.pem` signs the role `timestamp`. During a rotation, `timestamp.next.pem` exists too, and both sign.
The manager is not a TUF role, but its key is stored here and named in the root. Devices accept documents that
are signed with this key. The keys of the root are `root-1.pem`, `root-2.pem` and so on. They are only needed
for rotations, so they may be kept offline in another folder.
"""

from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]  # has no __all__

from edgekit_runtime.errors import OutputError, SignatureError
from edgekit_runtime.system.atomic_files import DISK, Disk, write_atomically

MANAGER_ROLE: Final = "manager"
"""The name of the key that signs desired documents."""
_NEXT: Final = ".next"


class RepositoryKeys:
    """The folder with the keys of targets, snapshot, timestamp, manager, and each device class."""

    __slots__ = ("_disk", "folder")

    def __init__(self, folder: Path, disk: Disk = DISK) -> None:
        self.folder = folder
        self._disk = disk

    def signers(self, role: str) -> tuple[CryptoSigner, ...]:
        """Return the signers of a role, for its current key and, during a rotation, for its next key.

        Raises:
            SignatureError: The role has no key, or a file is not a key.
        """
        paths = [path for path in (self._path(role), self._path(role, _NEXT)) if path.exists()]
        if not paths:
            raise SignatureError(
                f"no key of the role '{role}' in {self.folder}; restore the folder from a backup, or exchange"
                " the key with the keys of the root"
            )
        return tuple(read_signer(path) for path in paths)

    def current(self, role: str) -> CryptoSigner:
        """Return the signer with the current key of a role. A missing key is created.

        Raises:
            SignatureError: The file is not a key.
            OutputError: The file cannot be written.
        """
        return self._make(self._path(role))

    def next(self, role: str) -> CryptoSigner:
        """Return the signer with the next key of a role. A missing key is created.

        Raises:
            SignatureError: The file is not a key.
            OutputError: The file cannot be written.
        """
        return self._make(self._path(role, _NEXT))

    def renew_next(self, role: str) -> CryptoSigner:
        """Create a next key of a role, and return its signer. An older next key is replaced.

        Raises:
            OutputError: The file cannot be written.
        """
        write_key(self._path(role, _NEXT), Ed25519PrivateKey.generate(), self._disk)
        return read_signer(self._path(role, _NEXT))

    def list_private(self, role: str) -> list[Ed25519PrivateKey]:
        """Return the private keys of a role: first the next key, if there is one, then the current key.

        Raises:
            SignatureError: A file is not a key.
        """
        paths = (self._path(role, _NEXT), self._path(role))  # in this order: the next one becomes the present
        return [_read_private(path) for path in paths if path.exists()]

    def finish_exchange(self, role: str, trusted: frozenset[str]) -> None:
        """Replace the current key of a role by its next key, if the metadata names the next key.

        Args:
            role: The role whose key was rotated.
            trusted: The ids of the keys that the metadata names for the role.

        Raises:
            OutputError: The folder cannot be written.
        """
        path = self._path(role, _NEXT)
        if not path.exists() or read_signer(path).public_key.keyid not in trusted:
            return
        try:
            self._disk.replace(path, self._path(role))
            self._disk.sync_folder(self.folder)
        except OSError as cause:
            raise OutputError(f"cannot replace the key of '{role}' in {self.folder}: {cause}") from cause

    def _make(self, path: Path) -> CryptoSigner:
        if not path.exists():
            write_key(path, Ed25519PrivateKey.generate(), self._disk)
        return read_signer(path)

    def _path(self, role: str, suffix: str = "") -> Path:
        return self.folder / f"{role}{suffix}.pem"


def read_root_signers(folder: Path) -> tuple[CryptoSigner, ...]:
    """Return the signers for the files `root-*.pem` in a folder, or none if there are no such files.

    Raises:
        SignatureError: A file is not a key.
    """
    return tuple(read_signer(path) for path in sorted(folder.glob("root-*.pem")))


def make_root_keys(folder: Path, count: int, disk: Disk = DISK) -> tuple[CryptoSigner, ...]:
    """Create `count` keys of the root in new files `root-N.pem`, and return their signers.

    Raises:
        OutputError: The folder cannot be written.
    """
    numbers = [int(path.stem[5:]) for path in folder.glob("root-*.pem") if path.stem[5:].isdigit()]
    first = max(numbers, default=0) + 1
    paths = [folder / f"root-{number}.pem" for number in range(first, first + count)]
    for path in paths:
        write_key(path, Ed25519PrivateKey.generate(), disk)
    return tuple(read_signer(path) for path in paths)


def write_key(path: Path, key: Ed25519PrivateKey, disk: Disk = DISK) -> None:
    """Write a private key as PEM to a file that only its owner can read.

    Raises:
        OutputError: The folder cannot be written.
    """
    with write_atomically(path, mode=0o600, disk=disk) as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def read_signer(path: Path) -> CryptoSigner:
    """Return a signer with the private key in a PEM file.

    Raises:
        SignatureError: The file cannot be read, or is not an Ed25519 private key.
    """
    return CryptoSigner(_read_private(path))


def _read_private(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as cause:
        raise SignatureError(f"{path}: cannot read a private key: {cause}") from cause
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(f"{path}: is no Ed25519 key; the repository signs with those only")
    return key
