"""Secrets of users and programs. The store keeps only their digests."""

import hashlib
import secrets
from typing import Final

_BYTES: Final = 32  # too many to be guessed, so a plain digest is enough


def make_secret(prefix: str = "") -> str:
    return prefix + secrets.token_urlsafe(_BYTES)


def digest(secret: str) -> str:
    """Return the SHA-256 of a secret in hexadecimal digits, which the store keeps instead of the secret."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()
