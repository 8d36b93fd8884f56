"""Requests whose bodies are compressed: `Content-Encoding: zstd`, `gzip` or `deflate`.

A short body is decompressed at once. A longer one is decompressed on a thread, since the loop serves others
meanwhile. Only one long body is decompressed at a time, and the others wait compressed. So bombs take the
memory of one of them, however many clients send one.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from edgekit_runtime.codecs.compression import ZSTD, decompress, read_size
from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.options.http import HttpLimits
from edgekit_runtime.service.scheduling.fair_pool import Threads

_SHORT_BYTES: Final = 128 << 10  # of a body and of its content; 0.1 to 0.5 ms
_TOO_LARGE: Final = 413

_Action: TypeAlias = Callable[[Connection, RequestHead, memoryview], None]


class CompressedBodies:
    """Decompresses bodies on their way to an action."""

    __slots__ = ("_held_bytes", "_limits", "_loop", "_threads", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: HttpLimits) -> None:
        """Begin without work.

        Args:
            loop: the loop of the service.
            limits: limits of bodies, which hold for decompressed ones too.
        """
        self._loop, self._limits = loop, limits
        self._waiting: deque[_LongBody] = deque()
        self._held_bytes = 0  # compressed, of those that wait and of the one under way
        self._threads: Threads | None = None  # made with the first long body: most services get none

    def decode(self, action: _Action) -> _Action:
        """Return an action that passes decompressed bodies to `action`."""
        return functools.partial(self._handle, action)

    def close(self, timeout_s: float) -> bool:
        """End the thread; return whether it has ended."""
        return self._threads is None or self._threads.close(timeout_s)

    def _handle(self, action: _Action, connection: Connection, head: RequestHead, body: memoryview) -> None:
        limits = self._limits
        short_bytes = min(_SHORT_BYTES, limits.max_body_bytes)
        if not len(body):  # clients that compress state so for all their requests
            action(connection, head, body)
            return
        if _may_be_short(body, head.content_coding, short_bytes):
            try:
                content = decompress(body, head.content_coding, max_bytes=short_bytes)
            except RequestError as error:
                if error.status != _TOO_LARGE:
                    raise
            else:
                action(connection, head, memoryview(content))
                return
        if self._held_bytes and self._held_bytes + len(body) > limits.max_receiving_bytes:
            raise RequestError(503, "too many compressed bodies at one time; try again", retry_after_s=1)
        self._held_bytes += len(body)
        self._waiting.append(_LongBody(action, connection, head, body))
        if self._held_bytes == len(body):
            self._start_next()

    def _start_next(self) -> None:
        if self._threads is None:
            self._threads = Threads(self._loop, 1)
        while self._waiting:
            work = self._waiting.popleft()
            if work.connection.is_open:
                run = functools.partial(work.decompress, self._limits.max_body_bytes)
                self._threads.start(run, functools.partial(self._finish, work))
                return
            self._held_bytes -= len(work.body)

    def _finish(self, work: "_LongBody") -> None:
        if work.connection.is_open:
            work.respond()  # its client may have sent another body ahead, which waits then
        self._held_bytes -= len(work.body)
        self._start_next()


def _may_be_short(body: memoryview, coding: str, short_bytes: int) -> bool:
    """Return whether decompressing may be quick; zstd alone does not end with the output that is allowed."""
    size_bytes = read_size(body, coding) if coding == ZSTD else 0
    return size_bytes is not None and max(size_bytes, len(body)) <= short_bytes


class _LongBody:
    """A body that waits for the thread, with what follows."""

    __slots__ = ("_action", "_content", "_error", "_head", "body", "connection")

    def __init__(self, action: _Action, connection: Connection, head: RequestHead, body: memoryview) -> None:
        self._action, self._head = action, head
        self.connection, self.body = connection, body
        self._content = b""
        self._error: Exception | None = None

    def decompress(self, max_bytes: int) -> None:
        """Decompress, on the thread; raises nothing."""
        try:
            self._content = decompress(self.body, self._head.content_coding, max_bytes=max_bytes)
        except MemoryError:
            self._error = RequestError(503, "not enough memory for the body; try again", retry_after_s=1)
        except Exception as error:
            self._error = error

    def respond(self) -> None:
        """Pass the content to the action, or respond with the error."""
        error, self._error = self._error, None  # else each keeps the other: the traceback has the content
        if error is not None:
            self.connection.respond_error(error)
            return
        try:
            self._action(self.connection, self._head, memoryview(self._content))
        except Exception as cause:
            self.connection.respond_error(cause)
