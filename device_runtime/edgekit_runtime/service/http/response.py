"""Creates response heads, JSON responses and error responses."""

import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from edgekit_runtime.codecs.compression import list_codings
from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.protocol.rest import encode_error, status_of

JSON_TYPE: Final = "application/json"
BINARY_TYPE: Final = "application/octet-stream"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def make_head(
    status: int, content_type: str, body_bytes: int, fields: Mapping[str, str] | None = None
) -> bytes:
    """Return the head of a response, including the empty line.

    `fields` holds additional headers. They are not checked, so they must not come from a client.
    """
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {content_type}"]
    lines += [f"{name}: {value}" for name, value in (fields or {}).items()]
    return "\r\n".join([*lines, f"Content-Length: {body_bytes}", "", ""]).encode("latin-1")


def make_date_line() -> bytes:
    """Return the `Date` header (RFC 9110, 6.6.1) with a line ending before and after it.

    The result replaces the line ending of the status line in each response.
    """
    return time.strftime("\r\nDate: %a, %d %b %Y %H:%M:%S GMT\r\n", time.gmtime()).encode("ascii")


def make_json(value: Any, status: int = 200, fields: Mapping[str, str] | None = None) -> tuple[bytes, bytes]:
    """Return the head and body of a JSON response. `fields` holds additional headers."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    return make_head(status, JSON_TYPE, len(body), fields), body


def make_error(error: EdgekitError, further: Mapping[str, str] | None = None) -> tuple[bytes, bytes]:
    """Return the head and body of the protocol's response to `error`.

    `further` holds headers in addition to those of the error.
    """
    fields = dict(further or {})
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        fields["Retry-After"] = str(max(1, round(retry_after_s)))
    if isinstance(error, MethodError):
        fields["Allow"] = ", ".join(error.allowed)
    status = status_of(error)
    if status == HTTPStatus.UNAUTHORIZED:
        scheme = 'Basic realm="the token is the password"' if isinstance(error, LoginError) else "Bearer"
        fields["WWW-Authenticate"] = scheme  # RFC 9110, 15.5.2
    if status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        fields["Accept-Encoding"] = ", ".join(list_codings())  # RFC 9110, 15.5.16
    return make_json(encode_error(error), status, fields)


class LoginError(RequestError):
    """A browser requested a page without the token. The response makes the browser prompt the user."""


class MethodError(RequestError):
    """The path exists, but does not allow this method."""

    def __init__(self, method: str, path: str, allowed: tuple[str, ...]) -> None:
        super().__init__(405, f"{path} does not take {method}, it takes {' and '.join(allowed)}")
        self.allowed = allowed
