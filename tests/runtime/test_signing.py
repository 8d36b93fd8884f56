import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from securesystemslib.signer import CryptoSigner
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DigestError, SignatureError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.canonical_zip import write_archive
from edgekit_runtime.package.manifest import MANIFEST_NAME, SIGNATURE_NAME
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.dsse import (
    EVIDENCE_PREDICATE_TYPE,
    PACKAGE_PREDICATE_TYPE,
    Envelope,
    Statement,
    read_unverified,
)
from edgekit_runtime.trust.trust_store import TrustStore, read_public_key
from edgekit_toolkit.packaging.signing_keys import StatementSigner

PAYLOAD = Statement("manifest.json", "0" * 64, PACKAGE_PREDICATE_TYPE, {"a": 1}).to_bytes()


def encode(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def verify(data: bytes, maker: Any) -> Statement:
    return maker.trust.verify(data, PACKAGE_PREDICATE_TYPE, "here")[0]


def test_a_signed_statement_verifies(maker: Any) -> None:
    assert maker.trust.verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "here") == (
        Statement("manifest.json", "0" * 64, PACKAGE_PREDICATE_TYPE, {"a": 1}),
        maker.signer.key_id,
    )


def test_the_payload_is_an_in_toto_statement(maker: Any) -> None:
    envelope = json.loads(maker.signer(PAYLOAD))
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert json.loads(base64.b64decode(envelope["payload"])) == {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "manifest.json", "digest": {"sha256": "0" * 64}}],
        "predicateType": "https://edgekit.dev/package/v1",
        "predicate": {"a": 1},
    }


def test_the_signature_is_that_of_the_dsse_specification(maker: Any) -> None:
    envelope = json.loads(maker.signer(PAYLOAD))
    kind = envelope["payloadType"].encode()
    signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(PAYLOAD), PAYLOAD)
    public_key = ed25519.Ed25519PrivateKey.from_private_bytes(b"\1" * 32).public_key()
    assert public_key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed) is None


def test_an_unknown_key_is_refused_by_its_id(other_signer: StatementSigner, maker: Any) -> None:
    with pytest.raises(SignatureError, match=f"signed by key {other_signer.key_id}") as caught:
        verify(other_signer(PAYLOAD), maker)
    assert caught.value.key_id == other_signer.key_id


def test_another_keys_signature_under_a_trusted_id_is_refused(
    other_signer: StatementSigner, maker: Any
) -> None:
    envelope = json.loads(other_signer(PAYLOAD))
    envelope["signatures"][0]["keyid"] = maker.signer.key_id
    with pytest.raises(SignatureError, match="does not fit") as caught:
        verify(encode(envelope), maker)
    assert caught.value.key_id == maker.signer.key_id


def test_an_empty_trust_store_accepts_nothing(maker: Any) -> None:
    with pytest.raises(SignatureError, match="trusted are: none"):
        TrustStore([]).verify(maker.signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "here")


def test_a_signature_for_another_purpose_is_refused(maker: Any) -> None:
    evidence = Statement("manifest.json", "0" * 64, EVIDENCE_PREDICATE_TYPE, {})
    with pytest.raises(SignatureError, match="predicate type is"):
        verify(maker.signer(evidence.to_bytes()), maker)


def stray_bits(envelope: dict[str, Any]) -> None:
    # An ed25519 signature has 64 bytes: its base64 ends in "==" and the digit before has 4 unused bits.
    signature = envelope["signatures"][0]
    digit = signature["sig"][85]
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    signature["sig"] = signature["sig"][:85] + digits[digits.index(digit) + 1] + "=="


TAMPERINGS: dict[str, Callable[[dict[str, Any]], object]] = {
    "other payload": lambda e: e.update(payload=base64.b64encode(PAYLOAD.replace(b"0", b"1")).decode()),
    "other payload type": lambda e: e.update(payloadType="text/plain"),
    "no signature": lambda e: e.update(signatures=[]),
    "two signatures": lambda e: e["signatures"].append({"keyid": "x", "sig": "AAAA"}),
    "the same signature twice": lambda e: e["signatures"].append(dict(e["signatures"][0])),
    "unknown field": lambda e: e.update(note="hello"),
    "unknown field of the signature": lambda e: e["signatures"][0].update(note="hello"),
    "stray bits in base64": stray_bits,
    "URL-safe base64": lambda e: e.update(payload=e["payload"][:-4] + "-_=="),
    "missing payload": lambda e: e.pop("payload"),
    "missing key id": lambda e: e["signatures"][0].pop("keyid"),
    "missing sig": lambda e: e["signatures"][0].pop("sig"),
    "number as payload": lambda e: e.update(payload=7),
    "number as payload type": lambda e: e.update(payloadType=7),
    "number as signature": lambda e: e.update(signatures=[7]),
    "number as key id": lambda e: e["signatures"][0].update(keyid=7),
    "list as key id": lambda e: e["signatures"][0].update(keyid=[]),
    "object as signatures": lambda e: e.update(signatures={}),
    "short signature": lambda e: e["signatures"][0].update(sig="AAAA"),
    "empty signature": lambda e: e["signatures"][0].update(sig=""),
}


