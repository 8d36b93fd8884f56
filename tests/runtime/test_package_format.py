"""The package format is what its page says: a second implementation of that page, and its examples."""

import base64
import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "package-format.md"


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def build_archive(members: list[tuple[bytes, bytes]]) -> bytes:
    """Section "Archive" of the page."""
    archive, directory = b"", b""
    for name, content in members:
        start = len(archive)
        payload = (start + 30 + len(name) + 6 + 63) // 64 * 64
        extra = payload - start - 30 - len(name)
        checks = struct.pack("<III", zlib.crc32(content), len(content), len(content))
        archive += b"PK\3\4" + struct.pack("<HHHHH", 10, 0, 0, 0, 0x21) + checks
        archive += struct.pack("<HH", len(name), extra) + name
        archive += struct.pack("<HHH", 0xD935, extra - 4, 64) + bytes(extra - 6) + content
        directory += b"PK\1\2" + struct.pack("<HHHHHH", 0x0314, 10, 0, 0, 0, 0x21) + checks
        directory += struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0x81A40000, start) + name
    end = struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), len(archive), 0)
    return archive + directory + b"PK\5\6" + end


def build_envelope(manifest: bytes, key: Ed25519PrivateKey) -> bytes:
    """Section "signature.dsse.json" of the page."""
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    key_id = hashlib.sha256(
        canonical({"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": public}})
    ).hexdigest()
    payload = canonical(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [
                {"name": "manifest.json", "digest": {"sha256": hashlib.sha256(manifest).hexdigest()}}
            ],
            "predicateType": "https://edgekit.dev/package/v1",
            "predicate": {},
        }
    )
    signed = b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload)
    return canonical(
        {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"keyid": key_id, "sig": base64.b64encode(key.sign(signed)).decode()}],
        }
    )


def test_a_second_implementation_of_the_page_builds_the_same_bytes(maker: Any, package_path: Path) -> None:
    manifest = maker.manifest().to_bytes()
    envelope = build_envelope(manifest, Ed25519PrivateKey.from_private_bytes(b"\1" * 32))
    artifacts = [(path.encode(), content) for path, content in sorted(maker.artifacts.items())]
    archive = build_archive([(b"manifest.json", manifest), (b"signature.dsse.json", envelope), *artifacts])
    assert package_path.read_bytes() == archive


def shape_of(value: Any) -> Any:
    """Return a document with its values replaced by the names of their types."""
    if isinstance(value, dict):
        return {key: shape_of(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape_of(inner) for inner in value]
    return type(value).__name__


def read_examples() -> list[Any]:
    return [json.loads(block.split("```")[0]) for block in PAGE.read_text("utf-8").split("```json\n")[1:]]


def test_the_manifest_on_the_page_has_the_fields_of_a_real_one(maker: Any) -> None:
    example, real = read_examples()[0], json.loads(maker.manifest().to_bytes())
    free = {"figures", "provenance"}
    assert shape_of({key: value for key, value in example.items() if key not in free}) == shape_of(
        {key: value for key, value in real.items() if key not in free}
    )


def test_the_envelope_on_the_page_has_the_fields_of_a_real_one(maker: Any) -> None:
    envelope = json.loads(maker.signer(b"{}"))
    assert shape_of(read_examples()[1]) == shape_of(envelope)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_key_id_is_computed_as_the_page_says(seed: int, maker: Any, other_signer: Any) -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    key_id = json.loads(build_envelope(b"", key))["signatures"][0]["keyid"]
    assert key_id == {1: maker.signer, 2: other_signer}[seed].key_id
