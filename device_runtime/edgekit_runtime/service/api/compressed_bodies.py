"""Requests whose bodies are compressed: `Content-Encoding: zstd`, `gzip` or `deflate`.

A short body is decompressed at once. A longer one, or one that does not state its size, is decompressed on a
thread, since the loop serves others meanwhile.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Final, TypeAlias

from edgekit_runtime.codecs.compression import decompress, read_size
from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.options.http import HttpLimits
from edgekit_runtime.service.scheduling.fair_pool import Threads

_SHORT_BYTES: Final = 128 << 10  # decompressed; 0.1 ms, about what a request takes

_Action: TypeAlias = Callable[[Connection, RequestHead, memoryview], None]


class CompressedBodies:
    """Decompresses bodies on their way to an action."""

    __slots__ = ("_held_bytes", "_limits", "_loop", "_threads")

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: HttpLimits) -> None:
        """Begin without work.

        Args:
            loop: the loop of the service.
            limits: limits of bodies, which hold for decompressed ones too.
        """
        self._loop, self._limits = loop, limits
        self._held_bytes = 0
        self._threads: Threads | None = None  # made with the first long body: most services get none

    def decode(self, action: _Action) -> _Action:
        """Return an action that passes decompressed bodies to `action`."""
        return functools.partial(self._handle, action)

    def close(self, timeout_s: float) -> bool:
        """End the thread; return whether it has ended."""
        return self._threads is None or self._threads.close(timeout_s)

    def _handle(self, action: _Action, connection: Connection, head: RequestHead, body: memoryview) -> None:
        limits, coding = self._limits, head.content_coding
        size_bytes = read_size(body, coding)
        if size_bytes is not None and size_bytes <= min(_SHORT_BYTES, limits.max_body_bytes):
            content = decompress(body, coding, max_bytes=limits.max_body_bytes)
            action(connection, head, memoryview(content))
            return
        held_bytes = limits.max_body_bytes if size_bytes is None else size_bytes
        if held_bytes > limits.max_body_bytes:
            held_bytes = 0  # it is refused before any memory is taken
        if self._held_bytes and self._held_bytes + held_bytes > limits.max_receiving_bytes:
            raise RequestError(503, "too many compressed bodies at one time; try again", retry_after_s=1)
        if self._threads is None:
            self._threads = Threads(self._loop, 1)
        self._held_bytes += held_bytes
        work = _Decompression(body, coding, limits.max_body_bytes)
        self._threads.start(
            work.run, functools.partial(self._finish, work, held_bytes, (action, connection, head))
        )

    def _finish(
        self, work: "_Decompression", held_bytes: int, target: tuple[_Action, Connection, RequestHead]
    ) -> None:
        self._held_bytes -= held_bytes
        action, connection, head = target
        if not connection.is_open:
            return
        if work.error is not None:
            connection.respond_error(work.error)
            return
        try:
            action(connection, head, memoryview(work.content))
        except Exception as error:
            connection.respond_error(error)


class _Decompression:
    """A body; after `run` it holds the content or the error."""

    __slots__ = ("_body", "_coding", "_max_bytes", "content", "error")

    def __init__(self, body: memoryview, coding: str, max_bytes: int) -> None:
        self._body, self._coding, self._max_bytes = body, coding, max_bytes
        self.content = b""
        self.error: Exception | None = None

    def run(self) -> None:
        """Decompress; raises nothing."""
        try:
            self.content = decompress(self._body, self._coding, max_bytes=self._max_bytes)
        except MemoryError:
            self.error = RequestError(503, "not enough memory for the body; try again", retry_after_s=1)
        except Exception as error:
            self.error = error
