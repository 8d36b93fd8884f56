"""HKDF-SHA256 with the standard library, because older releases of `cryptography` lack the extract step.

Source: RFC 5869.
"""

import hashlib
import hmac


def extract(salt: bytes, secret: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), secret, hashlib.sha256)


def expand(key: bytes, info: bytes, size_bytes: int) -> bytes:
    output, block = b"", b""
    while len(output) < size_bytes:
        block = hmac.digest(key, block + info + bytes([len(output) // 32 + 1]), hashlib.sha256)
        output += block
    return output[:size_bytes]


def derive(secret: bytes, salt: bytes, info: bytes, size_bytes: int = 32) -> bytes:
    return expand(extract(salt, secret), info, size_bytes)
