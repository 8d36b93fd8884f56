"""Encrypted files and wrapped keys: what is written is read, and every attack is refused."""

import base64
import io
import os
import struct
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.encryption.container import (
    MAGIC,
    ContentKey,
    EncryptionError,
    Header,
    decrypt_chunks,
    decrypt_to_memory,
    encrypt,
    is_encrypted,
    make_content_key,
    make_header,
    read_header,
)
from edgekit_runtime.encryption.key_wrapping import (
    Aead,
    encode_point,
    make_exchange,
    unseal,
    unwrap_key,
    wrap_key,
)

KEY = ContentKey("00" * 16, bytes(range(32)))
CHUNK = 1024


def write_encrypted(path: Path, content: bytes, key: ContentKey = KEY, *, salt: str = "11" * 32) -> Header:
    header = Header(key_id=key.key_id, salt=salt, plain_bytes=len(content), chunk_bytes=CHUNK)
    with path.open("wb") as sink:
        encrypt(io.BytesIO(content), sink, key, header)
    return header


def read_all(path: Path, key: ContentKey = KEY) -> bytes:
    return b"".join(decrypt_chunks(path, key))


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7])
def test_file_of_any_size_is_read_as_it_was_written(tmp_path: Path, size_bytes: int) -> None:
    content = os.urandom(size_bytes)
    header = write_encrypted(tmp_path / "f", content)
    assert is_encrypted(tmp_path / "f")
    assert read_header(tmp_path / "f") == header
    assert read_all(tmp_path / "f") == content
    descriptor = decrypt_to_memory(tmp_path / "f", KEY)
    try:
        assert os.pread(descriptor, len(content) + 1, 0) == content
    finally:
        os.close(descriptor)


def test_same_header_gives_the_same_bytes(tmp_path: Path) -> None:
    content = os.urandom(3 * CHUNK)
    write_encrypted(tmp_path / "a", content)
    write_encrypted(tmp_path / "b", content)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_same_content_key_gives_each_file_a_key_of_its_own(tmp_path: Path) -> None:
    """With one key and one nonce, the difference of two files would be that of their plaintexts."""
    key = make_content_key()
    headers = [make_header(key, CHUNK) for _ in range(2)]
    files = []
    for header in headers:
        sink = io.BytesIO()
        encrypt(io.BytesIO(bytes(CHUNK)), sink, key, header)
        files.append(sink.getvalue()[len(header.head) :])
    assert headers[0].salt != headers[1].salt
    assert files[0] != files[1]


def test_memory_is_sealed(tmp_path: Path) -> None:
    write_encrypted(tmp_path / "f", b"weights")
    descriptor = decrypt_to_memory(tmp_path / "f", KEY)
    try:
        with pytest.raises(PermissionError):
            os.write(descriptor, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _swap_chunks(data: bytes, head_bytes: int) -> bytes:
    size = CHUNK + 16
    body = data[head_bytes:]
    return data[:head_bytes] + body[size : 2 * size] + body[:size] + body[2 * size :]


def _change_salt(data: bytes, _head_bytes: int) -> bytes:
    return data.replace(b"11" * 32, b"12" + b"11" * 31)


def _shorten(data: bytes, _head_bytes: int) -> bytes:
    """Drop the last chunk, and say so in the header."""
    header = Header(key_id=KEY.key_id, salt="11" * 32, plain_bytes=2 * CHUNK, chunk_bytes=CHUNK)
    return header.head + data[_head_bytes:][: 2 * (CHUNK + 16)]


def _add_member(data: bytes, head_bytes: int) -> bytes:
    header = encode_json(
        {
            **Header(key_id=KEY.key_id, salt="11" * 32, plain_bytes=3 * CHUNK, chunk_bytes=CHUNK).to_json(),
            "note": "x",
        }
    )
    return MAGIC + struct.pack(">I", len(header)) + header + data[head_bytes:]


ATTACKS = {
    "two chunks in another order": _swap_chunks,
    "the last byte is missing": lambda data, _: data[:-1],
    "the last chunk is missing": lambda data, _: data[: -(CHUNK + 16)],
    "the last chunk is missing, and the header says so": _shorten,
    "a byte is added": lambda data, _: data + b"x",
    "a chunk is added": lambda data, _: data + data[-(CHUNK + 16) :],
    "another salt": _change_salt,
    "another member in the header": _add_member,
    "a bit of a chunk": lambda data, head: data[: head + 5] + bytes([data[head + 5] ^ 1]) + data[head + 6 :],
    "a bit of a tag": lambda data, _: data[:-1] + bytes([data[-1] ^ 1]),
    "nothing but the magic": lambda data, _: data[: len(MAGIC)],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_changed_file_is_refused(tmp_path: Path, attack: str) -> None:
    header = write_encrypted(tmp_path / "f", os.urandom(3 * CHUNK))
    data = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(ATTACKS[attack](data, len(header.head)))
    assert (tmp_path / "f").read_bytes() != data
    with pytest.raises(EncryptionError):
        read_all(tmp_path / "f")
    with pytest.raises(EncryptionError):
        decrypt_to_memory(tmp_path / "f", KEY)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("plain_bytes", 1 << 50),
        ("plain_bytes", -1),
        ("plain_bytes", True),
        ("plain_bytes", 1.5),
        ("chunk_bytes", 1 << 40),
        ("chunk_bytes", 0),
        ("salt", "11"),
        ("salt", 5),
        ("key_id", "XY" * 16),
        ("format", 2),
        ("recipients", []),
        ("recipients", {"x": "y"}),
        ("recipients", {"00" * 32: 5}),
    ],
)
def test_header_with_a_wrong_member_is_refused(tmp_path: Path, member: str, value: object) -> None:
    right = Header(key_id=KEY.key_id, salt="11" * 32, plain_bytes=0).to_json()
    content = encode_json({**right, member: value})  # type: ignore[dict-item]
    (tmp_path / "f").write_bytes(MAGIC + struct.pack(">I", len(content)) + content + bytes(16))
    with pytest.raises(EncryptionError, match=member):
        read_header(tmp_path / "f")


