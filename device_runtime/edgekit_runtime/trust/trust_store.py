"""Verifies signatures with the trusted public keys.

A device has only public keys. `edgekit_toolkit.packaging.signing_keys` creates keys and signatures.
"""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from securesystemslib.exceptions import Error as SecuresystemslibError
from securesystemslib.signer import Key, Signature, SSlibKey  # type: ignore[attr-defined]  # has no __all__

from edgekit_runtime.errors import SignatureError
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.system.resource_errors import check_lack
from edgekit_runtime.trust.dsse import Envelope, Statement, encode_signed
from edgekit_runtime.trust.keys import list_keys

MAX_KEY_FILE_BYTES: Final = 64 << 10


def read_public_key(path: Path) -> Key:
    """Return the public key in a PEM file. Its key id is the SHA-256 of the key, not the file name.

    Raises:
        SignatureError: The file cannot be read, is not a regular file, is too large, or contains no public
            key that securesystemslib supports.
        UnavailableError: No file descriptor or memory is available.
    """
    return read_public_file(path)[0]


def read_public_file(path: Path) -> tuple[Key, bytes]:
    """Return the public key in a PEM file, and the PEM of the key without other content of the file.

    The file is read once, so that nobody can replace the key after its id was shown.

    Raises:
        SignatureError, UnavailableError: See `read_public_key`.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:  # Path.open has no opener
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SignatureError(
                    f"public key {path}: is no regular file; put the key itself there, or a link to its file"
                )
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as cause:
        check_lack(cause, f"cannot read public key {path}")
        raise SignatureError(f"cannot read public key {path}: {cause.strerror}") from cause
    if len(data) > MAX_KEY_FILE_BYTES:
        raise SignatureError(f"public key {path}: over {MAX_KEY_FILE_BYTES} bytes, so not a key")
    try:
        public_key = load_pem_public_key(data)
        pem = public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return SSlibKey.from_crypto(public_key), pem
    except (ValueError, UnsupportedAlgorithm, SecuresystemslibError) as cause:
        raise SignatureError(
            f"public key {path}: not a PEM public key (SubjectPublicKeyInfo): {cause}"
        ) from cause


class TrustStore:
    """A `Verifier` with the public keys whose signatures are accepted."""

    __slots__ = ("_folder", "_keys")

    def __init__(self, keys: Iterable[Key], folder: Path | None = None) -> None:
        """Trust `keys`, which lie in `folder` if they lie in one."""
        self._keys: Mapping[str, Key] = {key.keyid: key for key in keys}
        self._folder = folder

    @classmethod
    def from_folder(cls, folder: Path) -> "TrustStore":
        """Return a store of all `*.pub.pem` in `folder`. If the folder is missing, the store is empty.

        Users who can write to the folder decide what is trusted. Its permissions are not checked here.

        Raises:
            SignatureError: `folder` is not a folder, or a file is not a public key. Such a file is not
                skipped, because the missing key would show only later, as a refused update.
            UnavailableError: The keys cannot be read now.
        """
        return cls((read_public_key(path) for path in list_keys(folder)), folder)

    @property
    def key_ids(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        """Verify an envelope, see `Verifier`."""
        opened = Envelope.from_bytes(envelope, where)
        key_id = opened.key_id
        key = self._keys.get(key_id)
        if key is None:
            trusted = ", ".join(self.key_ids) or "none"
            raise SignatureError(
                f"{where}: signed by key {key_id}, trusted are: {trusted}{self._advise()}", key_id
            )
        try:
            key.verify_signature(Signature(key_id, opened.signature.hex()), encode_signed(opened.payload))
        except SecuresystemslibError as cause:
            raise SignatureError(
                f"{where}: the signature by key {key_id} does not fit its content; fetch the file again",
                key_id,
            ) from cause
        return opened.read(predicate_type, where), key_id

    def _advise(self) -> str:
        """Return what a user can do about an unknown key, to follow the ids of the trusted ones."""
        if self._folder is None:
            return "; trust that key if you know its owner"
        folder = "" if self._folder == find_keys_folder() else f" --keys {self._folder}"
        return (
            f" (in {self._folder}); if you know the owner of that key, get its public part from them and"
            f" trust it: edgekit-device keys trust FILE{folder}"
        )


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting: a pipe or a device could otherwise block for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has neither
