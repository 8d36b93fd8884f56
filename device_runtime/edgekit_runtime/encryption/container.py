"""The format of an encrypted file. It depends only on the content key, the header and the plaintext.

    b"EDGEENC1" | length of the header, 4 bytes, big endian | header, canonical JSON | chunks

Each chunk contains `chunk_bytes` of plaintext, encrypted with AES-256-GCM, and the tag. The last chunk may be
shorter. The key and the nonce prefix are derived from the content key by HKDF-SHA256, with the header's salt
as salt and the whole head as info. Each file therefore has its own key, and a file with a changed header
cannot be decrypted. A nonce consists of the prefix, the number of the chunk, and a flag for the last chunk,
so moved, removed or added chunks are detected. A device that rebuilds the plaintext from a delta can also
rebuild the same encrypted file.

Source: Hoang, Reyhanitabar, Rogaway, Vizár, "Online Authenticated-Encryption and its Nonce-Reuse
    Misuse-Resistance", the STREAM construction; Tink, "AES-GCM-HKDF Streaming AEAD".
"""

import binascii
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from edgekit_runtime.canonical_json import OPTIONAL, Record, decode_json, encode_json
from edgekit_runtime.encryption import MAGIC
from edgekit_runtime.encryption.key_derivation import derive
from edgekit_runtime.errors import PackageError, UnavailableError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.machine import machine_bytes
from edgekit_runtime.system.resource_errors import check_lack

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

FORMAT: Final = 1
KEY_BYTES: Final = 32
MAX_PLAIN_BYTES: Final = 4 << 30
MAX_RECIPIENTS: Final = 1000
_MAX_HEADER_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 16
_TAG_BYTES: Final = 16
_LENGTH: Final = struct.Struct(">I")
_NONCE: Final = struct.Struct(">7sIB")  # 12 bytes: prefix, number of the chunk, whether it is the last one
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class EncryptionError(PackageError):
    """An encrypted file is damaged or not for this device, or its key is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Record):
    """The header of an encrypted file. It is readable without a key.

    Attributes:
        key_id: id of the content key, chosen at random.
        salt: 32 random bytes in hexadecimal, different for each file.
        plain_bytes: size of the plaintext.
        chunk_bytes: number of plaintext bytes in a chunk. The last chunk may have fewer.
        recipients: a dict from the id of a device's key to the content key wrapped for this device, in
            base64.

    Raises:
        EncryptionError: a field has the wrong type or value.
    """

    key_id: str
    salt: str
    plain_bytes: int
    chunk_bytes: int = _CHUNK_BYTES
    format: int = FORMAT
    recipients: Mapping[str, str] = field(default_factory=dict, hash=False, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        _require(self.format == FORMAT, f"format {self.format!r}, this edgekit reads {FORMAT}; update it")
        _require(_is_hex(self.key_id, 16), "key_id is not 32 hexadecimal digits")
        _require(_is_hex(self.salt, 32), "salt is not 64 hexadecimal digits")
        for name, least, most in (
            ("plain_bytes", 0, MAX_PLAIN_BYTES),
            ("chunk_bytes", 1 << 10, 1 << 20),
        ):
            value = getattr(self, name)
            is_valid = type(value) is int and least <= value <= most
            _require(is_valid, f"{name} is {value!r}, expected {least} to {most}")
        valid = isinstance(self.recipients, Mapping) and len(self.recipients) <= MAX_RECIPIENTS
        _require(valid, f"recipients is no object of at most {MAX_RECIPIENTS}")
        for device, wrapped in self.recipients.items():
            _require(_is_hex(device, 32) and isinstance(wrapped, str), "one of the recipients is malformed")

    @property
    def chunk_count(self) -> int:
        return max(1, -(-self.plain_bytes // self.chunk_bytes))

    @property
    def head(self) -> bytes:
        """The content of the file before its chunks."""
        content = encode_json(self.to_json())
        _require(len(content) <= _MAX_HEADER_BYTES, f"is over {_MAX_HEADER_BYTES} bytes")
        return MAGIC + _LENGTH.pack(len(content)) + content

    @property
    def file_bytes(self) -> int:
        return len(self.head) + self.plain_bytes + _TAG_BYTES * self.chunk_count


@dataclass(frozen=True, slots=True)
class ContentKey:
    """A key of 32 bytes that encrypts files. Its id, 32 hexadecimal digits, is public."""

    key_id: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _require(_is_hex(self.key_id, 16) and len(self.secret) == KEY_BYTES, "the content key is malformed")

    def to_text(self) -> str:
        """Return `KEY_ID:SECRET` in hexadecimal, for another process of this device."""
        return f"{self.key_id}:{self.secret.hex()}"

    @classmethod
    def from_text(cls, text: str) -> "ContentKey":
        key_id, _, secret = text.partition(":")
        return cls(key_id, bytes.fromhex(secret))


def make_content_key() -> ContentKey:
    return ContentKey(os.urandom(16).hex(), os.urandom(KEY_BYTES))


def make_header(
    content_key: ContentKey, plain_bytes: int, recipients: Mapping[str, str] | None = None
) -> Header:
    """Return the header of a new file, with a new random salt."""
    return Header(
        key_id=content_key.key_id,
        salt=os.urandom(32).hex(),
        plain_bytes=plain_bytes,
        recipients=dict(recipients or {}),
    )


def is_encrypted(path: Path) -> bool:
    """Return whether the file at `path` begins like an encrypted file, False if it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, EncryptionError):
        return False


