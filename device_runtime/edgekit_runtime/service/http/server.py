"""The HTTP server, which accepts, limits and closes connections (docs/adr/0013-service.md).

It passes the requests to a handler.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.http.connection import TICK_S, Connection, Handler, Screen, ticks
from edgekit_runtime.service.http.request_head import HeadCache
from edgekit_runtime.service.http.response import make_date_line, make_error
from edgekit_runtime.service.options.http import HttpLimits

_ACCEPTS_AT_ONCE: Final = 64
_ACCEPT_PAUSE_S: Final = 1.0  # as asyncio has it
_FULL: Final = RequestError(503, "too many connections; try again", retry_after_s=1)
_RESERVED_DESCRIPTORS: Final = 64  # for models, libraries and shared memory

_logger = logging.getLogger(__name__)


class ServedConnection(Protocol):
    """The interface between the server and a connection of any protocol."""

    is_local: bool
    deadline_tick: int

    def on_timeout(self) -> None:
        """Close the connection, or set another deadline."""

    def close_when_idle(self) -> None:
        """Close the connection when no request is in progress."""

    def close(self) -> None:
        """Close the connection immediately."""


Connect: TypeAlias = Callable[..., ServedConnection]
"""Creates a client's connection from a socket and the keywords of `Connection`."""


class HttpServer:
    """Accepts connections and passes their requests to `handle_request`.

    One timer checks all connections, and deadlines are counted in its ticks. While the event loop is
    blocked, the timer does not tick, so a blocked loop causes no timeouts.

    Attributes:
        handle_request: A function `(connection, head, body)` that handles a request. It must call
            `connection.respond` once, possibly later, or raise an error to respond with.
        screen: A function `(connection, head)` that is called before the body is read. It raises an error to
            refuse the request. It returns True if it has released the connection. If later requests with
            this head need no screening, it sets `head.clearance` to the server's `clearance`.
        clearance: A number that is increased when all heads must be screened again.
        heads: One head cache for TCP and one for the Unix socket.
        tick: The tick count of the timer, which runs while there are connections.
        date_line: The `Date` header, updated at each tick.
        idle_ticks: The number of ticks for which a connection may be idle.
        receiving_bytes: The number of received bytes of incomplete bodies.
        sending_bytes: The size of responses that clients have not read yet.
        error_counts: A dict from HTTP status to the number of error responses.
        is_draining: Whether connections are closed after their next response.
        on_response_sent: A function that is called after each response, or None. After the call, the
            connection does not read the next request.
        lent: The number of connections that are lent to workers.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handle_request: Handler, screen: Screen, limits: HttpLimits
    ) -> None:
        self.loop = loop
        self.handle_request = handle_request
        self.screen = screen
        self.limits = limits
        self.heads = (HeadCache(), HeadCache())
        self.clearance = 1
        self.tick = 0
        self.date_line = b""
        self.receiving_bytes = self.sending_bytes = 0
        self.error_counts: Counter[int] = Counter()
        self.is_draining = False
        self.on_response_sent: Callable[[Connection], None] | None = None
        self.lent = 0
        self._kinds: set[bool] = set()  # is_local of all listeners
        self._counts = {True: 0, False: 0}  # is_local -> connections, including those that are lent
        self.idle_ticks = ticks(limits.idle_timeout_s)
        self._connections: set[ServedConnection] = set()
        self._listeners: dict[socket.socket, Callable[[socket.socket], None]] = {}
        self._max_connections = min(limits.max_connections, _raise_descriptor_limit() - _RESERVED_DESCRIPTORS)
        self._drained: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def is_full(self, *, is_local: bool) -> bool:
        """Return whether the connection limit is reached for the Unix socket (`is_local`) or for TCP.

        If the server listens on both, a quarter of all connections is reserved for each of them.
        """
        reserved = self._max_connections // 4 if len(self._kinds) > 1 else 0
        is_over = self._counts[is_local] >= self._max_connections - reserved
        return is_over or sum(self._counts.values()) >= self._max_connections

    def listen(self, listener: socket.socket, on_accept: Callable[[socket.socket], None]) -> None:
        """Start to accept clients.

        Args:
            listener: The listening socket, which the server owns from now on.
            on_accept: A function that takes the socket of each client, see `serve`.
        """
        listener.setblocking(False)
        self._listeners[listener] = on_accept
        self._kinds.add(listener.family == socket.AF_UNIX)
        self.loop.add_reader(listener.fileno(), self._accept, listener)

    def connection_made(self, connection: ServedConnection) -> None:
        self._connections.add(connection)
        self._counts[connection.is_local] += 1
        if self._timer is None:
            self.date_line = make_date_line()
            self._timer = self.loop.call_later(TICK_S, self._look_at_deadlines)

    def connection_lost(self, connection: ServedConnection) -> None:
        """Remove a connection that was closed or released."""
        self._connections.discard(connection)
        self._counts[connection.is_local] -= 1
        self._check_drained()

    def _look_at_deadlines(self) -> None:
        self.tick = tick = self.tick + 1
        self.date_line = make_date_line()
        for connection in [
            connection_due for connection_due in self._connections if connection_due.deadline_tick <= tick
        ]:
            connection.on_timeout()
        is_needed = len(self._connections) > 0
        self._timer = self.loop.call_later(TICK_S, self._look_at_deadlines) if is_needed else None

    def lend(self, *, is_local: bool) -> None:
        """Count a connection that was lent to a worker, until `take_back` is called."""
        self.lent += 1
        self._counts[is_local] += 1

    def take_back(self, *, is_local: bool) -> None:
        """Stop counting a connection that a worker has returned or closed."""
        self.lent -= 1
        self._counts[is_local] -= 1
        self._check_drained()

    def _check_drained(self) -> None:
        is_empty = not self._connections and not self.lent
        if self._drained is not None and is_empty and not self._drained.done():
            self._drained.set_result(None)

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting clients, finish the requests in progress, then close. Takes at most `timeout_s`."""
        self.is_draining = True
        self._stop_listening()
        for connection in list(self._connections):
            connection.close_when_idle()
        if self._connections or self.lent:
            self._drained = self.loop.create_future()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drained, timeout_s)
        self.close()

    def close(self) -> None:
        self._stop_listening()
        for connection in list(self._connections):
            connection.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            self.loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connected, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as cause:  # no descriptor is free; the client waits in the queue of the system
                _logger.warning("cannot accept connections: %s", cause)
                self.loop.remove_reader(listener.fileno())
                self.loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listener)
                return
            self._listeners[listener](connected)

    def serve(self, connect: Connect, connected: socket.socket) -> None:
        """Serve a client with a connection from `connect`, or refuse it if there are too many connections."""
        is_local = connected.family == socket.AF_UNIX
        if self.is_full(is_local=is_local):
            self.error_counts[_FULL.status] += 1
            _refuse(connected)
            return
        if not is_local:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connect(connected, is_local=is_local, on_admit=None if is_local else lambda: None)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self.loop.add_reader(listener.fileno(), self._accept, listener)


def _refuse(connected: socket.socket) -> None:
    head, body = make_error(_FULL)
    with contextlib.suppress(OSError):
        connected.setblocking(False)
        connected.send(head.replace(b"\r\n", make_date_line() + b"Connection: close\r\n", 1) + body)
        connected.shutdown(socket.SHUT_WR)
    connected.close()


def _raise_descriptor_limit() -> int:
    """Raise the limit of descriptors of this process as far as it may itself; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
