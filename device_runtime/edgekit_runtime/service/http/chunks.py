"""A body in chunks, put together again; strict, since what two readers read differently can be smuggled.

Source: RFC 9112, section 7.1.
"""

import re
from typing import Final

from edgekit_runtime.errors import RequestError

_MAX_LINE_BYTES: Final = 256  # of a size with its extensions, and of a trailer
_MAX_TRAILERS: Final = 16
# A size, then extensions, which mean nothing here. No bare line feed can hide in them.
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class ChunkReader:
    """Takes the bytes of a chunked body in pieces of any size.

    Attributes:
        body: what has been received of it.
    """

    __slots__ = ("_is_in_trailers", "_left_bytes", "_max_bytes", "_trailers", "_unread", "body")

    def __init__(self, max_bytes: int) -> None:
        self.body = bytearray()
        self._max_bytes = max_bytes
        self._unread = b""
        self._left_bytes = 0  # of the chunk with its line end
        self._is_in_trailers = False
        self._trailers = 0

    def feed(self, data: bytes) -> bytes | None:
        """Return what follows the body in `data`, or None when the body goes on.

        Raises:
            RequestError: not in chunks, or too long.
        """
        data = self._unread + data
        at = 0
        while True:
            if self._left_bytes:
                at = self._take_content(data, at)
                if self._left_bytes:
                    self._unread = data[at:]
                    return None
            end = data.find(b"\r\n", at, at + _MAX_LINE_BYTES + 2)
            if end < 0:
                if len(data) - at > _MAX_LINE_BYTES:
                    raise RequestError(400, "chunked body: a line is too long")
                self._unread = data[at:]
                return None
            line, at = data[at:end], end + 2
            if not self._is_in_trailers:
                self._begin_chunk(line)
            elif not line:
                return data[at:]
            else:
                self._skip_trailer(line)

    def _take_content(self, data: bytes, at: int) -> int:
        content_bytes = min(self._left_bytes - 2, len(data) - at)
        if content_bytes > 0:
            self.body += memoryview(data)[at : at + content_bytes]
            self._left_bytes -= content_bytes
            at += content_bytes
        if self._left_bytes == 2 and len(data) - at >= 2:
            if data[at : at + 2] != b"\r\n":
                raise RequestError(400, "chunked body: a chunk is longer than its size")
            self._left_bytes, at = 0, at + 2
        return at

    def _begin_chunk(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise RequestError(400, f"chunked body: {line[:32]!r} is no size of a chunk")
        size_bytes = int(match[1], 16)
        if size_bytes == 0:
            self._is_in_trailers = True
            return
        if len(self.body) + size_bytes > self._max_bytes:
            raise RequestError(413, f"the body has more than {self._max_bytes} bytes, the limit here")
        self._left_bytes = size_bytes + 2

    def _skip_trailer(self, line: bytes) -> None:
        self._trailers += 1
        if self._trailers > _MAX_TRAILERS or _TRAILER_LINE.fullmatch(line) is None:
            raise RequestError(400, "chunked body: too many or malformed trailers")
