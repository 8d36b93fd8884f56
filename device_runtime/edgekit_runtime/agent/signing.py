"""Signed envelopes for the documents of the fleet: DSSE with one Ed25519 signature.

The envelope states the kind of its document, so that a document cannot be passed off as another kind.

Source: DSSE 1.0 (secure-systems-lab/dsse, envelope.md, protocol.md); RFC 8032.
"""

import base64
import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from edgekit_runtime.agent.documents import MAX_DOCUMENT_BYTES, Kind, Reported
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import from_plain, keep_known, to_plain
from edgekit_runtime.errors import SignatureError

Document = TypeVar("Document")

_SUSPECT: Final = re.compile(r"\\u(?:0000|d[89a-f])", re.IGNORECASE)


class UnknownKeyError(SignatureError):
    """A document is signed by a key that is not trusted. A newer root of the repository may name the key."""


def key_id(key: Ed25519PublicKey) -> str:
    """Return the identifier of a key: the SHA-256 digest of its 32 bytes, in hexadecimal."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


@functools.lru_cache(1)
def _own_id(key: Ed25519PrivateKey) -> str:
    return key_id(key.public_key())


def seal(document: object, kind: Kind, key: Ed25519PrivateKey) -> bytes:
    """Return the signed envelope of a document.

    Raises:
        ValueError: the envelope would be larger than `MAX_DOCUMENT_BYTES`.
    """
    return seal_payload(encode_json(to_plain(document)), kind, key)


def seal_payload(payload: bytes, kind: Kind, key: Ed25519PrivateKey) -> bytes:
    """Return the signed envelope of a document that is already encoded as JSON, see `seal`."""
    signature = key.sign(_encode_signed(kind, payload))
    envelope = b'{"payload":"%b","payloadType":"%b","signatures":[{"keyid":"%b","sig":"%b"}]}' % (
        base64.b64encode(payload),
        _payload_type(kind).encode(),
        _own_id(key).encode(),
        base64.b64encode(signature),
    )
    if len(envelope) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"a document of {len(envelope)} bytes, at most {MAX_DOCUMENT_BYTES} are allowed")
    return envelope


def seal_report(reported: Reported, key: Ed25519PrivateKey) -> bytes:
    """Return the signed envelope of a report. The least important parts of a large report are omitted.

    If the figures of all models do not fit, successive reports contain different figures.
    """
    figures, brief = reported.figures, tuple(replace(model, because="") for model in reported.models)
    first = reported.sequence % max(len(figures), 1)
    in_turn = (*figures[first:], *figures[:first])
    tried = (
        reported,
        *(replace(reported, figures=in_turn[: len(figures) * part // 8]) for part in range(7, -1, -1)),
        replace(reported, figures=(), executions=(), streams={}, settings={}, models=brief),
    )
    for document in tried:
        with contextlib.suppress(ValueError):
            return seal(document, "reported", key)
    return seal(replace(tried[-1], models=()), "reported", key)


def unseal(
    data: bytes,
    kind: Kind,
    document: type[Document],
    keys: Mapping[str, Ed25519PublicKey],
    where: str,
) -> Document:
    """Verify the signature of an envelope, and return its document.

    Unknown fields are ignored, because fleets and devices may have different versions.

    Args:
        data: the envelope, not trusted.
        kind: required kind of the document.
        document: dataclass of the document.
        keys: a dict from the id of each trusted key to the key.
        where: start of each error message.

    Raises:
        UnknownKeyError: the envelope is signed by a key that is not trusted.
        SignatureError: the envelope is too large, malformed, or of another kind, or the signature is wrong.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise SignatureError(f"{where}: has {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are allowed")
    try:
        envelope = json.loads(data)
        payload = base64.b64decode(envelope["payload"], validate=True)
        (signed,) = envelope["signatures"]
        signature = base64.b64decode(signed["sig"], validate=True)
        named, stated = str(signed["keyid"]), envelope["payloadType"]
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise SignatureError(f"{where}: not a signed document: {cause}") from cause
    if stated != _payload_type(kind):
        raise SignatureError(f"{where}: is a {stated!r}, expected {_payload_type(kind)!r}")
    if named not in keys:
        trusted = ", ".join(keys) or "none"
        raise UnknownKeyError(f"{where}: signed by key {named}, trusted are: {trusted}", named)
    try:
        keys[named].verify(signature, _encode_signed(kind, payload))
    except InvalidSignature as cause:
        raise SignatureError(
            f"{where}: the signature by key {named} does not fit its content", named
        ) from cause
    try:
        plain = _parse(payload)
    except (ValueError, RecursionError) as cause:
        raise SignatureError(f"{where}: its signed content is not JSON: {cause}") from cause
    try:
        return from_plain(document, plain, where, SignatureError)
    except SignatureError:
        return from_plain(document, keep_known(document, plain), where, SignatureError)


def _parse(payload: bytes) -> object:
    """Return the JSON value in a payload.

    Raises:
        ValueError: the payload is no JSON, or holds NUL or half of a UTF-16 pair, which databases refuse.
    """
    text = payload.decode()
    plain = json.loads(text)
    if _SUSPECT.search(text):
        json.dumps(plain, ensure_ascii=False).encode()  # fails with halves
        if "\\u0000" in text:
            raise ValueError("it holds NUL")
    return plain


def _payload_type(kind: Kind) -> str:
    return f"application/vnd.edgekit.fleet.{kind}+json"


def _encode_signed(kind: Kind, payload: bytes) -> bytes:
    """Return the bytes to sign: DSSE's pre-authentication encoding."""
    stated = _payload_type(kind).encode("ascii")
    return b"DSSEv1 %d %b %d %b" % (len(stated), stated, len(payload), payload)
