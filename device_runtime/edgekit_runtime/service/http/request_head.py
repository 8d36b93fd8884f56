"""The head of an HTTP request: parsed by llhttp, checked against request smuggling, and cached.

Clients send the same heads again and again, so the last few hundred different heads are cached.

Source: RFC 9110, RFC 9112 (section 6.3 for the length of a body).
"""

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

import httptools

from edgekit_runtime.codecs.compression import IDENTITY, list_codings
from edgekit_runtime.errors import RequestError

MAX_HEADERS: Final = 100
_MAX_HEADS: Final = 256
_MAX_KEPT_BYTES: Final = 2048  # of one head. Longer ones are rare and would fill memory
_ONE_OF_A_KIND: Final = frozenset(
    (
        b"content-length",
        b"transfer-encoding",
        b"host",
        b"expect",
        b"authorization",
        b"inference-header-content-length",
    )
)


def find_end(data: bytes, start: int, max_bytes: int) -> int | None:
    """Return the end of the head in `data`, searching from `start`, or None if it is incomplete.

    Raises:
        RequestError: The head is too long.
    """
    end = data.find(b"\r\n\r\n", start) + 4
    if 4 <= end <= max_bytes:
        return end
    if len(data) > max_bytes:
        raise RequestError(431, f"the head has more than {max_bytes} bytes, the limit here")
    return None


class RequestHead:
    """The head of a request.

    Attributes:
        method: The method, such as `GET`.
        path: The path of the target, before the question mark. Percent escapes are not decoded.
        query: The part of the target after the question mark, or empty.
        content_type: The `Content-Type` header, or empty.
        body_bytes: The length of the body, or None if it is chunked.
        json_bytes: The `Inference-Header-Content-Length` header, or None.
        content_coding: The compression of the body in lower case, or empty.
        keeps_alive: Whether the client keeps the connection open for further requests.
        expects_continue: Whether the client waits for `100 Continue` before it sends the body.
        passes_descriptor: Whether a file descriptor comes with the body.
        is_http_1_0: Whether the HTTP version is 1.0.
        authorization: The `Authorization` header, or None.
        is_from_page: Whether a web page of another origin sent the request, see `is_from_page`.
        has_foreign_host: Whether the host is a public name, see `is_foreign_host`.
        is_plain: Whether the response can be sent without changes. False for HTTP 1.0, `HEAD`, and the last
            request of a connection.
        data: The bytes of the head, or empty if it is too long to cache.
        request_bytes: The length of head and body, or -1 for a chunked body, a descriptor or a long head.
        route: The handler for all requests with this head, or None before the first one was routed.
        clearance: If equal to `HttpServer.clearance`, requests with this head need no screening.
    """

    __slots__ = (
        "authorization",
        "body_bytes",
        "clearance",
        "content_coding",
        "content_type",
        "data",
        "expects_continue",
        "has_foreign_host",
        "is_from_page",
        "is_http_1_0",
        "is_plain",
        "json_bytes",
        "keeps_alive",
        "method",
        "passes_descriptor",
        "path",
        "query",
        "request_bytes",
        "route",
        "size_bytes",
    )

    def __init__(self, data: bytes, parser: Any, url: bytes, fields: dict[bytes, bytes]) -> None:
        """Read what llhttp found in `data`.

        Raises:
            RequestError: The request is not supported, or the length of the body is ambiguous.
        """
        self.size_bytes = len(data)
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise RequestError(505, f"HTTP version {version} is not supported, use 1.1")
        self.method = parser.get_method().decode("ascii")
        path, host = _read_target(url, fields.get(b"host"))
        self.path = path.decode("latin-1")
        self.query = url.partition(b"?")[2].decode("latin-1")
        self.content_type = fields.get(b"content-type", b"").decode("latin-1")
        self.is_http_1_0 = version == "1.0"
        # Not from llhttp, which does not keep it for a request without a body.
        wishes = {wish.strip() for wish in fields.get(b"connection", b"").lower().split(b",")}
        self.keeps_alive = b"close" not in wishes and (not self.is_http_1_0 or b"keep-alive" in wishes)
        self.body_bytes = _read_length(fields)
        self.json_bytes = _read_count(fields, b"inference-header-content-length")
        self.expects_continue = _read_expectation(fields) and not self.is_http_1_0
        self.passes_descriptor = b"edgekit-descriptor" in fields
        self.authorization = fields.get(b"authorization")
        self.is_from_page = is_from_page(fields)
        self.has_foreign_host = is_foreign_host(host)
        self.route: Any = None
        self.clearance = 0
        self.is_plain = self.keeps_alive and not self.is_http_1_0 and self.method != "HEAD"
        is_kept = len(data) <= _MAX_KEPT_BYTES
        self.data = data if is_kept else b""
        is_one_piece = is_kept and self.body_bytes is not None and not self.passes_descriptor
        self.request_bytes = len(data) + (self.body_bytes or 0) if is_one_piece else -1
        if not self.is_http_1_0 and b"host" not in fields:
            raise RequestError(400, "the Host header is missing")
        self.content_coding = _read_coding(fields)


