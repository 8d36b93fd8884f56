"""Decompresses request bodies with `Content-Encoding: zstd`, `gzip` or `deflate`.

A short body of one frame is decompressed immediately. All others are decompressed on a thread, one at a time,
so that the event loop can serve other requests. Bodies wait for the thread in compressed form, so several
decompression bombs need no more memory than one.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from edgekit_runtime.codecs.compression import decompress, decompress_frame
from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.options.http import HttpLimits
from edgekit_runtime.service.scheduling.fair_pool import Threads

# The loop decompresses shorter bodies in 0.02 to 0.5 ms, or 2 to 4 ms for a hostile one full of Huffman
# tables.
_SHORT_BODY_BYTES: Final = 32 << 10
_SHORT_CONTENT_BYTES: Final = 128 << 10
_MAX_WAITING: Final = 64  # per client. A bomb takes 0.3 s

_Action: TypeAlias = Callable[[Connection, RequestHead, memoryview], None]


class CompressedBodies:
    """Decompresses request bodies before their handlers run."""

    __slots__ = ("_held_bytes", "_limits", "_loop", "_threads", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: HttpLimits) -> None:
        """Start without work. `limits` also apply to decompressed bodies."""
        self._loop, self._limits = loop, limits
        self._waiting: dict[str, deque[_LongBody]] = {}  # by client, the next one first
        self._held_bytes = 0  # compressed, of those that wait and of the one under way
        self._threads: Threads | None = None  # made with the first long body: most services get none

    def decode(self, action: _Action) -> _Action:
        """Wrap `action` so that it receives the decompressed body. On failure, respond with an error."""
        return functools.partial(self._handle, action)

    def close(self, timeout_s: float) -> bool:
        """Stop the thread, and return whether it has ended."""
        return self._threads is None or self._threads.close(timeout_s)

    def _handle(self, action: _Action, connection: Connection, head: RequestHead, body: memoryview) -> None:
        if not len(body):  # clients that compress state so for all their requests
            action(connection, head, body)
            return
        limits = self._limits
        if len(body) <= _SHORT_BODY_BYTES:
            max_bytes = min(_SHORT_CONTENT_BYTES, limits.max_body_bytes)
            content = decompress_frame(body, head.content_coding, max_bytes=max_bytes)
            if content is not None:
                action(connection, head, memoryview(content))
                return
        is_full = self._held_bytes and self._held_bytes + len(body) > limits.max_receiving_bytes
        client = connection.client
        if is_full or len(self._waiting.get(client, ())) >= _MAX_WAITING:
            raise RequestError(503, "too many compressed bodies at one time; try again", retry_after_s=1)
        self._held_bytes += len(body)
        self._waiting.setdefault(client, deque()).append(_LongBody(action, connection, head, body))
        if self._held_bytes == len(body):
            self._start_next()

    def _start_next(self) -> None:
        if self._threads is None:
            self._threads = Threads(self._loop, 1)
        while self._waiting:
            client = next(iter(self._waiting))
            bodies = self._waiting.pop(client)
            work = bodies.popleft()
            if bodies:
                self._waiting[client] = bodies  # behind the other clients
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
