"""The possible holders of the private key of this device, such as a TPM. The most secure comes first.

A holder stores its data as one JSON object in `device-key.json`.
"""

import base64
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from edgekit_runtime.encryption import kernel_keyring, tpm
from edgekit_runtime.encryption.container import EncryptionError
from edgekit_runtime.encryption.key_wrapping import Exchange, encode_point, make_exchange
from edgekit_runtime.records import dataclass

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

Stored: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """A holder of private keys.

    Attributes:
        name: name in `device-key.json`.
        sentence: text for `status` that says against whom the holder protects the key.
        is_available: returns whether the holder can store a key on this machine now.
        create: creates a key, and returns the data to store and the public key as an uncompressed point.
        open: returns a function that computes a key exchange with the private key. Both `create` and `open`
            raise `UnavailableError` if the holder does not answer.
    """

    name: str
    sentence: str
    is_available: Callable[[], bool]
    create: Callable[[], tuple[Stored, bytes]]
    open: Callable[[Stored], Exchange]


def _create_in_file() -> tuple[Stored, bytes]:
    scalar, point = _make_pair()
    return {"scalar": base64.b64encode(scalar).decode()}, point


def _open_from_file(stored: Stored) -> Exchange:
    return _load(base64.b64decode(stored["scalar"], validate=True))


def _create_under_keyring() -> tuple[Stored, bytes]:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    scalar, point = _make_pair()
    # The key of the keyring may encrypt other things, and the nonce is random: one message a nonce.
    nonce = os.urandom(12)
    sealed = nonce + AESGCM(kernel_keyring.read_key()).encrypt(nonce, scalar, b"edgekit device key 1")
    return {"sealed": base64.b64encode(sealed).decode()}, point


def _open_under_keyring(stored: Stored) -> Exchange:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    sealed = base64.b64decode(stored["sealed"], validate=True)
    try:
        scalar = AESGCM(kernel_keyring.read_key()).decrypt(sealed[:12], sealed[12:], b"edgekit device key 1")
    except InvalidTag as cause:
        raise EncryptionError(
            f"the key '{kernel_keyring.NAME}' in the kernel's keyring does not open this device's key"
        ) from cause
    return _load(scalar)


def _make_pair() -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    return private.private_numbers().private_value.to_bytes(32, "big"), encode_point(private.public_key())


def _load(scalar: bytes) -> Exchange:
    from cryptography.hazmat.primitives.asymmetric import ec

    private: EllipticCurvePrivateKey = ec.derive_private_key(int.from_bytes(scalar, "big"), ec.SECP256R1())
    return make_exchange(private)


HOLDERS: Final = (
    KeyHolder(
        name="tpm",
        sentence="held by the TPM 2.0: a copied disk opens nothing, on this board either without the TPM",
        is_available=tpm.is_available,
        create=tpm.create,
        open=tpm.open_exchange,
    ),
    KeyHolder(
        name="keyring",
        sentence="under a key that the owner's boot loads into the kernel's keyring: a copied disk opens"
        " nothing, and after a restart nor does this device until the key is loaded",
        is_available=kernel_keyring.is_available,
        create=_create_under_keyring,
        open=_open_under_keyring,
    ),
    KeyHolder(
        name="file",
        sentence="in a file of mode 0600: against a copied package only; who copies the whole disk has the"
        " key, too",
        is_available=lambda: True,
        create=_create_in_file,
        open=_open_from_file,
    ),
)


def find_holder(name: str) -> KeyHolder:
    """Return the holder with this name.

    Raises:
        EncryptionError: no holder has this name.
    """
    for holder in HOLDERS:
        if holder.name == name:
            return holder
    names = ", ".join(holder.name for holder in HOLDERS)
    raise EncryptionError(f"nothing called '{name}' holds keys here; there are: {names}")
