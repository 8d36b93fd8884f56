"""Wraps a content key for one device, with HPKE in base mode.

The suite is DHKEM(P-256, HKDF-SHA256), HKDF-SHA256, AES-256-GCM. It is implemented here because
`cryptography` has it only from release 47, and a TPM computes the shared secret itself.

Source: RFC 9180, sections 4.1, 5.1.1 and 6.1.
"""

import base64
import binascii
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from edgekit_runtime.encryption.container import KEY_BYTES, ContentKey, EncryptionError
from edgekit_runtime.encryption.key_derivation import expand, extract
from edgekit_runtime.records import dataclass

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Exchange: TypeAlias = Callable[[bytes], bytes]
"""Returns the x coordinate of an uncompressed P-256 point multiplied by a private key."""

POINT_BYTES: Final = 65
_KEM: Final = b"KEM\x00\x10"
_HKDF_SHA256: Final = b"\x00\x01"


@dataclass(frozen=True, slots=True)
class Aead:
    """An AEAD cipher with its HPKE identifier."""

    id: bytes
    key_bytes: int


AES_256_GCM: Final = Aead(b"\x00\x02", 32)


def wrap_key(content_key: ContentKey, public_key: bytes) -> str:
    """Encrypt `content_key` for the device with `public_key`, and return it in base64.

    Raises:
        EncryptionError: `public_key` is not an uncompressed point of P-256.
    """
    sealed = seal(content_key.secret, public_key, _make_info(content_key.key_id))
    return base64.b64encode(sealed).decode("ascii")


def unwrap_key(wrapped: str, key_id: str, exchange: Exchange, public_key: bytes) -> ContentKey:
    """Return the content key `key_id` that `wrap_key` has wrapped for the device with `public_key`.

    Raises:
        EncryptionError: the content key was wrapped for another device or under another id, or is damaged.
    """
    try:
        sealed = base64.b64decode(wrapped, validate=True)
    except (binascii.Error, ValueError) as cause:
        raise EncryptionError("the wrapped key is malformed") from cause
    secret = unseal(sealed, exchange, public_key, _make_info(key_id))
    if len(secret) != KEY_BYTES:
        raise EncryptionError(f"the wrapped key has {len(secret)} bytes, expected {KEY_BYTES}")
    return ContentKey(key_id, secret)


def seal(message: bytes, public_key: bytes, info: bytes) -> bytes:
    """Encrypt `message` for the owner of `public_key`, and return the encapsulated key and the ciphertext.

    Args:
        message: the plaintext.
        public_key: uncompressed point of P-256, 65 bytes.
        info: public text that the message is bound to, such as its purpose. `unseal` needs the same text.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    encapsulated = encode_point(private.public_key())
    cipher, nonce = _schedule(make_exchange(private)(public_key), encapsulated, public_key, info)
    return encapsulated + cipher.encrypt(nonce, message, None)


def unseal(
    sealed: bytes,
    exchange: Exchange,
    public_key: bytes,
    info: bytes,
    *,
    aead: Aead = AES_256_GCM,
    associated: bytes | None = None,
) -> bytes:
    """Return the message that was encrypted for the owner of `exchange` and `public_key`.

    Args:
        sealed: the encapsulated key and the ciphertext.
        exchange: key exchange with the private key.
        public_key: uncompressed point of P-256.
        info: the same text as for `seal`.
        aead: cipher of the message.
        associated: associated data that the cipher authenticates, or None.

    Raises:
        EncryptionError: the message was encrypted for another owner or with another `info`, or is damaged.
    """
    from cryptography.exceptions import InvalidTag

    encapsulated, ciphertext = sealed[:POINT_BYTES], sealed[POINT_BYTES:]
    if len(encapsulated) < POINT_BYTES:
        raise EncryptionError("the wrapped key is too short")
    cipher, nonce = _schedule(exchange(encapsulated), encapsulated, public_key, info, aead)
    try:
        return cipher.decrypt(nonce, ciphertext, associated)
    except InvalidTag as cause:
        raise EncryptionError("the wrapped key is of another device, or damaged") from cause


def make_exchange(private: "EllipticCurvePrivateKey") -> Exchange:
    """Return a function that computes a key exchange. It raises `EncryptionError` for an invalid point."""

    def exchange(point: bytes) -> bytes:
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            other = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
        except ValueError as cause:
            raise EncryptionError("the public key is no point of P-256") from cause
        return private.exchange(ec.ECDH(), other)

    return exchange


def encode_point(key: "EllipticCurvePublicKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def _schedule(
    product: bytes, encapsulated: bytes, public_key: bytes, info: bytes, aead: Aead = AES_256_GCM
) -> "tuple[AESGCM, bytes]":
    """Return the cipher and the nonce. A key encrypts one message only, so there is one nonce."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    pseudorandom = _extract(_KEM, b"", b"eae_prk", product)
    shared = _expand(_KEM, pseudorandom, b"shared_secret", encapsulated + public_key, 32)
    suite = b"HPKE" + _KEM[3:] + _HKDF_SHA256 + aead.id
    context = b"\0" + _extract(suite, b"", b"psk_id_hash", b"") + _extract(suite, b"", b"info_hash", info)
    secret = _extract(suite, shared, b"secret", b"")
    key = _expand(suite, secret, b"key", context, aead.key_bytes)
    return AESGCM(key), _expand(suite, secret, b"base_nonce", context, 12)


def _extract(suite: bytes, salt: bytes, label: bytes, secret: bytes) -> bytes:
    return extract(salt, b"HPKE-v1" + suite + label + secret)


def _expand(suite: bytes, key: bytes, label: bytes, info: bytes, size_bytes: int) -> bytes:
    return expand(key, size_bytes.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info, size_bytes)


def _make_info(key_id: str) -> bytes:
    return b"edgekit content key 1\0" + key_id.encode("ascii")