class HeadCache:
    """Parses heads and caches the last few hundred of them. Shared by all connections of a server."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, RequestHead] = {}

    def parse(self, data: bytes) -> RequestHead:
        """Parse a head. `data` starts with the request line and ends with the empty line.

        Raises:
            RequestError: The head is malformed or not supported, or the length of the body is ambiguous.
        """
        head = self._heads.get(data)
        if head is None:
            head = _parse(data)
            if len(data) <= _MAX_KEPT_BYTES:
                if len(self._heads) >= _MAX_HEADS:
                    self._heads.clear()  # simpler than dropping the oldest, and as good
                self._heads[data] = head
        return head


class _Collector:
    __slots__ = ("count", "fields", "is_complete", "repeated", "url")

    def __init__(self) -> None:
        self.url = b""
        self.fields: dict[bytes, bytes] = {}
        self.repeated: bytes | None = None
        self.count = 0
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.count += 1
        name = name.lower()
        value = value.strip()
        if name in self.fields:
            if name in _ONE_OF_A_KIND:
                self.repeated = name
            value = self.fields[name] + b", " + value
        self.fields[name] = value

    def on_headers_complete(self) -> None:
        self.is_complete = True


def _parse(data: bytes) -> RequestHead:
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    is_early = True
    try:
        # In two steps: a parser that saw the end of the head elsewhere than we did would take other bytes for
        # the body.
        parser.feed_data(data[:-1])
        is_early = collector.is_complete
        parser.feed_data(data[-1:])
    except httptools.HttpParserUpgrade as cause:
        if parser.get_method() == b"CONNECT":
            raise RequestError(400, "CONNECT is not supported") from cause
        # A server may ignore an upgrade: what follows is HTTP/1.1 then (RFC 9110, 7.8).
    except httptools.HttpParserError as cause:
        raise RequestError(400, f"malformed HTTP request: {cause}") from cause
    if is_early or not collector.is_complete:
        raise RequestError(400, "malformed HTTP request: its head does not end where it seems to")
    if collector.repeated is not None:
        raise RequestError(400, f"header {collector.repeated.decode('latin-1')!r} stands twice")
    if collector.count > MAX_HEADERS:
        raise RequestError(431, f"{collector.count} headers, expected at most {MAX_HEADERS}")
    return RequestHead(data, parser, collector.url, collector.fields)


def _read_target(url: bytes, host: bytes | None) -> tuple[bytes, bytes | None]:
    """Return path and host of a target; a host in the target overrides `Host` (RFC 9112, 3.2.2).

    Raises:
        RequestError: the target is of another scheme, or names no host or a user.
    """
    path = url.split(b"?", 1)[0]
    scheme, is_absolute, remainder = path.partition(b"://")
    if path.startswith(b"/") or not is_absolute:
        return path, host
    authority, slash, path = remainder.partition(b"/")
    if scheme.lower() not in (b"http", b"https") or not authority or b"@" in authority:
        raise RequestError(
            400, f"the target is {url[:80].decode('latin-1')!r}, expected http://HOST/PATH or /PATH"
        )
    return slash + path or b"/", authority


def is_from_page(fields: Mapping[bytes, bytes]) -> bool:
    """Return whether a web page of another origin sent a request, for example by a script or an `<img>`.

    Requests for an `<img>` have no `Origin` header, so other headers are checked too. Documents that the user
    opens are allowed, since other pages cannot read them.
    """
    is_opened = fields.get(b"sec-fetch-dest") == b"document"
    is_elsewhere = fields.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
    return b"origin" in fields or (is_elsewhere and not is_opened)


def is_foreign_host(host: bytes | None) -> bool:
    """Return whether `host` is a public name. Its owner could point it to this machine (DNS rebinding)."""
    if host is None:  # no browser speaks HTTP 1.0
        return False
    name = host.decode("latin-1").lower().rstrip(".")
    name = name[1:].split("]", 1)[0] if name.startswith("[") else name.split(":", 1)[0]
    if name == "localhost" or name.endswith(".localhost"):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return not name or "." in name
    return False


def _read_length(fields: dict[bytes, bytes]) -> int | None:
    coding = fields.get(b"transfer-encoding")
    if coding is None:
        return _read_count(fields, b"content-length") or 0
    if b"content-length" in fields:
        raise RequestError(400, "Transfer-Encoding and Content-Length in one request")
    if coding.lower() != b"chunked":
        raise RequestError(501, f"Transfer-Encoding {coding.decode('latin-1')!r}, expected chunked")
    return None


def _read_count(fields: dict[bytes, bytes], name: bytes) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:  # bytes.isdigit knows ASCII only
        raise RequestError(
            400, f"{name.decode('ascii')} is {value.decode('latin-1')!r}, expected a count of bytes"
        )
    return int(value)


def _read_coding(fields: dict[bytes, bytes]) -> str:
    """Return the content coding; empty for an uncompressed body.

    Source: RFC 9110, sections 5.6.1 (lists may have empty elements) and 8.4.1.3 (`x-gzip`).

    Raises:
        RequestError: this service cannot read the coding.
    """
    stated = fields.get(b"content-encoding", b"").lower().decode("latin-1")
    codings = [coding.strip() for coding in stated.replace("x-gzip", "gzip").split(",")]
    codings = [coding for coding in codings if coding not in ("", IDENTITY)]
    if codings and (len(codings) > 1 or codings[0] not in list_codings()):
        raise RequestError(
            415,
            f"the content coding {stated[:32]!r} is not supported, use one of {', '.join(list_codings())}",
        )
    return "".join(codings)


def _read_expectation(fields: dict[bytes, bytes]) -> bool:
    expectation = fields.get(b"expect")
    if expectation is None:
        return False
    if expectation.lower() != b"100-continue":
        raise RequestError(417, f"Expect is {expectation.decode('latin-1')!r}, expected 100-continue")
    return True