@cases("tampering", TAMPERINGS)
def test_an_envelope_that_was_tampered_with_is_refused(tampering: str, maker: Any) -> None:
    envelope = json.loads(maker.signer(PAYLOAD))
    before = encode(envelope)
    TAMPERINGS[tampering](envelope)
    assert encode(envelope) != before
    with pytest.raises(SignatureError):
        verify(encode(envelope), maker)


@pytest.mark.parametrize("suffix", [b"\n", b" ", b"\0"])
def test_bytes_after_the_envelope_are_refused(suffix: bytes, maker: Any) -> None:
    with pytest.raises(SignatureError):
        verify(maker.signer(PAYLOAD) + suffix, maker)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[]",
        PAYLOAD.replace(b"Statement/v1", b"Statement/v2"),
        PAYLOAD.replace(b'"sha256"', b'"sha512"'),
        PAYLOAD.replace(b"0" * 64, b"0" * 63),
        PAYLOAD.replace(b'{"a":1}', b"[1]"),
        PAYLOAD.replace(b'"subject":[', b'"subject":[{},'),
        PAYLOAD.replace(b'"subject":[{', b'"subject":[7,{'),
        PAYLOAD + b" ",
    ],
)
def test_a_well_signed_payload_that_is_no_statement_is_refused(payload: bytes, maker: Any) -> None:
    with pytest.raises(SignatureError, match=r"^here: "):
        verify(maker.signer(payload), maker)


def test_a_predicate_that_is_no_json_is_refused() -> None:
    with pytest.raises(SignatureError, match="cannot be written"):
        Statement("x", "0" * 64, EVIDENCE_PREDICATE_TYPE, {"t": float("inf")}).to_bytes()


def test_a_package_of_an_untrusted_key_is_refused(
    other_signer: StatementSigner, maker: Any, tmp_path: Path
) -> None:
    write_package(tmp_path / "x.edgepkg", maker.manifest(), maker.artifacts, other_signer)
    with pytest.raises(SignatureError) as caught:
        read_package(tmp_path / "x.edgepkg", maker.trust)
    assert caught.value.key_id == other_signer.key_id


def test_a_signature_for_another_package_is_refused(maker: Any, tmp_path: Path) -> None:
    other = maker.manifest(version="0.9.0").to_bytes()
    statement = Statement(MANIFEST_NAME, hashlib.sha256(other).hexdigest(), PACKAGE_PREDICATE_TYPE, {})
    head = [
        (MANIFEST_NAME, maker.manifest().to_bytes()),
        (SIGNATURE_NAME, maker.signer(statement.to_bytes())),
    ]
    with (tmp_path / "x.edgepkg").open("wb") as file:
        write_archive(file, [*head, *sorted(maker.artifacts.items())])
    with pytest.raises(DigestError, match=r"manifest\.json has sha256"):
        read_package(tmp_path / "x.edgepkg", maker.trust)


def test_a_signature_for_another_subject_is_refused(maker: Any, tmp_path: Path) -> None:
    manifest = maker.manifest().to_bytes()
    statement = Statement("other.json", hashlib.sha256(manifest).hexdigest(), PACKAGE_PREDICATE_TYPE, {})
    head = [(MANIFEST_NAME, manifest), (SIGNATURE_NAME, maker.signer(statement.to_bytes()))]
    with (tmp_path / "x.edgepkg").open("wb") as file:
        write_archive(file, [*head, *sorted(maker.artifacts.items())])
    with pytest.raises(SignatureError, match=r"is for 'other\.json'"):
        read_package(tmp_path / "x.edgepkg", maker.trust)


def test_a_package_signed_by_an_ecdsa_key_reads(maker: Any, tmp_path: Path) -> None:
    """Many HSM and KMS services offer no ed25519."""
    signer = CryptoSigner(ec.derive_private_key(12345, ec.SECP256R1()))
    write_package(tmp_path / "x.edgepkg", maker.manifest(), maker.artifacts, StatementSigner(signer))
    with read_package(tmp_path / "x.edgepkg", TrustStore([signer.public_key])) as package:
        assert package.key_id == signer.public_key.keyid


def public_pem(seed: int) -> bytes:
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def test_a_folder_of_public_keys_is_a_trust_store(maker: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pub.pem").write_bytes(public_pem(1))
    (tmp_path / "b.pub.pem").write_bytes(public_pem(2))
    (tmp_path / "notes.txt").write_text("no key")
    trust = TrustStore.from_folder(tmp_path)
    assert (len(trust.key_ids), trust.key_ids[0]) == (2, maker.signer.key_id)


def test_a_missing_folder_trusts_nobody(tmp_path: Path) -> None:
    assert TrustStore.from_folder(tmp_path / "nowhere").key_ids == ()


PRIVATE_PEM = ed25519.Ed25519PrivateKey.from_private_bytes(b"\1" * 32).private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
)


@pytest.mark.parametrize(
    "content", [b"", b"hello", PRIVATE_PEM, public_pem(1)[:60], bytes(100_000), b"\xff" * 10]
)
def test_a_file_that_is_no_public_key_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.pub.pem").write_bytes(content)
    with pytest.raises(SignatureError, match=r"bad\.pub\.pem"):
        TrustStore.from_folder(tmp_path)


