"""The connection of an HTTP client.

The event loop calls the connection when the socket is ready. The connection reads bytes, parses them with
`RequestParser`, passes the requests to the server's handler one at a time, and sends the responses in order.
"""

import contextlib
import logging
import os
import select
import socket
from array import array
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

from edgekit_runtime.errors import EdgekitError, RequestError, UnavailableError
from edgekit_runtime.protocol.rest import status_of
from edgekit_runtime.service.http.lease import IDLE, RESPONDING, UNDER_WAY, Lease
from edgekit_runtime.service.http.listeners import find_client, find_peer, is_own_user
from edgekit_runtime.service.http.request_head import HeadCache, RequestHead
from edgekit_runtime.service.http.request_parser import Request, RequestParser
from edgekit_runtime.service.http.response import CONTINUE, make_error
from edgekit_runtime.service.http.send_buffer import MAX_PARTS, Buffer, SendBuffer
from edgekit_runtime.service.options.http import HttpLimits

TICK_S: Final = 0.5  # the unit of deadlines
LINGER_S: Final = 2.0
NEVER: Final = 1 << 62
_READ_BYTES: Final = 64 << 10
_MAX_AHEAD_BYTES: Final = 256 << 10  # of requests that wait for the present one
_MAX_AT_ONCE: Final = 16  # requests of one connection in one turn of the loop, which others wait for
_MAX_DESCRIPTORS: Final = 4  # that may arrive with one body

_logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[["Connection", RequestHead, memoryview], None]
Screen: TypeAlias = Callable[["Connection", RequestHead], bool]


class ConnectionOwner(Protocol):
    """The part of a server that its connections use, see `HttpServer`."""

    loop: AbstractEventLoop
    limits: HttpLimits
    heads: tuple[HeadCache, HeadCache]
    handle_request: Handler
    screen: Screen
    clearance: int
    tick: int
    date_line: bytes
    idle_ticks: int
    receiving_bytes: int
    sending_bytes: int
    error_counts: Counter[int]
    is_draining: bool
    on_response_sent: "Callable[[Connection], None] | None"

    def connection_made(self, connection: "Connection") -> None:
        """Add a new connection."""

    def connection_lost(self, connection: "Connection") -> None:
        """Remove a connection that was closed or released."""


def ticks(seconds: float) -> int:
    """Return the number of timer ticks that take at least `seconds`. A tick takes 0.5 s."""
    return int(seconds / TICK_S) + 2