def read_header(path: Path) -> Header:
    """Return the header of the encrypted file at `path`.

    Raises:
        EncryptionError: the file cannot be read, is not encrypted, or is not as long as its header states.
        UnavailableError: the machine lacks file descriptors or memory now.
    """
    with open_file(path) as file:
        return parse_head(file, str(path))


def parse_head(file: BinaryIO, where: str) -> Header:
    """Return the header of `file`, and leave `file` at the first chunk. For errors see `read_header`."""
    start = file.read(len(MAGIC) + _LENGTH.size)
    if len(start) < len(MAGIC) + _LENGTH.size or not start.startswith(MAGIC):
        raise EncryptionError(f"{where}: is no encrypted file")
    (size_bytes,) = _LENGTH.unpack_from(start, len(MAGIC))
    if size_bytes > _MAX_HEADER_BYTES:
        raise EncryptionError(f"{where}: its header has {size_bytes} bytes, the limit is {_MAX_HEADER_BYTES}")
    content = file.read(size_bytes)
    document = decode_json(content, f"{where}: header", EncryptionError)
    header = Header.from_json(document, f"{where}: header", EncryptionError)
    actual_bytes = os.fstat(file.fileno()).st_size
    if actual_bytes != header.file_bytes:
        raise EncryptionError(
            f"{where}: has {actual_bytes} bytes, its header says {header.file_bytes}; fetch it again"
        )
    return header


def encrypt(source: BinaryIO, sink: BinaryIO, content_key: ContentKey, header: Header) -> None:
    """Encrypt `source` and write the encrypted file to `sink`, see `encrypt_chunks`."""
    sink.writelines(encrypt_chunks(source.read, content_key, header))


def encrypt_chunks(read: Callable[[int], bytes], content_key: ContentKey, header: Header) -> Iterator[bytes]:
    """Yield the encrypted file in parts. The same arguments always give the same bytes.

    `read` returns the next bytes of the plaintext, and fewer than requested only at the end.

    Raises:
        EncryptionError: the size of the plaintext or the id of `content_key` differs from `header`.
    """
    _check_key(content_key, header, "the file")
    cipher, prefix = _make_cipher(content_key, header)
    yield header.head
    left_bytes = header.plain_bytes
    for number in range(header.chunk_count):
        size_bytes = min(header.chunk_bytes, left_bytes)
        chunk = read(size_bytes)
        if len(chunk) != size_bytes:
            raise EncryptionError("the plaintext is shorter than its header says")
        left_bytes -= size_bytes
        yield cipher.encrypt(_nonce(prefix, number, header), chunk, None)
    if read(1):
        raise EncryptionError("the plaintext is longer than its header says")


def encrypt_file(
    source: Path, target: Path, content_key: ContentKey, recipients: Mapping[str, str] | None = None
) -> Header:
    """Encrypt the file at `source` with a new random salt, and write the result to `target` atomically.

    Args:
        source: path of a file, such as a package.
        target: path of the file to write.
        content_key: key to encrypt with. Several files may share it.
        recipients: see `Header`, or None if the devices receive the wrapped key in another way.

    Raises:
        EncryptionError: `source` cannot be read, or is encrypted already.
        OutputError: `target` cannot be written.
    """
    if is_encrypted(source):
        raise EncryptionError(f"{source}: is encrypted already; encrypt the package that it was made of")
    with open_file(source) as plain, write_atomically(target) as file:
        header = make_header(content_key, os.fstat(plain.fileno()).st_size, recipients)
        encrypt(plain, file, content_key, header)
    return header


