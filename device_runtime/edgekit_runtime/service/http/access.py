"""Access control for requests over TCP: refuses web pages, and checks the bearer token."""

import base64
import contextlib
import hmac
import os
from typing import Final, Protocol

from edgekit_runtime.errors import ConfigError, RequestError
from edgekit_runtime.service.http.response import LoginError

_MIN_TOKEN_CHARACTERS: Final = 16


class AccessHead(Protocol):
    """The fields of a request's head that decide on access, see `RequestHead`."""

    authorization: bytes | None
    has_foreign_host: bool
    is_from_page: bool
    method: str
    path: str


def check_access(head: AccessHead, token: bytes | None) -> None:
    """Refuse a request that comes from a web page or does not have the token.

    Args:
        head: The head of a request over TCP.
        token: The expected `Authorization` header, as returned by `read_token`, or None if no token is set.

    Raises:
        RequestError: The request is from a web page or a foreign host (403), or has no valid token (401).
        LoginError: The request has no valid token, and its path starts with `/live` (401).
    """
    if head.is_from_page:
        # A web page that is open on this machine can reach a loopback address.
        raise RequestError(403, "requests from web pages are refused: see the headers Origin, Sec-Fetch-Site")
    if token is None and head.has_foreign_host:
        # DNS rebinding: a page sends no Origin to its own name, which its owner can point to this machine.
        raise RequestError(403, "the Host header is not a name of this machine; use its address")
    if token is not None and not hmac.compare_digest(_normalize_token(head), token):
        kind = LoginError if head.path.startswith("/live") else RequestError
        raise kind(401, "the bearer token is missing or wrong; send Authorization: Bearer TOKEN")


def _normalize_token(head: AccessHead) -> bytes:
    """Return the header `Authorization` in the form of `read_token`; empty for another scheme or none.

    A browser cannot send a bearer token. It may send it as the password of `Basic`, for what it only reads:
    it adds that to requests of other pages as well.
    """
    scheme, _, token = (head.authorization or b"").partition(b" ")
    if scheme.lower() == b"basic" and head.method in ("GET", "HEAD"):
        with contextlib.suppress(ValueError):
            return b"Bearer " + base64.b64decode(token.strip(b" "), validate=True).partition(b":")[2]
    return b"Bearer " + token.lstrip(b" ") if scheme.lower() == b"bearer" else b""


def read_token(path: str) -> bytes:
    """Read the token in a file and return the expected `Authorization` header, which is `Bearer TOKEN`.

    Raises:
        ConfigError: The file cannot be read or is readable by everyone, or the token is too short or
            contains spaces.
    """
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123  # one descriptor for content and mode
            token, mode = file.read(4096).strip(), os.fstat(file.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"listen: cannot read token_file {path}: {cause}") from cause
    if len(token) < _MIN_TOKEN_CHARACTERS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"listen: token_file {path} holds {len(token)} characters, expected at least"
            f" {_MIN_TOKEN_CHARACTERS} and no spaces; make one with: openssl rand -hex 32"
        )
    if mode & 0o004:
        raise ConfigError(f"listen: token_file {path} can be read by everybody; chmod 600 it")
    return f"Bearer {token}".encode("ascii")
