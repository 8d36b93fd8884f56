"""Parses the bytes of one client into requests, without I/O. As in h11, bytes go in and events come out.

The caller passes the received bytes, and then asks for events until there are no more.
"""

from typing import NamedTuple, TypeAlias

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.http.request_body import ChunkedBody, SizedBody
from edgekit_runtime.service.http.request_head import HeadCache, RequestHead, find_end
from edgekit_runtime.service.options.http import HttpLimits


class Request(NamedTuple):
    """A completely received request. `body` is empty if there is no body."""

    head: RequestHead
    body: memoryview


Event: TypeAlias = RequestHead | Request


class RequestParser:
    """Parses the requests of one connection. Each request has two events: the head, then the whole request.

    Attributes:
        unread: The received bytes that are not processed yet. When `next_event` returns a head, the head is
            still in `unread`. The next call removes it.
        is_in_head: Whether the next head is incomplete.
    """

    __slots__ = ("_body", "_head", "_heads", "_limits", "_scanned", "is_in_head", "unread")

    def __init__(self, heads: HeadCache, limits: HttpLimits) -> None:
        self._heads, self._limits = heads, limits
        self._head: RequestHead | None = None  # of the request whose body comes next
        self._body: SizedBody | ChunkedBody | None = None
        self._scanned = 0  # bytes of `unread` that hold no end of a head
        self.is_in_head = False
        self.unread = b""

    @property
    def body_bytes(self) -> int | None:
        """The number of received bytes of the current body, or None if no body is being received."""
        return None if self._body is None else self._body.received_bytes

    def receive_data(self, data: bytes) -> None:
        self.unread = self.unread + data if self.unread else data

    def get_buffer(self) -> memoryview | None:
        """Return the buffer for the next bytes, or None if they must be passed to `receive_data`.

        Only a body of known length has a buffer. See `asyncio.BufferedProtocol`.
        """
        body = self._body
        return body.data[body.received_bytes :] if isinstance(body, SizedBody) else None

    def buffer_updated(self, count_bytes: int) -> None:
        """Record that `count_bytes` were written to the buffer from `get_buffer`."""
        if isinstance(self._body, SizedBody):
            self._body.received_bytes += count_bytes

    def clear(self) -> None:
        self._head = self._body = None
        self._scanned = 0
        self.is_in_head = False
        self.unread = b""

    def next_event(self) -> Event | None:
        """Return the next head or request, or None if more bytes are needed.

        Raises:
            RequestError: The request is malformed or exceeds a limit. The start of the next request is then
                unknown.
            MemoryError: There is not enough memory for a body.
        """
        head = self._head
        if head is None:
            return self._parse_head()
        if self._body is None:
            begin, size_bytes, data = head.size_bytes, head.body_bytes, self.unread
            if size_bytes is None:
                self._body = ChunkedBody(self._limits.max_body_bytes)
                self.unread = data[begin:]
            else:
                end = begin + size_bytes
                if size_bytes > (most_bytes := self._limits.max_body_bytes):
                    raise RequestError(
                        413, f"the body has {size_bytes} bytes, the limit here is {most_bytes}"
                    )
                self.unread = data[end:]
                if len(data) >= end and not head.passes_descriptor:
                    self._head = None
                    return Request(head, memoryview(data)[begin:end])
                self._body = SizedBody(size_bytes, head.json_bytes or 0, data[begin:end])
        return self._finish_body(head, self._body)

    def _parse_head(self) -> RequestHead | None:
        data = self.unread
        end = find_end(data, self._scanned, self._limits.max_head_bytes)
        if end is None:
            self._scanned = max(len(data) - 3, 0)
            self.is_in_head = len(data) > 0
            return None
        if data.startswith(b"\r\n"):  # one empty line is skipped, as RFC 9112 2.2 asks
            data = self.unread = data[2:]
            end -= 2
        self._scanned = 0
        self.is_in_head = False
        head = self._head = self._heads.parse(data[:end])
        return head

    def _finish_body(self, head: RequestHead, body: SizedBody | ChunkedBody) -> Request | None:
        if isinstance(body, ChunkedBody):
            self.unread = body.receive_data(self.unread)
        if not body.is_whole:
            return None
        self._head = self._body = None
        return Request(head, body.data)
