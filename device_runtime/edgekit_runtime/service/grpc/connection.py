"""The connection of a gRPC client: its socket, its RPCs and its timeouts.

The event loop calls the connection when the socket is ready. `Http2` parses the bytes into events, and `Rpc`
assembles the events into messages. The HTTP server counts, times and drains gRPC connections together with
HTTP connections.
"""

import logging
import socket
from collections.abc import Callable
from typing import Final

from edgekit_runtime.errors import EdgekitError, UnavailableError
from edgekit_runtime.service.grpc.http2 import (
    Buffer,
    DataReceived,
    ErrorCode,
    Event,
    HeadersReceived,
    Http2,
    Http2Error,
)
from edgekit_runtime.service.grpc.rpcs import Rpc, RpcHead
from edgekit_runtime.service.grpc.service import GrpcService
from edgekit_runtime.service.http.access import check_access
from edgekit_runtime.service.http.connection import LINGER_S, ticks
from edgekit_runtime.service.http.listeners import find_client, find_peer
from edgekit_runtime.service.http.send_buffer import MAX_PARTS, SendBuffer

_READ_BYTES: Final = 256 << 10  # what a Unix socket holds
_SEND_BYTES: Final = 256 << 10  # of all streams in turn, before the socket is asked again
_JOINED_BYTES: Final = 32 << 10
_MAX_AT_ONCE: Final = 64  # events of one connection in one turn of the loop, which others wait for

_logger = logging.getLogger(__name__)