def decrypt_chunks(path: Path, content_key: ContentKey) -> Iterator[bytes]:
    """Yield the verified chunks of the plaintext of the encrypted file at `path`.

    A missing chunk is detected only at the end of the file.

    Raises:
        EncryptionError: the file is damaged, or encrypted with another key.
        UnavailableError: the file cannot be read now.
    """
    with open_file(path) as file:
        header = parse_head(file, str(path))
        yield from read_chunks(file, header, content_key, str(path))


def read_chunks(file: BinaryIO, header: Header, content_key: ContentKey, where: str) -> Iterator[bytes]:
    """Yield the plaintext of `file`, which must be at its first chunk. See `decrypt_chunks`."""
    from cryptography.exceptions import InvalidTag

    _check_key(content_key, header, where)
    cipher, prefix = _make_cipher(content_key, header)
    left_bytes = header.plain_bytes
    for number in range(header.chunk_count):
        size_bytes = min(header.chunk_bytes, left_bytes)
        left_bytes -= size_bytes
        try:
            yield cipher.decrypt(_nonce(prefix, number, header), file.read(size_bytes + _TAG_BYTES), None)
        except InvalidTag as cause:
            raise EncryptionError(
                f"{where}: part {number + 1} of {header.chunk_count} is damaged or of another file;"
                " fetch it again"
            ) from cause
        except OSError as cause:
            check_lack(cause, f"cannot read {where}")
            raise EncryptionError(f"cannot read {where}: {cause.strerror}") from cause


def decrypt_to_memory(path: Path, content_key: ContentKey, max_bytes: int = MAX_PLAIN_BYTES) -> int:
    """Decrypt the file at `path` into a sealed memory file, and return its descriptor. The caller closes it.

    Raises:
        EncryptionError: the file is damaged, encrypted with another key, or has more than `max_bytes` of
            plaintext.
        UnavailableError: the file cannot be read now, or there is too little memory.
    """
    with open_file(path) as file:
        header = parse_head(file, str(path))
        return fill_memory(file, header, content_key, str(path), max_bytes=max_bytes)


def fill_memory(
    file: BinaryIO, header: Header, content_key: ContentKey, where: str, *, max_bytes: int = MAX_PLAIN_BYTES
) -> int:
    """Decrypt `file`, which must be at its first chunk, in the same way as `decrypt_to_memory`."""
    if header.plain_bytes > max_bytes:
        raise EncryptionError(f"{where}: holds {header.plain_bytes} bytes, the limit is {max_bytes}")
    # Who made the file is verified afterwards: it must not fill the memory before. An engine needs as much.
    if header.plain_bytes > (total_bytes := machine_bytes()) // 2:
        raise UnavailableError(
            f"{where}: holds {header.plain_bytes} bytes, over half of this machine's memory of {total_bytes}"
        )
    try:
        descriptor = os.memfd_create("edgekit-decrypted", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for chunk in read_chunks(file, header, content_key, where):
                _write_all(descriptor, chunk)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as cause:
        check_lack(cause, f"{where}: cannot be decrypted into memory")
        raise EncryptionError(f"{where}: cannot be decrypted into memory: {cause.strerror}") from cause
    return descriptor


def _make_cipher(content_key: ContentKey, header: Header) -> "tuple[AESGCM, bytes]":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 9 MB, which plain packages do without

    salt = bytes.fromhex(header.salt)
    material = derive(content_key.secret, salt, b"edgekit file 1\0" + header.head, KEY_BYTES + 7)
    return AESGCM(material[:KEY_BYTES]), material[KEY_BYTES:]


def _nonce(prefix: bytes, number: int, header: Header) -> bytes:
    return _NONCE.pack(prefix, number, number == header.chunk_count - 1)


def _check_key(content_key: ContentKey, header: Header, where: str) -> None:
    if content_key.key_id != header.key_id:
        raise EncryptionError(
            f"{where}: is encrypted with key {header.key_id}, this key is {content_key.key_id}"
        )


def open_file(path: Path) -> BinaryIO:
    """Open the regular file at `path` for reading.

    Raises:
        EncryptionError: there is no such file, or it cannot be read.
        UnavailableError: the machine lacks file descriptors or memory now.
    """
    try:
        # Not blocking, since opening a FIFO for reading would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as cause:
        check_lack(cause, f"cannot read {path}")
        raise EncryptionError(f"cannot read {path}: {cause.strerror}") from cause
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise EncryptionError(f"{path}: is no regular file")
    return os.fdopen(descriptor, "rb")


def _write_all(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _is_hex(text: object, size_bytes: int) -> bool:
    if not isinstance(text, str) or text != text.lower():
        return False
    try:
        return len(binascii.unhexlify(text)) == size_bytes
    except ValueError:
        return False


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EncryptionError(f"encrypted file: {message}")
