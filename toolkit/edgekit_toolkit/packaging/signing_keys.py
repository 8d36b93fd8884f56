"""Generates, lists, exports and trusts signing keys, and signs statements with them.

All keys are in one folder. Each key has a public key `NAME.pub.pem`, which readers on this machine trust. A
key that can sign also has a private key `NAME.pem` with mode 0600, or a file `NAME.uri` with a URI of
securesystemslib for a key in an HSM or KMS, such as `hsm:` or `awskms:`. Private keys with passwords are not
supported. Use an HSM or KMS to protect a key.
"""

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from securesystemslib.exceptions import Error as SecuresystemslibError
from securesystemslib.signer import CryptoSigner, Key, Signer  # type: ignore[attr-defined]  # has no __all__

from edgekit_runtime.errors import OutputError, SignatureError
from edgekit_runtime.system.atomic_files import write_text_atomically
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust import trusted_keys
from edgekit_runtime.trust.dsse import Envelope, encode_signed
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX
from edgekit_runtime.trust.trust_store import MAX_KEY_FILE_BYTES, read_public_file, read_public_key
from edgekit_runtime.trust.trusted_keys import (
    check_name,
    make_keys_folder,
    write_public_file,
)

DEFAULT_KEY_NAME: Final = "default"

_PRIVATE_KEY_SUFFIX: Final = ".pem"
_URI_SUFFIX: Final = ".uri"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key in the folder.

    Attributes:
        name: The name of the key's files without their suffixes.
        key_id: The sha256 of the public key, as in signatures.
        signs_with: `file` for a private key file, or the URI of a key in an HSM or KMS. None if the key
            cannot sign.
    """

    name: str
    key_id: str
    signs_with: str | None


class StatementSigner:
    """Signs in-toto statements with one key. Calling it with a payload returns a DSSE envelope."""

    __slots__ = ("_signer", "key_id")

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self.key_id: str = signer.public_key.keyid

    def __call__(self, payload: bytes) -> bytes:
        """Return the canonical envelope around `payload`; an ed25519 key gives the same bytes each time.

        Raises:
            SignatureError: the signer failed, or its signature does not fit its public key.
        """
        signed = encode_signed(payload)
        try:
            signature = self._signer.sign(signed)
            # Otherwise only the devices would notice a KMS that signs with another key than configured.
            self._signer.public_key.verify_signature(signature, signed)
        except Exception as cause:  # securesystemslib documents that signers may raise anything
            raise SignatureError(f"signing with key {self.key_id} failed: {cause}", self.key_id) from cause
        return Envelope(payload, signature.keyid, bytes.fromhex(signature.signature)).to_bytes()


def generate_key(name: str, folder: Path | None = None) -> KeyInfo:
    """Generate an ed25519 key pair, and write it to `folder` (by default `find_keys_folder()`).

    Raises:
        SignatureError: The name is invalid or used by another key.
        OutputError: The folder cannot be written.
    """
    folder = _prepare_folder(name, folder)
    signer = CryptoSigner.generate_ed25519()
    public_path = folder / f"{name}{PUBLIC_KEY_SUFFIX}"
    if public_path.exists():
        raise SignatureError(f"key '{name}' exists in {folder}; choose another name or remove its files")
    _create_private_file(folder / f"{name}{_PRIVATE_KEY_SUFFIX}", signer.private_bytes)
    write_public_file(public_path, _public_pem(signer))
    return KeyInfo(name, signer.public_key.keyid, "file")


def list_keys(folder: Path | None = None) -> tuple[KeyInfo, ...]:
    """Return the keys in `folder`, sorted by name. There are none if the folder does not exist.

    Raises:
        SignatureError: `folder` is not a folder, or a `*.pub.pem` file in it is not a public key.
    """
    folder = folder or find_keys_folder()
    trusted = trusted_keys.list_trusted(folder)
    return tuple(KeyInfo(key.name, key.key_id, _find_means(key.name, folder)) for key in trusted)


def export_key(name: str, destination: Path, folder: Path | None = None) -> KeyInfo:
    """Write the public key `name` to `destination`, so that others can trust it. Return the key.

    Raises:
        SignatureError: There is no such key.
        OutputError: The destination cannot be written.
    """
    folder = folder or find_keys_folder()
    public_key, pem = read_public_file(folder / f"{check_name(name)}{PUBLIC_KEY_SUFFIX}")
    write_public_file(destination, pem)
    return KeyInfo(name, public_key.keyid, _find_means(name, folder))


def trust_key(source: Path, name: str, folder: Path | None = None) -> KeyInfo:
    """Copy the public key at `source` to `folder` as `name`, so that it is trusted. Return the key.

    Raises:
        SignatureError: The file is not a public key, the name is invalid, or another key has that name.
        OutputError: The folder cannot be written.
    """
    folder = _prepare_folder(name, folder)
    key = trusted_keys.trust_key(source, name, folder)
    return KeyInfo(name, key.key_id, _find_means(name, folder))


def register_uri(name: str, uri: str, public_key_path: Path, folder: Path | None = None) -> KeyInfo:
    """Register a signing key whose private key is in an HSM or KMS.

    The public key and the URI of the private key are written to `folder`.

    Args:
        name: The name of the key.
        uri: The URI of the private key. It is passed to `Signer.from_priv_key_uri` of securesystemslib.
        public_key_path: The path of the public key, which is a PEM file.
        folder: The folder of the keys, or None for `find_keys_folder()`.

    Raises:
        SignatureError: The PEM file is not a public key, the URI cannot be used with the public key, the name
            is invalid, or another key has the name.
        OutputError: The folder cannot be written.
    """
    _open_uri(uri, read_public_key(public_key_path))
    key = trust_key(public_key_path, name, folder)
    write_text_atomically((folder or find_keys_folder()) / f"{name}{_URI_SUFFIX}", uri)
    return KeyInfo(name, key.key_id, uri)


def load_signer(name: str = DEFAULT_KEY_NAME, folder: Path | None = None) -> StatementSigner:
    """Return a signer for the key `name`. The default key is generated if it does not exist.

    Raises:
        SignatureError: There is no such key, it cannot sign, or other users can read its private file.
        OutputError: The default key cannot be written.
    """
    folder = folder or find_keys_folder()
    means = _find_means(check_name(name), folder)
    if means is None and name == DEFAULT_KEY_NAME:
        # If two processes get here at once, one makes the key and both load it.
        with contextlib.suppress(SignatureError):
            generate_key(name, folder)
        means = _find_means(name, folder)
    if means is None:
        raise SignatureError(f"no signing key '{name}' in {folder}; generate it, or give its URI")
    public_path = folder / f"{name}{PUBLIC_KEY_SUFFIX}"
    if means != "file":
        return StatementSigner(_open_uri(means, read_public_key(public_path)))
    signer = _open_private_file(folder / f"{name}{_PRIVATE_KEY_SUFFIX}")
    if not public_path.exists():  # the private file comes first; a power cut may happen between the two
        write_public_file(public_path, _public_pem(signer))
    if read_public_key(public_path).keyid != signer.public_key.keyid:
        raise SignatureError(f"key '{name}' in {folder}: its private and public files are of different keys")
    return StatementSigner(signer)


def _prepare_folder(name: str, folder: Path | None) -> Path:
    folder = folder or find_keys_folder()
    check_name(name)
    make_keys_folder(folder, 0o700)
    return folder


def _find_means(name: str, folder: Path) -> str | None:
    if (folder / f"{name}{_PRIVATE_KEY_SUFFIX}").exists():
        return "file"
    try:
        return (folder / f"{name}{_URI_SUFFIX}").read_text("utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as cause:
        raise SignatureError(f"cannot read the URI of key '{name}' in {folder}: {cause}") from cause


def _open_uri(uri: str, public_key: Key) -> Signer:
    try:
        return Signer.from_priv_key_uri(uri, public_key)
    except Exception as cause:  # securesystemslib documents that signers may raise anything
        raise SignatureError(f"cannot sign by {uri}: {cause}", public_key.keyid) from cause


def _open_private_file(path: Path) -> CryptoSigner:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            pem = file.read(MAX_KEY_FILE_BYTES)
    except OSError as cause:
        raise SignatureError(f"cannot read private key {path}: {cause.strerror}") from cause
    if mode & 0o077:
        raise SignatureError(
            f"private key {path} has mode {mode:04o}, so others can use it; chmod 600 {path}"
        )
    try:
        return CryptoSigner(load_pem_private_key(pem, None))
    except (ValueError, TypeError, UnsupportedAlgorithm, SecuresystemslibError) as cause:
        raise SignatureError(
            f"private key {path}: not a PEM private key without password: {cause}"
        ) from cause


def _create_private_file(path: Path, pem: bytes) -> None:
    """Write a private key that appears complete or not at all, and never replaces one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
            path.hardlink_to(temporary)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as cause:
        raise SignatureError(f"private key {path} exists; choose another name or remove it") from cause
    except OSError as cause:
        raise OutputError(f"cannot write private key {path}: {cause.strerror}") from cause


def _public_pem(signer: CryptoSigner) -> bytes:
    public_key = load_pem_private_key(signer.private_bytes, None).public_key()
    return public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
