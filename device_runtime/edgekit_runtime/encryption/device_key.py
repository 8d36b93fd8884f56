"""The key of this device, stored in `device-key.json`. Content keys are wrapped for this key.

    {"format":1,"holder":"file","public":"BASE64 of an uncompressed point","stored":{...}}

A holder, such as a TPM, protects the private key. A new key uses the first available holder in `holders`.
"""

import base64
import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Final

from edgekit_runtime.canonical_json import Fields, JsonValue, decode_json, encode_json
from edgekit_runtime.encryption import DEVICE_KEY
from edgekit_runtime.encryption.container import ContentKey, EncryptionError
from edgekit_runtime.encryption.holders import HOLDERS, KeyHolder, Stored, find_holder
from edgekit_runtime.encryption.key_wrapping import POINT_BYTES, unwrap_key, wrap_key
from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import DISK, Disk, make_folders, write_atomically
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.system.resource_errors import check_lack

_FORMAT: Final = 1
_MAX_BYTES: Final = 16 << 10
# A P-256 public key in DER ends with its point. Source: RFC 5480.
_DER_PREFIX: Final = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKey:
    """The key of this device.

    Attributes:
        public_key: an uncompressed point of P-256.
        stored: data that the holder needs to use the private key, as returned by `KeyHolder.create`.
    """

    holder: KeyHolder
    public_key: bytes
    stored: Stored = field(repr=False)

    @property
    def key_id(self) -> str:
        return name_public_key(self.public_key)

    @property
    def pem(self) -> str:
        """The public key in PEM, for `edgekit package --encrypt-for`."""
        text = base64.encodebytes(_DER_PREFIX + self.public_key).decode("ascii").replace("\n", "")
        lines = [text[at : at + 64] for at in range(0, len(text), 64)]
        return "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""])

    def unwrap(self, wrapped: str, key_id: str) -> ContentKey:
        """Return the content key `key_id` that was wrapped for this device.

        Raises:
            EncryptionError: the content key was wrapped for another device, or this device's key is damaged.
            UnavailableError: the holder does not answer now.
        """
        try:
            exchange = self.holder.open(self.stored)
        except (KeyError, ValueError, TypeError) as cause:
            raise EncryptionError(f"{DEVICE_KEY}: is damaged: {cause!r}") from cause
        return unwrap_key(wrapped, key_id, exchange, self.public_key)


def name_public_key(public_key: bytes) -> str:
    """Return the id of a device's public key: the SHA-256 of its DER form, in hexadecimal.

    `public_key` is an uncompressed point of P-256.
    """
    return hashlib.sha256(_DER_PREFIX + public_key).hexdigest()


def wrap_for(content_key: ContentKey, public_keys: Iterable[bytes]) -> dict[str, str]:
    """Return `Header.recipients`: a dict from ids of public keys to the wrapped content key in base64.

    `public_keys` are uncompressed points of P-256.

    Raises:
        EncryptionError: a public key is malformed.
    """
    return {name_public_key(point): wrap_key(content_key, point) for point in public_keys}


def read_device_key(folder: Path | None = None) -> DeviceKey | None:
    """Return the key of this device, or None if it has none yet.

    `folder` is the folder of keys, by default `find_keys_folder()`.

    Raises:
        EncryptionError: the file of the key is damaged.
    """
    path = (folder or find_keys_folder()) / DEVICE_KEY
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as cause:
        check_lack(cause, f"cannot read {path}")
        raise EncryptionError(f"cannot read the key of this device, {path}: {cause.strerror}") from cause
    fields = Fields(decode_json(content, str(path), EncryptionError), str(path), EncryptionError)
    try:
        public_key = base64.b64decode(fields.take("public"), validate=True)
        stored = fields.take("stored")
        if fields.take("format") != _FORMAT or len(public_key) != POINT_BYTES or not isinstance(stored, dict):
            raise EncryptionError(f"{path}: is damaged, or of a newer edgekit")
    except (ValueError, TypeError) as cause:
        raise EncryptionError(f"{path}: is damaged: {cause}") from cause
    return DeviceKey(holder=find_holder(fields.take("holder")), public_key=public_key, stored=stored)


def make_device_key(folder: Path | None = None, disk: Disk = DISK, *, holder: str = "") -> DeviceKey:
    """Return the key of this device. Create the key if there is none.

    `folder` is the folder of keys, by default `find_keys_folder()`. `holder` is `tpm`, `keyring` or `file`,
    by default the first that is available.

    Raises:
        EncryptionError: the file of the key is damaged, or the holder is not available.
    """
    folder = folder or find_keys_folder()
    make_folders(folder, disk=disk)
    with _lock(folder):
        return read_device_key(folder) or _create(folder, holder, disk)


def _create(folder: Path, holder: str, disk: Disk) -> DeviceKey:
    chosen = find_holder(holder) if holder else next(item for item in HOLDERS if item.is_available())
    if not chosen.is_available():
        raise EncryptionError(f"'{chosen.name}' cannot hold a key on this machine now")
    try:
        stored, public_key = chosen.create()
    except UnavailableError as cause:  # a weaker holder would be for ever, so a person decides
        raise UnavailableError(
            f"no key of this device can be made: {cause}; try again, or choose another holder:"
            " `edgekit-device keys device --holder file`"
        ) from cause
    document: dict[str, JsonValue] = {
        "format": _FORMAT,
        "holder": chosen.name,
        "public": base64.b64encode(public_key).decode("ascii"),
        "stored": dict(stored),
    }
    with write_atomically(folder / DEVICE_KEY, mode=0o600, disk=disk) as file:
        file.write(encode_json(document))
    return DeviceKey(holder=chosen, public_key=public_key, stored=stored)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold `folder`, so that two processes make one key."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_public_device_key(path: Path) -> bytes:
    """Read a PEM file of `edgekit-device keys device`, and return the public key as an uncompressed point.

    Raises:
        EncryptionError: the file cannot be read, or does not contain a P-256 public key.
    """
    try:
        with path.open("rb") as file:
            return parse_public_device_key(file.read(_MAX_BYTES).decode("utf-8", "replace"))
    except OSError as cause:
        check_lack(cause, f"cannot read {path}")
        raise EncryptionError(f"cannot read public key {path}: {cause.strerror}") from cause
    except EncryptionError as cause:
        raise EncryptionError(f"{path}: {cause}; make it by `edgekit-device keys device`") from cause


def parse_public_device_key(pem: str) -> bytes:
    """Return the uncompressed point of a P-256 public key in PEM.

    Raises:
        EncryptionError: the text is another kind of key, or not a key.
    """
    match = re.fullmatch(r"\s*-----BEGIN PUBLIC KEY-----([^-]*)-----END PUBLIC KEY-----\s*", pem)
    try:
        data = base64.b64decode("".join(match[1].split()), validate=True) if match else b""
    except ValueError:
        data = b""
    if len(data) != len(_DER_PREFIX) + POINT_BYTES or not data.startswith(_DER_PREFIX):
        raise EncryptionError("expected a public key on P-256 in PEM")
    return data[len(_DER_PREFIX) :]