def test_a_missing_public_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match=r"gone\.pub\.pem"):
        read_public_key(tmp_path / "gone.pub.pem")


def test_the_keys_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    assert find_keys_folder() == tmp_path / "keys"
    monkeypatch.delenv("EDGEKIT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_keys_folder() == tmp_path / ".config" / "edgekit" / "keys"


@pytest.mark.parametrize("sha256", ["0" * 63, "0" * 65, "A" * 64, "g" * 64, "", "0" * 63 + "\n", 7, None])
def test_a_statement_whose_digest_is_no_sha256_is_refused(sha256: Any) -> None:
    with pytest.raises(SignatureError, match=r"subject sha256 is .*, expected 64 hexadecimal digits"):
        Statement("x", sha256, PACKAGE_PREDICATE_TYPE, {})


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"Statement/v1", b"Statement/v2", "payload is of type 'https://in-toto.io/Statement/v2', expected "),
        (b'"_type"', b'"_kind"', "field '_type' is missing"),
        (b'"predicate":', b'"predicatd":', "field 'predicate' is missing"),
        (b'{"a":1}', b"[1]", "predicate is a list, expected an object"),
        (b'"predicateType":', b'"predicateKind":', "field 'predicateType' is missing"),
        (b'"subject":[{', b'"subject":[{},{', "payload has 2 subjects, expected one"),
        (b'"sha256"', b'"sha512"', "subject digest: field 'sha256' is missing"),
        (b'"digest"', b'"digesu"', "subject: field 'digest' is missing"),
        (b'"name":', b'"nane":', "subject: field 'name' is missing"),
        (b"0" * 64, b"0" * 63, "statement: subject sha256 is "),
    ],
)
def test_a_payload_that_is_no_statement_is_refused_with_its_field(
    old: bytes, new: bytes, reason: str
) -> None:
    assert PAYLOAD.count(old) == 1
    with pytest.raises(SignatureError) as caught:
        Statement.from_bytes(PAYLOAD.replace(old, new), "here")
    assert str(caught.value).startswith(f"here: {reason}")


def test_a_payload_without_subjects_is_refused() -> None:
    start, _, rest = PAYLOAD.partition(b'"subject":[')
    with pytest.raises(SignatureError, match="here: payload has 0 subjects, expected one"):
        Statement.from_bytes(start + b'"subject":[]' + rest.partition(b"]")[2], "here")


REFUSED_FIELDS: dict[str, str] = {
    "other payload type": "payload type is 'text/plain', expected application/vnd.in-toto+json",
    "no signature": "has 0 signatures, expected one",
    "two signatures": "has 2 signatures, expected one",
    "unknown field": "not the canonical form of a DSSE envelope",
    "missing payload": "field 'payload' is missing",
    "missing key id": "signature: field 'keyid' is missing",
    "missing sig": "signature: field 'sig' is missing",
    "number as payload": "payload or signature is no base64",
    "number as key id": "key id is a number, expected a string",
    "object as signatures": "field 'signatures' is an object, expected a list",
    "number as signature": "signature: is a number, expected an object",
}


@pytest.mark.parametrize("tampering", REFUSED_FIELDS)
def test_an_envelope_is_refused_with_its_field(tampering: str, maker: Any) -> None:
    envelope = json.loads(maker.signer(PAYLOAD))
    TAMPERINGS[tampering](envelope)
    with pytest.raises(SignatureError) as caught:
        Envelope.from_bytes(encode(envelope), "here")
    assert str(caught.value).startswith(f"here: {REFUSED_FIELDS[tampering]}")


@pytest.mark.parametrize(
    "tampering", ["other payload type", "number as payload", "unknown field", "stray bits in base64"]
)
def test_an_envelope_that_is_refused_names_its_key(tampering: str, maker: Any) -> None:
    envelope = json.loads(maker.signer(PAYLOAD))
    TAMPERINGS[tampering](envelope)
    with pytest.raises(SignatureError) as caught:
        Envelope.from_bytes(encode(envelope), "here")
    assert caught.value.key_id == maker.signer.key_id


def test_a_statement_for_another_purpose_is_refused_with_its_key(maker: Any) -> None:
    data = maker.signer(PAYLOAD)
    with pytest.raises(SignatureError) as caught:
        Envelope.from_bytes(data, "here").read(EVIDENCE_PREDICATE_TYPE, "here")
    said = f"here: predicate type is '{PACKAGE_PREDICATE_TYPE}', expected {EVIDENCE_PREDICATE_TYPE}"
    assert (str(caught.value), caught.value.key_id) == (said, maker.signer.key_id)


def test_an_envelope_that_is_not_verified_gives_its_statement_and_key(maker: Any) -> None:
    statement = Statement("manifest.json", "0" * 64, PACKAGE_PREDICATE_TYPE, {"a": 1})
    data = maker.signer(statement.to_bytes())
    assert read_unverified(data, PACKAGE_PREDICATE_TYPE, "here") == (statement, maker.signer.key_id)
