"""Verifying: DSSE envelopes around in-toto statements, and the public keys that are trusted.

The envelope has one canonical byte form and exactly one signature, so no byte of it is free. Making keys and
signatures is the toolkit's part (`edgekit_toolkit.sign`); a device holds public keys only.

Source: DSSE 1.0 (secure-systems-lab/dsse, envelope.md, protocol.md); in-toto Attestation Framework, Statement
    v1.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SecuresystemslibError
from securesystemslib.signer import Key, Signature, SSlibKey  # type: ignore[attr-defined]  # has no __all__

from edgekit_runtime.canonical import Fields, JsonValue, decode_json, encode_json
from edgekit_runtime.errors import SignatureError

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PACKAGE_PREDICATE_TYPE: Final = "https://edgekit.dev/package/v1"
EVIDENCE_PREDICATE_TYPE: Final = "https://edgekit.dev/evidence/v1"
PUBLIC_KEY_SUFFIX: Final = ".pub.pem"
MAX_KEY_FILE_BYTES: Final = 64 << 10

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def find_keys_folder() -> Path:
    """Return the folder of keys: `$EDGEKIT_HOME/keys`, or `~/.config/edgekit/keys`."""
    home = os.environ.get("EDGEKIT_HOME")
    return (Path(home) if home else Path.home() / ".config" / "edgekit") / "keys"


def read_public_key(path: Path) -> Key:
    """Return the public key in a PEM file; its key id is the sha256 of the key, not the file's name.

    Raises:
        SignatureError: unreadable, too large, or not a public key of a kind that securesystemslib knows.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as cause:
        raise SignatureError(f"cannot read public key {path}: {cause.strerror}") from cause
    if len(data) > MAX_KEY_FILE_BYTES:
        raise SignatureError(f"public key {path}: over {MAX_KEY_FILE_BYTES} bytes, so not a key")
    try:
        return SSlibKey.from_crypto(load_pem_public_key(data))
    except (ValueError, UnsupportedAlgorithm, SecuresystemslibError) as cause:
        raise SignatureError(
            f"public key {path}: not a PEM public key (SubjectPublicKeyInfo): {cause}"
        ) from cause


class TrustStore:
    """The public keys whose signatures are accepted."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys: Mapping[str, Key] = {key.keyid: key for key in keys}

    @classmethod
    def from_folder(cls, folder: Path) -> "TrustStore":
        """Return the store of all `*.pub.pem` in `folder`; a missing folder is an empty store.

        Who can write to the folder decides what is trusted: its permissions are not checked here.

        Raises:
            SignatureError: one of the files is no public key. It is not skipped, since a key that silently is
                not
                trusted shows much later, as a refused update.
        """
        return cls(read_public_key(path) for path in sorted(folder.glob(f"*{PUBLIC_KEY_SUFFIX}")))

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of the trusted keys."""
        return tuple(self._keys)

    def find(self, key_id: str) -> Key | None:
        """Return the key of that id, or None when it is not trusted."""
        return self._keys.get(key_id)


@dataclass(frozen=True, slots=True)
class Statement:
    """An in-toto statement: what is said (`predicate`) about one file (`subject_name`, `sha256`).

    Raises:
        SignatureError: the digest is not a sha256.
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
        """Return the canonical JSON of the statement: the payload that is signed.

        Raises:
            SignatureError: the predicate holds what JSON cannot express.
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
        """Return the statement in a payload whose signature has been verified.

        Raises:
            SignatureError: not a canonical in-toto statement v1 with one subject.
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
            raise SignatureError(f"{where}: predicate is {type(predicate).__name__}, expected an object")
        name, sha256 = subject.take("name"), digest.take("sha256")
        try:
            return cls(name, sha256, fields.take("predicateType"), predicate)
        except SignatureError as cause:
            raise SignatureError(f"{where}: {cause}") from cause


def encode_envelope(envelope: Envelope) -> bytes:
    """Return the canonical bytes of an envelope."""
    json: dict[str, JsonValue] = envelope.to_dict()
    return encode_json(json)


def decode_envelope(data: bytes, where: str) -> Envelope:
    """Return the envelope in `data`; its signature is not verified.

    Args:
        data: the caller has bounded its size.
        where: what the error message starts with.

    Raises:
        SignatureError: not a DSSE envelope with one signature in canonical form.
    """
    json = decode_json(data, where, SignatureError)
    try:
        envelope = Envelope.from_dict(json)
        again = encode_envelope(envelope)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, SecuresystemslibError) as cause:
        raise SignatureError(f"{where}: not a DSSE envelope: {cause!r}") from cause
    signatures = list(envelope.signatures.values())
    if len(signatures) != 1:
        raise SignatureError(f"{where}: has {len(signatures)} signatures, expected one")
    if again != data or signatures[0].unrecognized_fields or not isinstance(signatures[0].keyid, str):
        # Unknown members and base64 with stray trailing bits are bytes that no signature covers.
        raise SignatureError(f"{where}: not the canonical form of a DSSE envelope")
    return envelope


def verify_envelope(data: bytes, trust: TrustStore, predicate_type: str, where: str) -> tuple[Statement, str]:
    """Return the statement in an envelope and the id of the trusted key that signed it.

    Args:
        data: canonical bytes of the envelope; the caller has bounded their size.
        trust: the accepted keys.
        predicate_type: what the statement must be; a signature for one purpose is none for another.
        where: what the error message starts with.

    Raises:
        SignatureError: malformed, by a key that is not trusted, wrong, or of another predicate type.
    """
    envelope, signature = _decode_statement_envelope(data, where)
    key_id: str = signature.keyid
    key = trust.find(key_id)
    if key is None:
        trusted = ", ".join(trust.key_ids) or "none"
        raise SignatureError(
            f"{where}: signed by key {key_id}, trusted are: {trusted}; trust that key if you know its owner",
            key_id,
        )
    try:
        key.verify_signature(signature, envelope.pae())
    except SecuresystemslibError as cause:
        raise SignatureError(
            f"{where}: the signature by key {key_id} does not fit its content; fetch the file again", key_id
        ) from cause
    return _read_statement(envelope, predicate_type, where, key_id), key_id


def read_unverified_envelope(data: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
    """Return the statement in an envelope whose signature is NOT verified, and the key id that it names.

    Anybody can have written both. This is for showing them to people who decide whether to trust that key.

    Args:
        data: canonical bytes of the envelope; the caller has bounded their size.
        predicate_type: what the statement must be.
        where: what the error message starts with.

    Raises:
        SignatureError: malformed, or of another predicate type.
    """
    envelope, signature = _decode_statement_envelope(data, where)
    key_id: str = signature.keyid
    return _read_statement(envelope, predicate_type, where, key_id), key_id


def _decode_statement_envelope(data: bytes, where: str) -> tuple[Envelope, Signature]:
    envelope = decode_envelope(data, where)
    signature = next(iter(envelope.signatures.values()))
    if envelope.payload_type != PAYLOAD_TYPE:
        raise SignatureError(
            f"{where}: payload type is {envelope.payload_type!r}, expected {PAYLOAD_TYPE}", signature.keyid
        )
    return envelope, signature


def _read_statement(envelope: Envelope, predicate_type: str, where: str, key_id: str) -> Statement:
    statement = Statement.from_bytes(envelope.payload, where)
    if statement.predicate_type != predicate_type:
        raise SignatureError(
            f"{where}: predicate type is {statement.predicate_type!r}, expected {predicate_type}", key_id
        )
    return statement
