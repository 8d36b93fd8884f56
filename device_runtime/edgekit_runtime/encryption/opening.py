"""Decrypts a file into memory, with the key of this device.

The content key is wrapped in the header of the file, or in the file `NAME.key` in the same folder, which the
agent of a fleet writes:

    {"format":1,"key_id":"ID of the content key","wrapped":"BASE64"}

The users of the plaintext receive a descriptor of sealed memory and a key for derived files, such as a built
engine, but never the content key.
"""

import os
from dataclasses import field
from pathlib import Path
from typing import Final

from edgekit_runtime.canonical_json import Fields, decode_json, encode_json
from edgekit_runtime.encryption import key_path
from edgekit_runtime.encryption.container import (
    ContentKey,
    EncryptionError,
    Header,
    fill_memory,
    open_file,
    parse_head,
)
from edgekit_runtime.encryption.device_key import DeviceKey, read_device_key
from edgekit_runtime.encryption.key_derivation import derive
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import DISK, Disk, write_atomically
from edgekit_runtime.system.own_process import forbid_dumps
from edgekit_runtime.system.resource_errors import check_lack

_FORMAT: Final = 1
_MAX_KEY_FILE_BYTES: Final = 4096


class SealedMemory:
    """Plaintext in sealed memory. The descriptor is closed when this object is deleted."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True, eq=False)
class Decrypted:
    """The plaintext of a file.

    Attributes:
        local_key: key to encrypt files that this device derives from the plaintext and stores.
        key_file: content of the file with the wrapped key, or empty if the header contains the key.
    """

    memory: SealedMemory
    local_key: ContentKey = field(repr=False)
    key_file: bytes = b""


def decrypt_file(path: Path, max_bytes: int) -> Decrypted:
    """Return the plaintext of an encrypted file. From this call on, the process writes no core dumps.

    Raises:
        EncryptionError: the file is not for this device, is damaged, or is larger than `max_bytes`, or its
            key is missing.
        UnavailableError: the file cannot be read now, or this device's key cannot be used now.
    """
    forbid_dumps()
    with open_file(path) as file:
        header = parse_head(file, str(path))
        content_key, key_file = find_content_key(path, header)
        memory = SealedMemory(fill_memory(file, header, content_key, str(path), max_bytes=max_bytes))
    secret = derive(content_key.secret, b"", b"edgekit local files 1\0")
    return Decrypted(memory, ContentKey(content_key.key_id, secret), key_file)


def write_key_file(path: Path, key_id: str, wrapped: str, disk: Disk = DISK) -> None:
    """Write the file with the wrapped key for the encrypted file at `path`, see `key_path`.

    `wrapped` is in base64. The encrypted file need not exist yet.
    """
    content = encode_json({"format": _FORMAT, "key_id": key_id, "wrapped": wrapped})
    with write_atomically(key_path(path), mode=0o600, disk=disk) as file:
        file.write(content)


def find_content_key(path: Path, header: Header) -> tuple[ContentKey, bytes]:
    """Return the content key of a file and the content of its key file.

    The second value is empty if the header contains the key.

    Raises:
        EncryptionError: the file is not for this device, or its key is missing or damaged.
        UnavailableError: this device's key cannot be used now.
    """
    device = read_device_key()
    if device is None:
        raise EncryptionError(
            f"{path}: is encrypted, and this device has no key; `edgekit-device keys device` makes one, for"
            " which the package must be encrypted"
        )
    wrapped, content = header.recipients.get(device.key_id), b""
    if wrapped is None:
        wrapped, content = _read_key_file(path, header, device)
    try:
        return device.unwrap(wrapped, header.key_id), content
    except EncryptionError as cause:
        raise EncryptionError(f"{path}: {cause}") from cause


def _read_key_file(path: Path, header: Header, device: DeviceKey) -> tuple[str, bytes]:
    where = key_path(path)
    if not where.exists():
        raise EncryptionError(
            f"{path}: is not encrypted for this device, whose key is {device.key_id[:16]}, and has no"
            f" {where.name} beside it"
        )
    try:
        with open_file(where) as file:
            content = file.read(_MAX_KEY_FILE_BYTES)
    except OSError as cause:
        check_lack(cause, f"cannot read {where}")
        raise EncryptionError(f"cannot read {where}: {cause.strerror}") from cause
    fields = Fields(decode_json(content, str(where), EncryptionError), str(where), EncryptionError)
    wrapped = fields.take("wrapped")
    if fields.take("format") != _FORMAT or not isinstance(wrapped, str):
        raise EncryptionError(f"{where}: is damaged, or of a newer edgekit")
    if (key_id := fields.take("key_id")) != header.key_id:
        raise EncryptionError(f"{where}: holds the key {key_id}, the package needs {header.key_id}")
    return wrapped, content