class Connection:
    """A connection with an HTTP client. It ends when it is closed or released.

    Attributes:
        is_open: Whether the connection is neither closed nor released.
        is_local: Whether the client uses the Unix socket, whose file permissions control access.
        address: The address of a TLS client, which the socket does not provide. Empty for other clients.
        descriptors: The file descriptors received with the body of the current request. A handler that keeps
            one must remove it from the list.
        on_close: A function that is called once when the connection is closed or released, or None.
        on_admit: A function that is called when the first request has passed the access check, or None.
        deadline_tick: The server tick at which `on_timeout` is called.
        is_busy: Whether the handler has a request whose response has not been sent.
        closes: Whether the connection ends after the current response.
        is_lingering: Whether the last response was sent, so that received data is discarded.
        deadline_s: Always None. Only gRPC requests have deadlines, see `MessageResponder`.
    """

    deadline_s: float | None = None

    __slots__ = (
        "_body_bytes",
        "_expected",
        "_has_ended",
        "_head",
        "_is_advancing",
        "_is_paused",
        "_is_yielding",
        "_lease",
        "_moved_bytes",
        "_owner",
        "_parser",
        "_send_buffer",
        "_socket",
        "address",
        "closes",
        "deadline_tick",
        "descriptors",
        "is_busy",
        "is_lingering",
        "is_local",
        "is_open",
        "on_admit",
        "on_close",
    )

    def __init__(
        self,
        owner: ConnectionOwner,
        connected: socket.socket,
        *,
        is_local: bool,
        lease: Lease | None = None,
        on_close: Callable[[], None] | None = None,
        on_admit: Callable[[], None] | None = None,
        address: str = "",
    ) -> None:
        """Serve a client.

        Args:
            owner: The server.
            connected: A stream socket, which the connection owns from now on.
            is_local: Whether the client uses the Unix socket.
            lease: Where to record the state of the connection, or None.
            on_close: A function that is called once when the connection is closed or released, or None.
            on_admit: A function that is called once when the first request has passed the screen, within
                `read_timeout_s`. None if a request has already passed.
            address: The client's address if the socket does not know it.
        """
        connected.setblocking(False)
        self._owner = owner
        self._socket = connected
        self.is_open = True
        self.is_local = is_local
        self.address = address
        self.descriptors: list[int] = []
        self.on_close = on_close
        self.on_admit = on_admit
        self._lease = lease
        self._parser = RequestParser(owner.heads[is_local], owner.limits)
        self._expected: RequestHead | None = None  # of the next request, if none of its bytes has arrived
        self._head: RequestHead | None = None  # of the request that is handled
        self._body_bytes = 0  # that `receiving_bytes` counts
        self._moved_bytes = 0  # of a body or a response, at the last check of its progress
        self._send_buffer: SendBuffer | None = None
        self.is_busy = self.closes = self.is_lingering = False
        self._has_ended = False  # the client sends nothing more
        self._is_advancing = self._is_paused = False
        self._is_yielding = False  # other connections have their turn
        owner.connection_made(self)
        limits = owner.limits
        self._set_deadline(limits.idle_timeout_s if on_admit is None else limits.read_timeout_s)
        owner.loop.add_reader(connected.fileno(), self._on_readable)

    def resume(self, unread: bytes) -> None:
        """Continue a connection that another process handed over.

        Args:
            unread: Bytes that were received but not answered.
        """
        if self._lease is not None:
            self._lease.states[self._lease.index] = UNDER_WAY if unread else IDLE
        self._data_received(unread)

    # Receiving

    def _on_readable(self) -> None:
        lease, expected = self._lease, self._expected
        if lease is not None and self._send_buffer is None:
            lease.states[lease.index] = UNDER_WAY
        if expected is None and (buffer := self._parser.get_buffer()) is not None:
            self._receive_body(buffer)
            return
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            if lease is not None and self.is_between_requests and not self._parser.unread:
                lease.states[lease.index] = IDLE
            return
        except OSError:
            self.close()
            return
        if (
            expected is not None
            # Clients repeat their requests: one with the head of the last needs neither parser nor screen.
            and len(data) == expected.request_bytes
            and expected.clearance == self._owner.clearance
            and data.startswith(expected.data)
        ):
            self._expected = None
            self._handle_request(expected, memoryview(data)[expected.size_bytes :])
        elif data:
            self._data_received(data)
        else:
            self._eof_received()

    def _data_received(self, data: bytes) -> None:
        if self.is_lingering:
            return
        self._expected = None
        self._parser.receive_data(data)
        if not (self.is_busy or self._is_yielding):
            self._advance()
        elif len(self._parser.unread) > _MAX_AHEAD_BYTES:
            self._is_paused = True
            self._owner.loop.remove_reader(self._socket.fileno())

    def _eof_received(self) -> None:
        """The client sends nothing more, but may still read."""
        self._has_ended = True
        if self.is_busy or self._is_yielding:
            self._owner.loop.remove_reader(self._socket.fileno())
        else:
            self.close()

    def _receive_body(self, buffer: memoryview) -> None:
        try:
            if self._head is not None and self._head.passes_descriptor:
                count = _receive_with_descriptors(self._socket, buffer, self.descriptors)
            else:
                count = self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except UnavailableError as error:
            self.refuse(error)
            return
        except OSError:
            count = 0
        if not count:
            self.close()  # in the middle of a body: the client waits for no response
            return
        self._parser.buffer_updated(count)
        self._advance()

    def _resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._owner.loop.add_reader(self._socket.fileno(), self._on_readable)

    def _advance(self) -> None:
        """Handle requests that have arrived, until one is under way or more bytes are needed."""
        if self._is_advancing:
            return
        self._is_advancing = True
        turns = _MAX_AT_ONCE
        try:
            while not (self.is_busy or self.closes) and self._next_request():
                if self.is_busy or not self._parser.unread:
                    break
                turns -= 1
                if not turns:
                    self._is_yielding = True
                    self._owner.loop.call_soon(self._end_turn)
                    break
        except EdgekitError as error:
            self.refuse(error)
        except MemoryError:
            self.refuse(RequestError(503, "not enough memory for the body; try again", retry_after_s=1))
        except Exception:
            _logger.exception("a connection failed inside the service")
            self.close()  # where its next request begins is not known
        finally:
            self._is_advancing = False
        if self._has_ended and not (self.is_busy or self._is_yielding):
            self.close()  # the rest of its requests will not arrive

    def _end_turn(self) -> None:
        self._is_yielding = False
        if self.is_open:
            self._resume_reading()
            self._advance()

    def _next_request(self) -> bool:
        """Pass the next request to the handler; return False if it has not arrived completely.

        Raises:
            EdgekitError: it is refused.
            MemoryError: there is no memory for its body.
        """
        parser, owner = self._parser, self._owner
        was_in_head = parser.is_in_head
        event = parser.next_event()
        if isinstance(event, RequestHead):
            if event.clearance != owner.clearance and owner.screen(self, event):
                return False  # released
            if self.on_admit is not None:
                self._admit()
            self._head = event
            event = parser.next_event()
            if event is None:
                self._begin_body()
        if isinstance(event, Request):
            if self._body_bytes:
                self._count_body(0)
            self._handle_request(event.head, event.body)
            return True
        if parser.body_bytes is not None:
            self._count_body(parser.body_bytes)
            if owner.receiving_bytes > owner.limits.max_receiving_bytes:
                raise RequestError(503, "too many large bodies at one time; try again", retry_after_s=1)
        elif parser.is_in_head and not was_in_head and self.on_admit is None:
            self._set_deadline(owner.limits.read_timeout_s)  # else the time runs since the client connected
        return False

    def _begin_body(self) -> None:
        """Ask for the body of an accepted head and watch its progress; it has not arrived completely."""
        if self._head is not None and self._head.expects_continue:
            with contextlib.suppress(OSError):  # 25 bytes fit, or reading will show that the client is gone
                self._socket.send(CONTINUE)
        self._watch_progress(self._parser.body_bytes or 0)

    def _count_body(self, received_bytes: int) -> None:
        self._owner.receiving_bytes += received_bytes - self._body_bytes
        self._body_bytes = received_bytes

    def _discard_received(self) -> None:
        self._count_body(0)
        self._parser.clear()
        self._expected = None

    def _admit(self) -> None:
        on_admit, self.on_admit = self.on_admit, None
        if on_admit is not None:
            on_admit()

    def _handle_request(self, head: RequestHead, body: memoryview) -> None:
        self._head = head
        self.is_busy = True
        self.deadline_tick = NEVER
        try:
            (head.route or self._owner.handle_request)(self, head, body)
        except Exception as error:
            self.respond_error(error)

    # Responding

    def refuse(self, error: EdgekitError) -> None:
        """Discard the received data, respond with `error` and close the connection."""
        self._discard_received()
        self._head = None
        self.is_busy = self.closes = True
        self.respond_error(error)

    def respond_error(self, error: BaseException, fields: Mapping[str, str] | None = None) -> None:
        """Respond with `error` and count it. Errors other than EdgekitError are logged and become 500."""
        if not isinstance(error, EdgekitError):
            path = "an unknown path" if self._head is None else self._head.path
            _logger.error("a request to %s failed inside the service", path, exc_info=error)
            error = RequestError(500, "the service failed; its log says why")
        if self.is_busy and self.is_open:
            self._owner.error_counts[status_of(error)] += 1
        self.respond(*make_error(error, fields))

    def respond(self, *parts: Buffer) -> None:
        """Send the response to the current request. Has no effect if the connection has ended.

        Args:
            parts: The head, as returned by `make_head`, and the body. Arrays must be C-contiguous, and must
                not change until they are sent.
        """
        if not (self.is_busy and self.is_open):
            return
        head = self._head
        parts = (bytes(parts[0]).replace(b"\r\n", self._owner.date_line, 1), *parts[1:])
        is_usual = head is not None and head.is_plain and not self.closes
        if not is_usual or self._has_ended or self._owner.is_draining:
            parts = self._fit(head, *parts)
        size_bytes = 0
        for part in parts:
            size_bytes += len(part) if type(part) is bytes else part.nbytes  # type: ignore[union-attr]
        if self._lease is not None:
            self._lease.states[self._lease.index] = RESPONDING
        try:
            sent = self._socket.sendmsg(parts) if len(parts) <= MAX_PARTS else 0  # type: ignore[arg-type]
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent == size_bytes:
            self._response_sent()
        else:
            self._queue(SendBuffer(parts, sent))

    def _fit(self, request: RequestHead | None, head: Buffer, *body: Buffer) -> tuple[Buffer, ...]:
        """Return the response in the client's version of HTTP, and decide whether it ends the connection."""
        is_last = request is None or not request.keeps_alive or self._owner.is_draining
        if is_last or (self._has_ended and not self._parser.unread):
            self.closes = True
        if self.closes or (request is not None and request.is_http_1_0):
            stated = b"\r\nConnection: close\r\n" if self.closes else b"\r\nConnection: keep-alive\r\n"
            head = bytes(head).replace(b"\r\n", stated, 1)
        return (head,) if request is not None and request.method == "HEAD" else (head, *body)

    def _queue(self, buffer: SendBuffer) -> None:
        owner, left_bytes = self._owner, buffer.left_bytes
        if owner.sending_bytes and owner.sending_bytes + left_bytes > owner.limits.max_sending_bytes:
            self.close()  # clients that do not read their responses fill the memory
        else:
            self._send_buffer = buffer
            owner.sending_bytes += left_bytes
            self._watch_progress(left_bytes)
            owner.loop.add_writer(self._socket.fileno(), self._on_writable, buffer)

    def _on_writable(self, buffer: SendBuffer) -> None:
        try:
            self._owner.sending_bytes -= buffer.send(self._socket)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not buffer.left_bytes:
            self._send_buffer = None
            self._owner.loop.remove_writer(self._socket.fileno())
            self._response_sent()

    def _response_sent(self) -> None:
        head, self._head = self._head, None
        parser, owner = self._parser, self._owner
        self.is_busy = False
        if self.descriptors:
            self._close_descriptors()
        if self.closes:
            self._linger()
            return
        if self._has_ended and not parser.unread:
            self.close()
            return
        self.deadline_tick = owner.tick + owner.idle_ticks
        if self._lease is not None:
            self._lease.states[self._lease.index] = UNDER_WAY if parser.unread else IDLE
        if owner.on_response_sent is not None:
            owner.on_response_sent(self)
            return
        if self._is_paused:
            self._resume_reading()
        if not parser.unread:
            self._expected = head
        elif not self._is_yielding:
            self._advance()

    # Deadlines

    def _set_deadline(self, after_s: float) -> None:
        self.deadline_tick = self._owner.tick + ticks(after_s)

    def _watch_progress(self, moved_bytes: int) -> None:
        """Check later how many bytes of a body or response have moved since `moved_bytes`."""
        self._moved_bytes = moved_bytes
        self._set_deadline(self._owner.limits.read_timeout_s)

    def on_timeout(self) -> None:
        """Close the connection. If a request is incomplete, respond with the reason first.

        If a body or a response makes progress, the connection gets a new deadline and stays open.
        """
        parser, buffer = self._parser, self._send_buffer
        moved_bytes = parser.body_bytes if buffer is None else buffer.left_bytes
        if moved_bytes is not None and abs(moved_bytes - self._moved_bytes) >= self._owner.limits.step_bytes:
            self._watch_progress(moved_bytes)
        elif not (self.is_busy or self.is_lingering) and (parser.unread or parser.body_bytes is not None):
            self.refuse(RequestError(408, "the request did not arrive in time"))
        else:
            self.close()

    # Ending

    def _linger(self) -> None:
        """Close so that the client can still read the last response: unread data would reset it."""
        if self._has_ended or self.is_lingering:
            self.close()
            return
        self.is_lingering = True
        self._discard_received()
        self._set_deadline(LINGER_S)
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        self._resume_reading()

    @property
    def has_left(self) -> bool:
        """Whether the client is known to have disconnected.

        Over TCP, this is also True for a client that has only closed its sending side, since the system
        cannot tell the difference.
        """
        if not (self.is_open and self._has_ended):
            return not self.is_open
        if self._socket.family != socket.AF_UNIX:
            return True
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))  # POLLHUP, or an error

    @property
    def peer_pid(self) -> int:
        """The process id of the client on a Unix socket, or 0 if unknown."""
        return find_peer(self._socket) if self.is_open and self._socket.family == socket.AF_UNIX else 0

    @property
    def is_own_user(self) -> bool:
        """Whether the client uses the Unix socket and runs as the service's user or as root.

        It is False for TLS clients, for which the socket belongs to the service's own TLS code.
        """
        is_unix = self._socket.family == socket.AF_UNIX
        return self.is_open and self.is_local and is_unix and is_own_user(self._socket)

    @property
    def client(self) -> str:
        """The client's address, or its process id on a Unix socket. Empty if unknown."""
        return self.address or (find_client(self._socket) if self.is_open else "")

    @property
    def is_between_requests(self) -> bool:
        """Whether no request is being handled and no body is being received."""
        return self.is_open and not self.closes and not self.is_busy and self._parser.body_bytes is None

    def close_when_idle(self) -> None:
        """Close the connection, unless a request is being handled or partly received.

        If a request is being handled, a draining server closes the connection after the response.
        """
        if not self.is_busy and self._parser.body_bytes is None and not self._parser.unread:
            self.close()

    def close(self) -> None:
        """Close the connection immediately. Further calls have no effect."""
        if self.is_open:
            self._detach()
            self._socket.close()

    def release(self) -> tuple[socket.socket, bytes]:
        """Detach the socket, and return it with the bytes that were received but not answered.

        May be called by `HttpServer.screen` or between requests. The caller must close the socket.

        Raises:
            RequestError: The connection is already closed.
        """
        if not self.is_open:
            raise RequestError(500, "the connection is closed already")
        self._admit()
        unread = self._parser.unread
        self._detach()
        return self._socket, unread

    def _detach(self) -> None:
        owner, self.is_open, self._lease = self._owner, False, None
        owner.loop.remove_reader(self._socket.fileno())
        self._discard_received()
        if self._send_buffer is not None:
            owner.loop.remove_writer(self._socket.fileno())
            owner.sending_bytes -= self._send_buffer.left_bytes
            self._send_buffer = None
        self._close_descriptors()
        owner.connection_lost(self)
        if self.on_close is not None:
            self.on_close()

    def _close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def _receive_with_descriptors(connected: socket.socket, buffer: memoryview, descriptors: list[int]) -> int:
    """Receive into `buffer`, and add the descriptors that arrive to `descriptors`; return the bytes.

    Raises:
        OSError: nothing has arrived, or the connection failed.
        UnavailableError: this process has no free descriptor for one that arrived.
    """
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array("i").itemsize)
    count, extras, flags, _ = connected.recvmsg_into([buffer], room, socket.MSG_CMSG_CLOEXEC)
    before = len(descriptors)
    for level, kind, data in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            descriptors.extend(received)
    if flags & socket.MSG_CTRUNC and len(descriptors) - before < _MAX_DESCRIPTORS:
        raise UnavailableError("no descriptor is free here for what came with the body; try again", 1.0)
    for descriptor in descriptors[_MAX_DESCRIPTORS:]:  # each byte may bring more
        os.close(descriptor)
    del descriptors[_MAX_DESCRIPTORS:]
    return count
