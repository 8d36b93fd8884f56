"""Parses forms with files (`multipart/form-data`, RFC 7578) incrementally and without I/O.

The parser accepts the forms that browsers send, and refuses everything else, such as a preamble or nested
parts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from edgekit_runtime.errors import RequestError

_CONTENT_TYPE: Final = re.compile(
    r'multipart/form-data; *boundary="?([A-Za-z0-9\'()+_,./:=?-]{1,70})"?', re.IGNORECASE
)
_DISPOSITION: Final = re.compile(
    r'content-disposition: *form-data; *name="([^"\r\n]{1,100})"(?:; *filename="([^"\r\n]*)")?', re.IGNORECASE
)
_MAX_HEAD_BYTES: Final = 4 << 10
_MAX_PARTS: Final = 50


@dataclass(frozen=True, slots=True)
class PartBegin:
    """The header of a part.

    Attributes:
        file_name: The file name from the client, or None if the field is not a file.
    """

    name: str
    file_name: str | None


PartData: TypeAlias = bytes


class MultipartParser:
    """Parses a body in chunks of any size."""

    def __init__(self, content_type: str) -> None:
        """Read the boundary from the header `Content-Type`.

        Raises:
            RequestError: 415 if the type is not `multipart/form-data`.
        """
        match = _CONTENT_TYPE.fullmatch(content_type.strip())
        if match is None:
            raise RequestError(415, f"Content-Type is {content_type[:80]!r}, expected multipart/form-data")
        self._delimiter = b"\r\n--" + match[1].encode()
        self._buffer = b"\r\n"  # no line end precedes the first boundary
        self._is_in_part = True  # of no name, and it must be empty
        self._parts = 0
        self.is_complete = False
        """Whether the last boundary has come; otherwise the body was cut off."""

    def feed(self, piece: bytes) -> Iterator[PartBegin | PartData]:
        """Parse a chunk of the body, and yield headers of parts and their data.

        Raises:
            RequestError: 400 if the body is malformed.
        """
        self._buffer += piece
        while not self.is_complete:
            events = self._find_data() if self._is_in_part else self._find_head()
            if events is None:
                return
            yield from events
        if self._buffer.strip(b"\r\n"):
            raise RequestError(400, "the form goes on after its end")

    def _find_data(self) -> list[PartBegin | PartData] | None:
        end = self._buffer.find(self._delimiter)
        safe_end = end if end >= 0 else len(self._buffer) - len(self._delimiter) - 1
        if safe_end > 0 and not self._parts:
            raise RequestError(400, "the form does not begin with its boundary")
        data, self._buffer = self._buffer[: max(safe_end, 0)], self._buffer[max(safe_end, 0) :]
        events: list[PartBegin | PartData] = [data] if data else []
        mark = self._buffer[len(self._delimiter) :][:2]
        if end < 0 or len(mark) < 2:
            return events or None
        if mark not in (b"\r\n", b"--"):
            raise RequestError(400, "a boundary of the form is malformed")
        self._buffer = self._buffer[len(self._delimiter) + 2 :]
        self._is_in_part, self.is_complete = False, mark == b"--"
        return events

    def _find_head(self) -> list[PartBegin | PartData] | None:
        head, end, remainder = self._buffer.partition(b"\r\n\r\n")
        if len(head) > _MAX_HEAD_BYTES:
            raise RequestError(400, "the head of a part of the form is too long")
        if not end:
            return None
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise RequestError(400, f"the form has over {_MAX_PARTS} parts")
        try:
            lines = head.decode().split("\r\n")
        except UnicodeDecodeError as cause:
            raise RequestError(400, "the head of a part of the form is no UTF-8") from cause
        matches = [match for line in lines if (match := _DISPOSITION.fullmatch(line)) is not None]
        if len(matches) != 1:
            raise RequestError(400, "a part of the form does not state one name")
        self._buffer, self._is_in_part = remainder, True
        return [PartBegin(matches[0][1], matches[0][2])]
