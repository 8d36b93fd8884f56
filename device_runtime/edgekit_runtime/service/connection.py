"""One connection of a client: bytes in, requests out to the handler, answers back in order.

It is driven by the event loop's readiness callbacks and calls the socket itself. One request is under way at
a time; what a client sends ahead waits. It knows nothing of what requests mean.
"""

import contextlib
import itertools
import logging
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.service.answers import CONTINUE, make_error
from edgekit_runtime.service.chunks import ChunkReader
from edgekit_runtime.service.heads import Head
from edgekit_runtime.service.leases import ANSWERING, IDLE, UNDER_WAY, Lease
from edgekit_runtime.service.wheel import NEVER
from edgekit_runtime.sessions.session import Array

if TYPE_CHECKING:
    from edgekit_runtime.service.http import HttpServer

Buffer: TypeAlias = "bytes | memoryview | Array"

_READ_BYTES: Final = 64 << 10
_MAX_AHEAD_BYTES: Final = 256 << 10  # of requests that wait for the one under way
_ALIGNMENT_BYTES: Final = 64
_MAX_AT_ONCE: Final = 16  # requests of one connection in one turn of the loop, which others wait for
_MAX_PARTS: Final = 512  # of one sendmsg; the system takes 1,024
_LINGER_S: Final = 2.0
_MAX_DESCRIPTORS: Final = 4

_logger = logging.getLogger(__name__)