class GrpcConnection:
    """A client's connection, from accept to close.

    Attributes:
        is_local, client, peer_pid, deadline_tick: As in `Connection`.
        on_admit: Called once when the first RPC has passed the access check, then set to None.
        ahead: The paused RPCs. They wait for the client to read responses, or for other connections.
    """

    def __init__(
        self,
        service: GrpcService,
        connected: socket.socket,
        *,
        is_local: bool,
        on_admit: Callable[[], None] | None,
        address: str = "",
    ) -> None:
        connected.setblocking(False)
        server = service.server
        self.server, self.bodies = server, service.bodies
        self._service, self._socket = service, connected
        self.is_local, self.on_admit = is_local, on_admit
        self.is_open = True
        self.client = address or find_client(connected)
        self.peer_pid = find_peer(connected) if connected.family == socket.AF_UNIX else 0
        self.http2 = Http2(
            RpcHead, max_streams=service.max_streams, max_header_bytes=server.limits.max_head_bytes
        )
        self.rpcs: set[Rpc] = set()
        self.ahead: set[Rpc] = set()
        self._send_buffer: SendBuffer | None = None
        self._sending_bytes = 0  # that the server counts
        self._is_lingering = self._is_advancing = self._is_yielding = self._was_active = False
        self._idle_checks = 0
        self._drained_bytes = 0  # that the socket took later
        self._moved_bytes = 0  # at the last check
        self._debt: tuple[str, int] | None = None  # at the last check
        self._set_deadline(server.limits.read_timeout_s)
        server.connection_made(self)
        server.loop.add_reader(connected.fileno(), self._on_readable)

    # Receiving

    def _on_readable(self) -> None:
        if self._is_yielding:
            return
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._was_active = True
        if not self._is_lingering:
            self.http2.receive_data(data)
            self._advance()

    def _advance(self) -> None:
        """Handle a part of the received bytes; the rest follows after other connections had their turn."""
        self._is_yielding = False
        self._is_advancing = True  # what is to be sent goes out together, at the end
        try:
            for _ in range(_MAX_AT_ONCE):
                if not self.is_open or self._is_lingering or (event := self.http2.next_event()) is None:
                    break
                self._handle(event)
            else:
                self._is_yielding = True
                self.server.loop.call_soon(self._advance)
        except Http2Error as error:
            self._refuse(error)
        except Exception:
            _logger.exception("a gRPC connection failed inside the service")
            self._refuse(Http2Error(ErrorCode.INTERNAL_ERROR, "the service failed; its log says why"))
        finally:
            self._is_advancing = False
        self.flush()

    def _handle(self, event: Event) -> None:
        rpc: Rpc | None = event.stream.context
        if isinstance(event, HeadersReceived):
            self._begin(event)
        elif rpc is not None:
            if isinstance(event, DataReceived):
                rpc.receive_data(event.data, ends_stream=event.ends_stream)
            else:
                rpc.cancel()

    def _begin(self, event: HeadersReceived) -> None:
        head: RpcHead = event.head
        stream, service = event.stream, self._service
        rpc = stream.context = Rpc(self, stream, head)
        self.rpcs.add(rpc)
        try:
            if not (head.is_cleared or self.is_local):
                check_access(head, service.token)
                head.is_cleared = True
                on_admit, self.on_admit = self.on_admit, None
                if on_admit is not None:
                    on_admit()
            if not head.is_grpc:
                rpc.refuse_content()
                return
            rpc.method = service.find_method(head.path)
            if not stream.is_remote_open:
                rpc.receive_data(memoryview(b""), ends_stream=True)
        except EdgekitError as error:
            rpc.fail(error)

    def _resume(self, rpc: Rpc) -> None:
        rpc.is_held = False
        rpc.resume()
        self.flush()

    # Sending

    def flush(self) -> None:
        """Send as much as flow control allows. After GOAWAY and the last response, close the connection."""
        if self._is_advancing or not self.is_open:
            return
        while self._send_buffer is None and (parts := self.http2.data_to_send(_SEND_BYTES)):
            self._send(parts)
            if not self.is_open:
                return
        self._count_sending()
        if self.ahead:
            for rpc in [candidate for candidate in self.ahead if not candidate.is_full]:
                self.ahead.discard(rpc)
                self.server.loop.call_soon(self._resume, rpc)
        if self.http2.is_closing and not self.http2.streams and self._send_buffer is None:
            self._linger()

    def _send(self, parts: list[Buffer]) -> None:
        size = sum(map(len, parts))
        if size <= _JOINED_BYTES or len(parts) > MAX_PARTS:
            parts = [b"".join(parts)]
        try:
            sent = self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent < size:
            self._send_buffer = SendBuffer(parts, sent)
            self.server.loop.add_writer(self._socket.fileno(), self._on_writable, self._send_buffer)

    def _on_writable(self, buffer: SendBuffer) -> None:
        try:
            self._drained_bytes += buffer.send(self._socket)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not buffer.left_bytes:
            self._send_buffer = None
            self.server.loop.remove_writer(self._socket.fileno())
            self.flush()

    def _count_sending(self) -> None:
        """Count what the client has not read; close if all clients together leave too much unread."""
        unsent_bytes = 0 if self._send_buffer is None else self._send_buffer.left_bytes
        server, before, now = self.server, self._sending_bytes, self.http2.queued_bytes + unsent_bytes
        others_bytes = server.sending_bytes - before
        server.sending_bytes += now - before
        self._sending_bytes = now
        if now > before and others_bytes and server.sending_bytes > server.limits.max_sending_bytes:
            self.close()

    # Deadlines

    def _set_deadline(self, after_s: float) -> None:
        self.deadline_tick = self.server.tick + ticks(after_s)

    def on_timeout(self) -> None:
        """Close the connection if it is idle, or if the client sends or reads too slowly."""
        limits, http2 = self.server.limits, self.http2
        if self._is_lingering or self.on_admit is not None:
            self.close()
            return
        self._set_deadline(limits.read_timeout_s)
        moved_bytes = http2.received_bytes + http2.sent_bytes + self._drained_bytes
        has_moved = moved_bytes - self._moved_bytes >= limits.step_bytes
        debt, previous = self._find_debt(), self._debt
        self._moved_bytes, self._debt = moved_bytes, debt
        if debt is not None and debt == previous and not has_moved:
            self._refuse(Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too slow: what has begun does not go on"))
        elif self._was_active or any(rpc.is_busy for rpc in self.rpcs):
            self._was_active, self._idle_checks = False, 0
        else:
            self._end_idle()
        self.flush()

    def _find_debt(self) -> tuple[str, int] | None:
        """Return what the connection waits for from the client, or None."""
        if self._sending_bytes:
            return "responses", 0
        partial = [rpc.stream.stream_id for rpc in self.rpcs if rpc.is_in_message]
        if partial:
            return "message", min(partial)
        return ("frame", self.http2.frames) if self.http2.is_in_frame else None

    def _end_idle(self) -> None:
        """Ping an idle client with open RPCs; close the connection of any other idle client."""
        limits = self.server.limits
        self._idle_checks += 1
        idle_s = self._idle_checks * limits.read_timeout_s
        if idle_s < limits.idle_timeout_s:
            return
        if self.rpcs and idle_s < limits.idle_timeout_s + limits.read_timeout_s:
            self.http2.ping()
        else:
            self.close_when_idle()
            self.close()

    # Ending

    def _refuse(self, error: Http2Error) -> None:
        """Send the reason for the end of the connection; discard what the client still sends."""
        self.server.error_counts[400] += 1
        for rpc in list(self.rpcs):
            rpc.cancel()
        self.http2.close(error.code, str(error))
        self._is_lingering = True
        self._set_deadline(LINGER_S)

    def _linger(self) -> None:
        """Close so that the client can still read what was sent: unread data would reset it."""
        self._is_lingering = True
        self._set_deadline(LINGER_S)
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def close_when_idle(self) -> None:
        """Accept no further RPCs (GOAWAY), end idle streams, and close when no RPC is in progress."""
        if self.is_open and not self.http2.is_closing:
            self.http2.close(ErrorCode.NO_ERROR)
            for rpc in [stream for stream in self.rpcs if stream.is_idle_stream]:
                rpc.fail(UnavailableError("the service ends this connection; connect again", 0.0))
            self.flush()

    def close(self) -> None:
        """Close the connection immediately. Further calls have no effect."""
        if not self.is_open:
            return
        self.is_open = False
        loop, descriptor = self.server.loop, self._socket.fileno()
        loop.remove_reader(descriptor)
        loop.remove_writer(descriptor)
        for rpc in list(self.rpcs):
            rpc.cancel()
        self._send_buffer = None
        self.server.sending_bytes -= self._sending_bytes
        self._sending_bytes = 0
        self._socket.close()
        self.server.connection_lost(self)
