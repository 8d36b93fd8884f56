"""Request bodies that do not arrive together with their heads. This module does no I/O.

Source: RFC 9112, section 7.1 (chunked transfer coding).
"""

import re
from typing import Final

from edgekit_runtime.errors import RequestError
from edgekit_runtime.tensors import allocate_aligned

_MAX_LINE_BYTES: Final = 256  # of a chunk size with its extensions, and of a trailer
_MAX_TRAILERS: Final = 16
# A size, then extensions, which are ignored. No bare line feed can hide in them.
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class SizedBody:
    """A body of known length. The first tensor in it is aligned in memory."""

    __slots__ = ("data", "received_bytes")

    def __init__(self, size_bytes: int, json_bytes: int, begun: bytes) -> None:
        """Allocate the body.

        `json_bytes` is the position of the first tensor. `begun` holds the first bytes of the body, which
        arrived with the head.
        """
        self.data = allocate_aligned(size_bytes, json_bytes)
        self.data[: len(begun)] = begun
        self.received_bytes = len(begun)

    @property
    def is_whole(self) -> bool:
        return self.received_bytes == len(self.data)


class ChunkedBody:
    """A chunked body. Parsing is strict, since lenient parsers allow request smuggling."""

    __slots__ = ("_content", "_is_in_trailers", "_left_bytes", "_max_bytes", "_trailers", "is_whole")

    def __init__(self, max_bytes: int) -> None:
        self._content = bytearray()
        self._max_bytes = max_bytes
        self._left_bytes = 0  # of the present chunk, with its line end
        self._is_in_trailers = False
        self._trailers = 0
        self.is_whole = False

    @property
    def received_bytes(self) -> int:
        return len(self._content)

    @property
    def data(self) -> memoryview:
        return memoryview(self._content)

    def receive_data(self, data: bytes) -> bytes:
        """Parse `data` and return the unused bytes: an incomplete line, or the bytes after the body.

        Raises:
            RequestError: The body is malformed or too long.
        """
        at = 0
        while True:
            if self._left_bytes:
                at = self._take_content(data, at)
                if self._left_bytes:
                    return data[at:]
            end = data.find(b"\r\n", at, at + _MAX_LINE_BYTES + 2)
            if end < 0:
                if len(data) - at > _MAX_LINE_BYTES:
                    raise RequestError(400, "chunked body: a line is too long")
                return data[at:]
            line, at = data[at:end], end + 2
            if not self._is_in_trailers:
                self._begin_chunk(line)
            elif line:
                self._skip_trailer(line)
            else:
                self.is_whole = True
                return data[at:]

    def _take_content(self, data: bytes, at: int) -> int:
        content_bytes = min(self._left_bytes - 2, len(data) - at)
        if content_bytes > 0:
            self._content += memoryview(data)[at : at + content_bytes]
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
        if len(self._content) + size_bytes > self._max_bytes:
            raise RequestError(413, f"the body has more than {self._max_bytes} bytes, the limit here")
        self._left_bytes = size_bytes + 2

    def _skip_trailer(self, line: bytes) -> None:
        self._trailers += 1
        if self._trailers > _MAX_TRAILERS or _TRAILER_LINE.fullmatch(line) is None:
            raise RequestError(400, "chunked body: too many or malformed trailers")