class Connection:
    """A client's connection, from when it is accepted or adopted until it is closed or released.

    Attributes:
        is_local: whether it came over the Unix socket, whose permissions say who may.
        descriptors: that came with the body under way; whoever takes one removes it from the list.
        on_close: called once when the connection ends here, or None.
        expires, looked_at: see `Timed`.
    """

    __slots__ = (
        "_body",
        "_chunks",
        "_closes",
        "_filled",
        "_has_ended",
        "_head",
        "_is_advancing",
        "_is_busy",
        "_is_lingering",
        "_is_paused",
        "_is_yielding",
        "_lease",
        "_moved",
        "_out",
        "_received",
        "_scanned",
        "_server",
        "_socket",
        "_unread",
        "descriptors",
        "expires",
        "is_local",
        "looked_at",
        "on_close",
    )

    def __init__(
        self,
        server: "HttpServer",
        connected: socket.socket,
        *,
        is_local: bool,
        unread: bytes = b"",
        lease: Lease | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Take over `connected`, which must not block; see `HttpServer.adopt`."""
        self._server = server
        self._socket: socket.socket | None = connected
        self.is_local = is_local
        self.descriptors: list[int] = []
        self.on_close = on_close
        self.expires = self.looked_at = NEVER
        self._unread = unread
        self._lease = lease
        self._scanned = 0
        self._head: Head | None = None
        self._body: memoryview | None = None
        self._filled = 0
        self._received = self._moved = 0  # of the body; of it or the answer, when last looked at
        self._chunks: ChunkReader | None = None
        self._out: deque[memoryview] | None = None
        self._is_busy = self._is_advancing = self._is_paused = self._is_yielding = False
        self._closes = self._has_ended = self._is_lingering = False
        server.remember(self)
        server.wheel.expire(self, server.limits.idle_timeout_s)
        server.loop.add_reader(connected.fileno(), self._on_readable)
        if unread:
            self._advance()

    def resume(self, unread: bytes) -> None:
        """Go on with what was received before, of a connection that was adopted without it."""
        if self._lease is not None:
            self._lease.states[self._lease.index] = UNDER_WAY if unread else IDLE
        self._unread = unread
        self._advance()

    # Receiving

    def _on_readable(self) -> None:
        lease = self._lease
        if lease is not None and self._out is None:
            lease.states[lease.index] = UNDER_WAY
        if self._body is not None:
            self._fill()
            return
        connected = self._socket
        if connected is None:
            return
        try:
            data = connected.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            if lease is not None and self.is_at_rest and not self._unread:
                lease.states[lease.index] = IDLE
            return
        except OSError:
            self.close()
            return
        if not data:
            self._on_end()
        elif self._is_lingering:
            return
        elif self._chunks is not None:
            self._feed_chunks(data)
        else:
            self._unread = self._unread + data if self._unread else data
            if not (self._is_busy or self._is_yielding):
                self._advance()
            elif len(self._unread) > _MAX_AHEAD_BYTES:
                self._is_paused = True
                self._server.loop.remove_reader(connected.fileno())

    def _on_end(self) -> None:
        """The client sends nothing more, but may still read."""
        self._has_ended = True
        if (self._is_busy or self._is_yielding) and self._socket is not None:
            self._server.loop.remove_reader(self._socket.fileno())
        else:
            self.close()

    def _advance(self) -> None:
        """Take requests from what was received, until one is under way or more is needed."""
        if self._is_advancing:
            return
        self._is_advancing = True
        left = _MAX_AT_ONCE
        try:
            while self._unread and not self._is_busy and not self._closes and self._take_request():
                left -= 1
                if not left and self._unread and not self._is_busy:
                    self._is_yielding = True
                    self._server.loop.call_soon(self._go_on)
                    break
        except RequestError as error:
            self.refuse(error)
        except Exception:
            _logger.exception("a connection failed inside the service")
            self.close()  # where its next request begins is not known
        finally:
            self._is_advancing = False
        if self._has_ended and not (self._is_busy or self._is_yielding):
            self.close()  # what is left of its requests will not become whole

    def _go_on(self) -> None:
        """Others have had their turn."""
        self._is_yielding = False
        if self._socket is not None:
            self._unpause(self._socket)
            self._advance()

    def _unpause(self, connected: socket.socket) -> None:
        if self._is_paused:
            self._is_paused = False
            self._server.loop.add_reader(connected.fileno(), self._on_readable)

    def _take_request(self) -> bool:
        """Return whether a whole request was taken."""
        data = self._unread
        end = data.find(b"\r\n\r\n", self._scanned) + 4
        limits = self._server.limits
        if end < 4 or end > limits.max_head_bytes:
            if len(data) > limits.max_head_bytes:
                raise RequestError(
                    431, f"the head has more than {limits.max_head_bytes} bytes, the limit here"
                )
            if not self._scanned:
                self._server.wheel.expire(self, limits.read_timeout_s)
            self._scanned = max(len(data) - 3, 1)
            return False
        if data.startswith(b"\r\n"):  # one empty line is skipped, as RFC 9112 2.2 asks
            data = self._unread = data[2:]
            end -= 2
        head = self._server.heads.parse(data[:end])
        if self._server.screen(self, head):
            return False
        self._scanned = 0
        length = head.body_bytes
        if length is not None and len(data) >= end + length and not head.passes_descriptor:
            self._unread = data[end + length :]
            self._begin(head, memoryview(data)[end : end + length])
            return True
        self._head = head
        self._unread = b""
        self._begin_body(head, data[end:])
        return self._body is None and self._chunks is None

    def _begin(self, head: Head, body: memoryview) -> None:
        self._head = head
        self._is_busy = True
        self.expires = NEVER
        try:
            action = head.route
            if action is None:
                self._server.handle(self, head, body)
            else:
                action(self, head, body)
        except EdgekitError as error:
            self.answer(*make_error(error))
        except Exception:
            _logger.exception("a request to %s failed inside the service", head.path)
            self.answer(*make_error(RequestError(500, "the service failed; its log says why")))

    # Bodies that come in several pieces

    def _begin_body(self, head: Head, begun: bytes) -> None:
        limits = self._server.limits
        if head.body_bytes is None:
            self._chunks = ChunkReader(limits.max_body_bytes)
            self._moved = 0
            self._server.wheel.expire(self, limits.read_timeout_s)
            self._send_continue(head)
            if begun:
                self._feed_chunks(begun)
            return
        if head.body_bytes > limits.max_body_bytes:
            raise RequestError(
                413, f"the body has {head.body_bytes} bytes, the limit here is {limits.max_body_bytes}"
            )
        self._server.wheel.expire(self, limits.read_timeout_s)
        taken = min(len(begun), head.body_bytes)
        self._moved = taken
        self._count_received(taken)
        body = _allocate(head.body_bytes, head.json_bytes or 0)
        body[:taken] = begun[:taken]
        self._body, self._filled, self._unread = body, taken, begun[taken:]
        self._send_continue(head)
        if taken == head.body_bytes:
            self._end_body(body)

    def _count_received(self, total_bytes: int) -> None:
        """So much of the body has come.

        Raises:
            RequestError: that is too much, with the other bodies that are being received.
        """
        server = self._server
        server.receiving_bytes += total_bytes - self._received
        self._received = total_bytes
        if server.receiving_bytes > server.limits.max_receiving_bytes:
            raise RequestError(503, "too many large bodies at one time; try again", retry_after_s=1)

    def _send_continue(self, head: Head) -> None:
        if head.expects_continue and self._socket is not None:
            with contextlib.suppress(OSError):  # 25 bytes fit, or the client is gone, which reading will tell
                self._socket.send(CONTINUE)

    def _fill(self) -> None:
        body, head, connected = self._body, self._head, self._socket
        if body is None or head is None or connected is None:
            return
        try:
            if head.passes_descriptor:
                count = self._receive_descriptor(connected, body[self._filled :])
            else:
                count = connected.recv_into(body[self._filled :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count == 0:
            self.close()  # in the middle of a body: nobody waits for an answer
            return
        self._filled += count
        if self._filled == len(body):
            self._end_body(body)
            return
        try:
            self._count_received(self._filled)
        except RequestError as error:
            self._drop_body()
            self.refuse(error)

    def _receive_descriptor(self, connected: socket.socket, free: memoryview) -> int:
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array("i").itemsize)
        count, extras, _, _ = connected.recvmsg_into([free], room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in extras:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self.descriptors.extend(received)
        for descriptor in self.descriptors[_MAX_DESCRIPTORS:]:  # each byte may bring more
            os.close(descriptor)
        del self.descriptors[_MAX_DESCRIPTORS:]
        return count

    def _end_body(self, body: memoryview) -> None:
        head = self._head
        self._drop_body()
        if head is not None:
            self._begin(head, body)

    def _feed_chunks(self, data: bytes) -> None:
        chunks, head = self._chunks, self._head
        if chunks is None or head is None:
            return
        try:
            rest = chunks.feed(data)
            if rest is None:
                self._count_received(len(chunks.body))
        except MemoryError:
            self._drop_body()
            self.refuse(RequestError(503, "not enough memory for the body; try again", retry_after_s=1))
            return
        except RequestError as error:
            self._drop_body()
            self.refuse(error)
            return
        if rest is not None:
            self._drop_body()
            self._unread = rest
            self._begin(head, memoryview(chunks.body))

    # Answering

    def refuse(self, error: EdgekitError) -> None:
        """Answer with `error` and close, since where the next request begins is not known."""
        self._is_busy = self._closes = True
        self._unread = b""
        self.answer(*make_error(error))

    def answer(self, head: bytes, *body: Buffer) -> None:
        """Send the answer to the request under way; does nothing when the connection is gone.

        Args:
            head: as `make_head` returns it.
            body: C-contiguous; must not change until it is sent.
        """
        connected, asked = self._socket, self._head
        if connected is None or not self._is_busy:
            return
        is_last = asked is None or not asked.keeps_alive or self._server.is_draining
        if is_last or (self._has_ended and not self._unread):
            self._closes = True
        if self._closes:
            head = head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        elif asked is not None and asked.is_http_1_0:
            head = head.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)
        if asked is not None and asked.method == "HEAD":
            body = ()
        size_bytes = len(head)
        for part in body:
            size_bytes += part.nbytes if type(part) is not bytes else len(part)  # type: ignore[union-attr]
        if self._lease is not None:
            self._lease.states[self._lease.index] = ANSWERING
        if len(body) >= _MAX_PARTS:
            self._queue((head, *body), 0)
            return
        try:
            sent = connected.sendmsg((head, *body))  # type: ignore[arg-type]  # arrays are buffers
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent == size_bytes:
            self._finish()
        else:
            self._queue((head, *body), sent)

    def _queue(self, parts: Sequence[Buffer], sent: int) -> None:
        if self._socket is None:
            return
        server = self._server
        self._out = deque(part for part in map(_flatten, parts) if len(part))
        left = sum(map(len, self._out))
        limit = server.limits.max_sending_bytes
        if server.sending_bytes and server.sending_bytes + left - sent > limit:
            self._out = None
            self.close()  # clients that do not take their answers fill the memory
            return
        server.sending_bytes += left
        self._drop_sent(sent)
        self._moved = left - sent
        server.wheel.expire(self, server.limits.read_timeout_s)
        server.loop.add_writer(self._socket.fileno(), self._on_writable)

    def _drop_sent(self, sent: int) -> None:
        out: Any = self._out
        self._server.sending_bytes -= sent
        while sent:
            if len(out[0]) <= sent:
                sent -= len(out.popleft())
            else:
                out[0] = out[0][sent:]
                sent = 0

    def _on_writable(self) -> None:
        out, connected = self._out, self._socket
        if out is None or connected is None:
            return
        try:
            self._drop_sent(connected.sendmsg(tuple(itertools.islice(out, _MAX_PARTS))))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not out:
            self._out = None
            self._server.loop.remove_writer(connected.fileno())
            self._finish()

    def _finish(self) -> None:
        """The answer is sent: go on with the next request, or part."""
        self._is_busy = False
        self._head = None
        if self.descriptors:
            self._close_descriptors()
        if self._closes:
            self._part()
            return
        if self._has_ended and not self._unread:
            self.close()
            return
        self.expires = self._server.idle_until()
        if self._lease is not None:
            self._lease.states[self._lease.index] = UNDER_WAY if self._unread else IDLE
        if self._server.on_rest is not None:
            self._server.on_rest(self)
            return
        if self.looked_at >= NEVER:  # the wheel looked while the request was under way
            self._server.wheel.expire(self, self._server.limits.idle_timeout_s)
        if self._is_paused and self._socket is not None:
            self._unpause(self._socket)
        if self._unread and not self._is_yielding:
            self._advance()

    # Ending

    def on_timeout(self) -> None:
        """Say so to a client that is in the middle of a request; otherwise just close.

        A body or an answer that makes progress gets more time.
        """
        if self._has_progressed():
            self._server.wheel.expire(self, self._server.limits.read_timeout_s)
            return
        is_reading = bool(self._unread or self._head is not None) and not self._is_busy
        if is_reading and not self._is_lingering:
            self._drop_body()
            self.refuse(RequestError(408, "the request did not arrive in time"))
        else:
            self.close()

    def _has_progressed(self) -> bool:
        """Return whether enough of a body or an answer has moved since the last look."""
        before = self._moved
        if self._out is not None:
            self._moved = sum(map(len, self._out))
        elif self._body is not None or self._chunks is not None:
            self._moved = self._filled if self._chunks is None else len(self._chunks.body)
        else:
            return False
        return abs(self._moved - before) >= self._server.limits.step_bytes

    def _part(self) -> None:
        """Close so that the client can still read the last answer: unread data would reset the connection."""
        connected = self._socket
        if connected is None or self._has_ended or self._is_lingering:
            self.close()
            return
        self._is_lingering = True
        self._unread = b""
        self._server.wheel.expire(self, _LINGER_S)
        try:
            connected.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        if self._is_paused:
            self._server.loop.add_reader(connected.fileno(), self._on_readable)

    @property
    def is_at_rest(self) -> bool:
        """Whether it can be released: no request is being received beyond its head, or answered."""
        is_open = self._socket is not None and not self._closes
        return is_open and not self._is_busy and self._head is None

    def close_if_idle(self) -> None:
        """Close unless a request is under way, which then is the last one."""
        if not self._is_busy and self._head is None and not self._unread:
            self.close()

    def close(self) -> None:
        """End the connection at once; a second call does nothing."""
        connected = self._detach()
        if connected is not None:
            connected.close()

    def release(self) -> tuple[socket.socket, bytes]:
        """Give the socket up to somebody else, together with what was received and not answered.

        For `screen`, or between requests.
        """
        unread = self._unread
        connected = self._detach()
        if connected is None:
            raise RequestError(500, "the connection is closed already")
        return connected, unread

    def _detach(self) -> socket.socket | None:
        connected, self._socket, self._lease = self._socket, None, None
        if connected is None:
            return None
        loop, descriptor = self._server.loop, connected.fileno()
        loop.remove_reader(descriptor)
        if self._out is not None:
            loop.remove_writer(descriptor)
            self._server.sending_bytes -= sum(map(len, self._out))
            self._out = None
        self._drop_body()
        self._close_descriptors()
        self._unread = b""
        self._server.forget(self)
        if self.on_close is not None:
            self.on_close()
        return connected

    def _drop_body(self) -> None:
        self._server.receiving_bytes -= self._received
        self._received = 0
        self._body = self._chunks = None

    def _close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def _flatten(part: Buffer) -> memoryview:
    if isinstance(part, np.ndarray):
        return memoryview(part.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    return memoryview(part)


def _allocate(size_bytes: int, json_bytes: int) -> memoryview:
    """Return memory for a body whose first tensor, behind the JSON, is aligned."""
    memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    address: int = memory.__array_interface__["data"][0]
    start = -(address + json_bytes) % _ALIGNMENT_BYTES
    return memoryview(memory)[start : start + size_bytes]  # type: ignore[arg-type]