def test_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(MAGIC + struct.pack(">I", 0xFFFFFFFF) + b"{")
    with pytest.raises(EncryptionError, match="limit"):
        read_header(tmp_path / "f")


def test_size_over_the_limit_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    write_encrypted(tmp_path / "f", bytes(2 * CHUNK))
    with pytest.raises(EncryptionError, match="limit is 1024"):
        decrypt_to_memory(tmp_path / "f", KEY, max_bytes=1024)


def test_another_key_is_refused(tmp_path: Path) -> None:
    write_encrypted(tmp_path / "f", b"weights")
    with pytest.raises(EncryptionError, match="this key is"):
        read_all(tmp_path / "f", make_content_key())
    with pytest.raises(EncryptionError, match="damaged"):
        read_all(tmp_path / "f", ContentKey(KEY.key_id, bytes(32)))


@pytest.mark.parametrize("missing", ["file", "folder", "fifo"])
def test_what_is_no_file_is_refused(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "f"
    if missing == "folder":
        path.mkdir()
    elif missing == "fifo":
        os.mkfifo(path)
    assert not is_encrypted(path)
    with pytest.raises(EncryptionError):
        read_header(path)


# RFC 9180, A.3.1, the first encryption: the same suite but AES-128-GCM, and with associated data.
RFC_PRIVATE = "f3ce7fdae57e1a310d87f1ebbde6f328be0a99cdbcadf4d6589cf29de4b8ffd2"
RFC_PUBLIC = (
    "04fe8c19ce0905191ebc298a9245792531f26f0cece2460639e8bc39cb7f706a826a779b4cf969b8a0e539c7f62fb3d30ad6aa8f80"
    "e30f1d128aafd68a2ce72ea0"
)
RFC_ENCAPSULATED = (
    "04a92719c6195d5085104f469a8b9814d5838ff72b60501e2c4466e5e67b325ac98536d7b61a1af4b78e5b7f951c0900be863c403c"
    "e65c9bfcb9382657222d18c4"
)
RFC_CIPHERTEXT = "5ad590bb8baa577f8619db35a36311226a896e7342a6d836d8b7bcd2f20b6c7f9076ac232e3ab2523f39513434"


def test_vector_of_the_rfc_is_opened() -> None:
    private = ec.derive_private_key(int(RFC_PRIVATE, 16), ec.SECP256R1())
    message = unseal(
        bytes.fromhex(RFC_ENCAPSULATED + RFC_CIPHERTEXT),
        make_exchange(private),
        bytes.fromhex(RFC_PUBLIC),
        b"Ode on a Grecian Urn",
        aead=Aead(b"\x00\x01", 16),
        associated=b"Count-0",
    )
    assert message == b"Beauty is truth, truth beauty"


def test_another_implementation_opens_what_is_wrapped_and_wraps_what_is_opened() -> None:
    hpke = pytest.importorskip("cryptography.hazmat.primitives.hpke")  # from release 47 on
    suite = hpke.Suite(hpke.KEM.P256, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    private, key = ec.generate_private_key(ec.SECP256R1()), make_content_key()
    info = b"edgekit content key 1\0" + key.key_id.encode()
    point = encode_point(private.public_key())
    assert suite.decrypt(base64.b64decode(wrap_key(key, point)), private, info) == key.secret
    wrapped = base64.b64encode(suite.encrypt(key.secret, private.public_key(), info)).decode()
    assert unwrap_key(wrapped, key.key_id, make_exchange(private), point) == key


def test_wrapped_key_of_another_device_or_id_is_refused() -> None:
    private, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    key, point = make_content_key(), encode_point(private.public_key())
    wrapped = wrap_key(key, point)
    assert unwrap_key(wrapped, key.key_id, make_exchange(private), point) == key
    with pytest.raises(EncryptionError, match="of another device"):
        unwrap_key(wrapped, key.key_id, make_exchange(other), encode_point(other.public_key()))
    with pytest.raises(EncryptionError, match="of another device"):
        unwrap_key(wrapped, "ff" * 16, make_exchange(private), point)


@pytest.mark.parametrize("wrapped", ["", "!", "AAAA", base64.b64encode(b"\4" + bytes(112)).decode()])
def test_malformed_wrapped_key_is_refused(wrapped: str) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(EncryptionError):
        unwrap_key(wrapped, KEY.key_id, make_exchange(private), encode_point(private.public_key()))
