"""What a connection receives: bytes to requests, one after the other.

A client repeats its requests, so what comes is first compared with the head of the last one. It reads from
the socket itself, and begins requests through the connection, which answers and closes.
"""

import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.service.http.lease import IDLE, UNDER_WAY, Lease
from edgekit_runtime.service.http.request_body import READ_BYTES, ChunkedBody, SizedBody
from edgekit_runtime.service.http.request_head import Head, find_end
from edgekit_runtime.service.http.response import CONTINUE

if TYPE_CHECKING:
    from edgekit_runtime.service.http.connection import Connection
    from edgekit_runtime.service.http.server import HttpServer

_MAX_AHEAD_BYTES: Final = 256 << 10  # of requests that wait for the one under way
_MAX_AT_ONCE: Final = 16  # requests of one connection in one turn of the loop, which others wait for

_logger = logging.getLogger(__name__)


class Receiver:
    """The receiving half of a connection; it holds no reference to that, which holds it.

    Attributes:
        unread: what was received and not yet taken.
        expected: the head that the next request probably has; None unless that begins with the next byte.
        has_ended: the client sends nothing more.
        is_yielding: others have their turn, before what was received is gone on with.
    """

    __slots__ = (
        *("_head", "_incoming", "_is_advancing", "_is_paused", "_lease", "_received"),
        *("_scanned", "_server", "_socket", "expected", "has_ended", "is_yielding", "unread"),
    )

    def __init__(
        self,
        connection: "Connection",
        server: "HttpServer",
        connected: socket.socket,
        unread: bytes,
        lease: Lease | None,
    ) -> None:
        """Read from `connected` whenever it has something; see `HttpServer.adopt`."""
        self._server, self._socket, self._lease = server, connected, lease
        self.unread = unread
        self.expected: Head | None = None
        self._scanned = 0
        self._incoming: SizedBody | ChunkedBody | None = None
        self._head: Head | None = None  # of the body that is being received
        self._received = 0  # of the body, as the server has counted it
        self.has_ended = self.is_yielding = self._is_advancing = self._is_paused = False
        server.loop.add_reader(connected.fileno(), self._on_readable, connection)

    @property
    def body_bytes(self) -> int | None:
        """How much has come of the body that is being received, or None where there is none."""
        return None if self._incoming is None else self._incoming.received_bytes

    def stop(self) -> None:
        """Read nothing more."""
        self._server.loop.remove_reader(self._socket.fileno())
        self.discard()

    def discard(self) -> None:
        """Forget what was received and not handed on."""
        self._drop_body()
        self.unread, self.expected = b"", None

    def go_on(self, connection: "Connection", last: Head | None) -> None:
        """Take the next request, after one whose head was `last`."""
        if self._is_paused:
            self.unpause(connection)
        if not self.unread:
            self.expected = last
        elif not self.is_yielding:
            self.advance(connection)

    def unpause(self, connection: "Connection") -> None:
        """Read on, where too much was sent ahead."""
        if self._is_paused:
            self._is_paused = False
            self._server.loop.add_reader(self._socket.fileno(), self._on_readable, connection)

    def advance(self, connection: "Connection") -> None:
        """Take requests from what was received, until one is under way or more is needed."""
        if self._is_advancing:
            return
        self._is_advancing = True
        left = _MAX_AT_ONCE
        try:
            while (
                self.unread
                and not connection.is_busy
                and not connection.closes
                and self._take_request(connection)
            ):
                left -= 1
                if not left and self.unread and not connection.is_busy:
                    self.is_yielding = True
                    self._server.loop.call_soon(self._end_turn, connection)
                    break
        except EdgekitError as error:
            connection.refuse(error)
        except MemoryError:
            connection.refuse(_lack_memory())
        except Exception:
            _logger.exception("a connection failed inside the service")
            connection.close()  # where its next request begins is not known
        finally:
            self._is_advancing = False
        if self.has_ended and not (connection.is_busy or self.is_yielding):
            connection.close()  # what is left of its requests will not become whole

    def _on_readable(self, connection: "Connection") -> None:
        lease = self._lease
        if lease is not None and not connection.is_sending:
            lease.states[lease.index] = UNDER_WAY
        if self._incoming is not None:
            self._receive_body(connection, self._incoming)
            return
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            if lease is not None and connection.is_at_rest and not self.unread:
                lease.states[lease.index] = IDLE
            return
        except OSError:
            connection.close()
            return
        expected = self.expected
        if expected is not None and expected.begins_all_of(data):
            self.expected = None
            connection.begin(expected, memoryview(data)[expected.size_bytes :])
        elif data:
            self._take_in(connection, data)
        else:
            self._take_end(connection)

    def _take_in(self, connection: "Connection", data: bytes) -> None:
        """Take bytes of which nothing is known."""
        if connection.is_lingering:
            return
        self.expected = None
        self.unread = self.unread + data if self.unread else data
        if not (connection.is_busy or self.is_yielding):
            self.advance(connection)
        elif len(self.unread) > _MAX_AHEAD_BYTES:
            self._is_paused = True
            self._server.loop.remove_reader(self._socket.fileno())

    def _take_end(self, connection: "Connection") -> None:
        """The client sends nothing more, but may still read."""
        self.has_ended = True
        if connection.is_busy or self.is_yielding:
            self._server.loop.remove_reader(self._socket.fileno())
        else:
            connection.close()

    def _end_turn(self, connection: "Connection") -> None:
        """Others have had their turn."""
        self.is_yielding = False
        if connection.is_open:
            self.unpause(connection)
            self.advance(connection)

    def _take_request(self, connection: "Connection") -> bool:
        """Return whether a whole request was taken."""
        data, limits = self.unread, self._server.limits
        end = find_end(data, self._scanned, limits.max_head_bytes)
        if end is None:
            if not self._scanned and connection.on_admit is None:  # else the time runs since it connected
                self._server.wheel.expire(connection, limits.read_timeout_s)
            self._scanned = max(len(data) - 3, 1)
            return False
        if data.startswith(b"\r\n"):  # one empty line is skipped, as RFC 9112 2.2 asks
            data = self.unread = data[2:]
            end -= 2
        head = self._server.heads[connection.is_local].parse(data[:end])
        if not head.is_cleared and self._server.screen(connection, head):
            return False
        if connection.on_admit is not None:
            connection.admit()
        self._scanned = 0
        length = head.body_bytes
        if length is not None and len(data) >= end + length and not head.passes_descriptor:
            self.unread = data[end + length :]
            connection.begin(head, memoryview(data)[end : end + length])
            return True
        self._head = head
        self.unread = b""
        self._begin_body(connection, head, data[end:])
        return self._incoming is None

    def _begin_body(self, connection: "Connection", head: Head, begun: bytes) -> None:
        limits, size_bytes = self._server.limits, head.body_bytes
        if size_bytes is not None and size_bytes > limits.max_body_bytes:
            raise RequestError(
                413, f"the body has {size_bytes} bytes, the limit here is {limits.max_body_bytes}"
            )
        if head.expects_continue:
            with contextlib.suppress(OSError):  # 25 bytes fit, or the client is gone, which reading will tell
                self._socket.send(CONTINUE)
        if size_bytes is None:
            self._incoming = ChunkedBody(limits.max_body_bytes, begun)
        else:
            passed = connection.descriptors if head.passes_descriptor else None
            self._incoming = SizedBody(size_bytes, head.json_bytes or 0, begun, passed)
        connection.watch_progress(self._incoming.received_bytes)
        self._take_body(connection, self._incoming)

    def _receive_body(self, connection: "Connection", body: SizedBody | ChunkedBody) -> None:
        try:
            body.receive(self._socket)
            self._take_body(connection, body)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            connection.close()  # in the middle of a body: nobody waits for an answer
        except MemoryError:
            connection.refuse(_lack_memory())
        except EdgekitError as error:
            connection.refuse(error)

    def _take_body(self, connection: "Connection", body: SizedBody | ChunkedBody) -> None:
        """Begin the request if its body is whole now.

        Raises:
            RequestError: it is too much, with the other bodies that are being received.
        """
        head, server = self._head, self._server
        if body.is_whole and head is not None:
            self._drop_body()
            self.unread = body.rest
            connection.begin(head, body.data)
            return
        server.receiving_bytes += body.received_bytes - self._received
        self._received = body.received_bytes
        if server.receiving_bytes > server.limits.max_receiving_bytes:
            raise RequestError(503, "too many large bodies at one time; try again", retry_after_s=1)

    def _drop_body(self) -> None:
        self._server.receiving_bytes -= self._received
        self._received = 0
        self._incoming = self._head = None


def _lack_memory() -> RequestError:
    return RequestError(503, "not enough memory for the body; try again", retry_after_s=1)
