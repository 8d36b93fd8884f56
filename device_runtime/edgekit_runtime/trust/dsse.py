"""Signed statements: in-toto statements in DSSE envelopes.

An envelope has exactly one signature and one canonical form. This module does not verify signatures (see
`trust_store`), because the service does not load the required libraries (see `verifier_process`).

Source: DSSE 1.0 (secure-systems-lab/dsse, envelope.md, protocol.md); in-toto Attestation Framework, Statement
v1.
"""

import base64
import re
from collections.abc import Mapping
from typing import Final, Protocol

from edgekit_runtime.canonical_json import Fields, JsonValue, decode_json, encode_json, name_kind
from edgekit_runtime.errors import DigestError, SignatureError
from edgekit_runtime.records import dataclass

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PACKAGE_PREDICATE_TYPE: Final = "https://edgekit.dev/package/v1"
EVIDENCE_PREDICATE_TYPE: Final = "https://edgekit.dev/evidence/v1"

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Statement:
    """An in-toto statement: a `predicate` about the file `subject_name` with the digest `sha256`.

    Raises:
        SignatureError: The digest is not a SHA-256.
    """

    subject_name: str
    sha256: str
    predicate_type: str
    predicate: Mapping[str, JsonValue]

    def __post_init__(self) -> None:
        if not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise SignatureError(
                f"statement: subject sha256 is {self.sha256!r}, expected 64 hexadecimal digits"
            )

    def to_bytes(self) -> bytes:
        """Return the canonical JSON of the statement, which is the payload to sign.

        Raises:
            SignatureError: The predicate cannot be written as JSON.
        """
        json: dict[str, JsonValue] = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": self.subject_name, "digest": {"sha256": self.sha256}}],
            "predicateType": self.predicate_type,
            "predicate": self.predicate,
        }
        try:
            return encode_json(json)
        except (ValueError, TypeError, RecursionError) as cause:
            raise SignatureError(f"statement: predicate cannot be written as JSON: {cause}") from cause

    @classmethod
    def from_bytes(cls, payload: bytes, where: str) -> "Statement":
        """Parse a payload. Error messages start with `where`.

        Raises:
            SignatureError: The payload is not a canonical in-toto statement v1 with one subject.
        """
        fields = Fields(decode_json(payload, f"{where}: payload", SignatureError), where, SignatureError)
        if (kind := fields.take("_type")) != STATEMENT_TYPE:
            raise SignatureError(f"{where}: payload is of type {kind!r}, expected {STATEMENT_TYPE}")
        subjects = fields.take_list("subject")
        if len(subjects) != 1:
            raise SignatureError(f"{where}: payload has {len(subjects)} subjects, expected one")
        subject = Fields(subjects[0], f"{where}: subject", SignatureError)
        digest = Fields(subject.take("digest"), f"{where}: subject digest", SignatureError)
        predicate = fields.take("predicate")
        if not isinstance(predicate, dict):
            raise SignatureError(f"{where}: predicate is {name_kind(predicate)}, expected an object")
        name, sha256, kind = subject.take("name"), digest.take("sha256"), fields.take("predicateType")
        try:
            return cls(name, sha256, kind, predicate)
        except SignatureError as cause:
            raise SignatureError(f"{where}: {cause}") from cause


@dataclass(frozen=True, slots=True)
class Envelope:
    """A DSSE envelope around a statement, with one signature.

    Attributes:
        payload: The canonical bytes of the statement.
        key_id: The id of the key that the envelope names as the signer.
        signature: The signature of `encode_signed(payload)`.
    """

    payload: bytes
    key_id: str
    signature: bytes

    def to_bytes(self) -> bytes:
        return encode_json(
            {
                "payload": base64.b64encode(self.payload).decode("ascii"),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [
                    {"keyid": self.key_id, "sig": base64.b64encode(self.signature).decode("ascii")}
                ],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Envelope":
        """Parse an envelope without verifying its signature.

        Args:
            data: The envelope. The caller must limit its size.
            where: The start of error messages.

        Raises:
            SignatureError: `data` is not a canonical DSSE envelope with one signature.
        """
        fields = Fields(decode_json(data, where, SignatureError), where, SignatureError)
        payload, kind = fields.take("payload"), fields.take("payloadType")
        signatures = fields.take_list("signatures")
        if len(signatures) != 1:
            raise SignatureError(f"{where}: has {len(signatures)} signatures, expected one")
        signature = Fields(signatures[0], f"{where}: signature", SignatureError)
        key_id, sig = signature.take("keyid"), signature.take("sig")
        if not isinstance(key_id, str):
            raise SignatureError(f"{where}: key id is {name_kind(key_id)}, expected a string")
        if kind != PAYLOAD_TYPE:
            raise SignatureError(f"{where}: payload type is {kind!r}, expected {PAYLOAD_TYPE}", key_id)
        try:
            envelope = cls(base64.b64decode(payload), key_id, base64.b64decode(sig))
        except (ValueError, TypeError) as cause:
            raise SignatureError(f"{where}: payload or signature is no base64: {cause}", key_id) from cause
        if envelope.to_bytes() != data:
            # Unknown members and base64 with stray trailing bits are bytes that no signature covers.
            raise SignatureError(f"{where}: not the canonical form of a DSSE envelope", key_id)
        return envelope

    def read(self, predicate_type: str, where: str) -> Statement:
        """Return the statement in the envelope.

        Args:
            predicate_type: The required type of the predicate.
            where: The start of error messages.

        Raises:
            SignatureError: The payload is not a canonical statement of that type.
        """
        statement = Statement.from_bytes(self.payload, where)
        if statement.predicate_type != predicate_type:
            raise SignatureError(
                f"{where}: predicate type is {statement.predicate_type!r}, expected {predicate_type}",
                self.key_id,
            )
        return statement


def encode_signed(payload: bytes) -> bytes:
    """Return the bytes to sign for a payload, which are DSSE's pre-authentication encoding."""
    kind = PAYLOAD_TYPE.encode("ascii")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


class Verifier(Protocol):
    """Verifies signatures by trusted keys."""

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        """Verify an envelope. Return its statement and the id of the trusted key that signed it.

        Args:
            envelope: The canonical bytes of a DSSE envelope. The caller must limit their size.
            predicate_type: The required type of the predicate.
            where: The start of error messages.

        Raises:
            SignatureError: The envelope is malformed, its signature is wrong, its key is not trusted, or its
                predicate has another type.
            UnavailableError: The signature cannot be verified now.
        """


class KnownDigest:
    """A `Verifier` that accepts one package by its digest, after another process verified its signature."""

    def __init__(self, manifest_sha256: str) -> None:
        self._sha256 = manifest_sha256

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        """Return the statement and the key id of an envelope without verifying its signature.

        Raises:
            DigestError: The statement is about another package.
            SignatureError: The envelope is malformed, or its predicate has another type.
        """
        statement, key_id = read_unverified(envelope, predicate_type, where)
        if statement.sha256 != self._sha256:
            raise DigestError(f"{where}: the file has changed since it was verified; load the model again")
        return statement, key_id


def read_unverified(data: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
    """Return the statement and the key id of an envelope whose signature is NOT verified.

    Anyone can have written them. Show them only to a user who decides whether to trust that key.

    Args:
        data: The canonical bytes of the envelope. The caller must limit their size.
        predicate_type: The required type of the predicate.
        where: The start of error messages.

    Raises:
        SignatureError: The envelope is malformed, or its predicate has another type.
    """
    envelope = Envelope.from_bytes(data, where)
    return envelope.read(predicate_type, where), envelope.key_id
