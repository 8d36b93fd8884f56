"""One connection of a client: bytes in, requests out to the handler, answers back in order.

It is driven by the event loop's readiness callbacks and calls the socket itself. One request is under way at
a time; what a client sends ahead waits. It knows nothing of what requests mean.
"""

import logging
import os
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.protocol.rest import status_of
from edgekit_runtime.service.http.lease import ANSWERING, IDLE, UNDER_WAY, Lease
from edgekit_runtime.service.http.listeners import find_peer
from edgekit_runtime.service.http.request_head import Head
from edgekit_runtime.service.http.request_parser import Receiver
from edgekit_runtime.service.http.response import make_error
from edgekit_runtime.service.http.send_buffer import MAX_PARTS, Buffer, Outgoing
from edgekit_runtime.service.http.timer_wheel import NEVER

if TYPE_CHECKING:
    from edgekit_runtime.service.http.server import HttpServer

_LINGER_S: Final = 2.0

_logger = logging.getLogger(__name__)


class Connection:
    """A client's connection, from when it is accepted or adopted until it is closed or released.

    Attributes:
        is_local: whether it came over the Unix socket, whose permissions say who may.
        descriptors: that came with the body under way; whoever takes one removes it from the list.
        on_close: called once when the connection ends here, or None.
        on_admit: called once the first request has passed the screen; None from then on, or from the start.
        is_busy: a request is under way: it was handed to the handler, and its answer is not sent.
        closes: no further request is taken.
        is_lingering: the last answer is sent; what the client still sends is thrown away.
        expires, looked_at: see `Timed`.
    """

    __slots__ = (
        *("_head", "_lease", "_moved", "_outgoing", "_receiver", "_server", "_socket", "closes"),
        *(
            "descriptors",
            "expires",
            "is_busy",
            "is_lingering",
            "is_local",
            "looked_at",
            "on_admit",
            "on_close",
        ),
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
        on_admit: Callable[[], None] | None = None,
    ) -> None:
        """Take over `connected`, which must not block; see `HttpServer.adopt`."""
        self._server = server
        self._socket: socket.socket | None = connected
        self.is_local = is_local
        self.descriptors: list[int] = []
        self.on_close = on_close
        self.on_admit = on_admit
        self.expires = self.looked_at = NEVER
        self._lease = lease
        self._head: Head | None = None  # of the request under way
        self._moved = 0  # of a body or an answer, when last looked at
        self._outgoing: Outgoing | None = None
        self.is_busy = self.closes = self.is_lingering = False
        server.remember(self)
        limits = server.limits
        server.wheel.expire(self, limits.idle_timeout_s if on_admit is None else limits.read_timeout_s)
        self._receiver = Receiver(self, server, connected, unread, lease)
        if unread:
            self._receiver.advance(self)

    def resume(self, unread: bytes) -> None:
        """Go on with what was received before, of a connection that was adopted without it."""
        if self._lease is not None:
            self._lease.states[self._lease.index] = UNDER_WAY if unread else IDLE
        self._receiver.unread = unread
        self._receiver.advance(self)

    def admit(self) -> None:
        """Count as a client that may ask: a request has passed the screen."""
        on_admit, self.on_admit = self.on_admit, None
        if on_admit is not None:
            on_admit()

    def screen_anew(self) -> None:
        """Have requests screened again that have the head of the one before."""
        for head in (self._head, self._receiver.expected):
            if head is not None:
                head.is_cleared = False

    def begin(self, head: Head, body: memoryview) -> None:
        """Have a request handled that has come whole."""
        self._head = head
        self.is_busy = True
        self.expires = NEVER
        try:
            (head.route or self._server.handle)(self, head, body)
        except EdgekitError as error:
            self.answer_error(error)
        except Exception:
            _logger.exception("a request to %s failed inside the service", head.path)
            self.answer_error(RequestError(500, "the service failed; its log says why"))

    # Answering

    def refuse(self, error: EdgekitError) -> None:
        """Answer with `error` and close, since where the next request begins is not known."""
        self._receiver.discard()
        self.is_busy = self.closes = True
        self.answer_error(error)

    def answer_error(self, error: EdgekitError) -> None:
        """Answer the request under way with `error`, which is counted."""
        if self.is_busy and self._socket is not None:
            self._server.error_counts[status_of(error)] += 1
        self.answer(*make_error(error))

    def answer(self, *parts: Buffer) -> None:
        """Send the answer to the request under way; does nothing when the connection is gone.

        Args:
            parts: the head, as `make_head` returns it, and the body; C-contiguous, not to be changed until
                they are sent.
        """
        connected, asked = self._socket, self._head
        if connected is None or not self.is_busy:
            return
        is_usual = asked is not None and asked.is_plain and not self.closes
        if not is_usual or self._receiver.has_ended or self._server.is_draining:
            parts = self._fit(asked, *parts)
        size_bytes = 0
        for part in parts:
            size_bytes += len(part) if type(part) is bytes else part.nbytes  # type: ignore[union-attr]
        if self._lease is not None:
            self._lease.states[self._lease.index] = ANSWERING
        try:
            sent = connected.sendmsg(parts) if len(parts) <= MAX_PARTS else 0  # type: ignore[arg-type]
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent == size_bytes:
            self._finish()
        else:
            self._queue(Outgoing(parts, sent))

    def _fit(self, asked: Head | None, head: Buffer, *body: Buffer) -> tuple[Buffer, ...]:
        """Return the answer as the client takes it, and decide whether it is the last one."""
        is_last = asked is None or not asked.keeps_alive or self._server.is_draining
        if is_last or (self._receiver.has_ended and not self._receiver.unread):
            self.closes = True
        if self.closes or (asked is not None and asked.is_http_1_0):
            stated = b"\r\nConnection: close\r\n" if self.closes else b"\r\nConnection: keep-alive\r\n"
            head = bytes(head).replace(b"\r\n", stated, 1)
        return (head,) if asked is not None and asked.method == "HEAD" else (head, *body)

    def _queue(self, outgoing: Outgoing) -> None:
        server, connected, left_bytes = self._server, self._socket, outgoing.left_bytes
        if server.sending_bytes and server.sending_bytes + left_bytes > server.limits.max_sending_bytes:
            self.close()  # clients that do not take their answers fill the memory
        elif connected is not None:
            self._outgoing = outgoing
            server.sending_bytes += left_bytes
            self.watch_progress(left_bytes)
            server.loop.add_writer(connected.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        outgoing, connected = self._outgoing, self._socket
        if outgoing is None or connected is None:
            return
        try:
            self._server.sending_bytes -= outgoing.send(connected)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not outgoing.left_bytes:
            self._outgoing = None
            self._server.loop.remove_writer(connected.fileno())
            self._finish()

    def _finish(self) -> None:
        """The answer is sent: go on with the next request, or part."""
        head, self._head = self._head, None
        receiver, server = self._receiver, self._server
        self.is_busy = False
        if self.descriptors:
            self._close_descriptors()
        if self.closes:
            self._part()
            return
        if receiver.has_ended and not receiver.unread:
            self.close()
            return
        self.expires = server.wheel.now + server.idle_ticks
        if self._lease is not None:
            self._lease.states[self._lease.index] = UNDER_WAY if receiver.unread else IDLE
        if server.on_rest is not None:
            server.on_rest(self)
            return
        if self.looked_at >= NEVER:  # the wheel looked while the request was under way
            server.wheel.expire(self, server.limits.idle_timeout_s)
        receiver.go_on(self, head)

    # Ending

    def watch_progress(self, moved_bytes: int) -> None:
        """Have a look now and then at how much of a body or an answer has moved: now `moved_bytes`."""
        self._moved = moved_bytes
        self._server.wheel.expire(self, self._server.limits.read_timeout_s)

    def on_timeout(self) -> None:
        """Say so to a client that is in the middle of a request; otherwise just close.

        A body or an answer that makes progress gets more time.
        """
        receiver = self._receiver
        moved = receiver.body_bytes if self._outgoing is None else self._outgoing.left_bytes
        if moved is not None and abs(moved - self._moved) >= self._server.limits.step_bytes:
            self.watch_progress(moved)
        elif not (self.is_busy or self.is_lingering) and (receiver.unread or receiver.body_bytes is not None):
            self.refuse(RequestError(408, "the request did not arrive in time"))
        else:
            self.close()

    def _part(self) -> None:
        """Close so that the client can still read the last answer: unread data would reset the connection."""
        connected = self._socket
        if connected is None or self._receiver.has_ended or self.is_lingering:
            self.close()
            return
        self.is_lingering = True
        self._receiver.discard()
        self._server.wheel.expire(self, _LINGER_S)
        try:
            connected.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        self._receiver.unpause(self)

    @property
    def has_left(self) -> bool:
        """Whether the client has gone, as far as that can be known.

        Over TCP, one that sends nothing more counts as gone: the system does not tell it from one that has
        closed.
        """
        connected = self._socket
        if connected is None:
            return True
        if not self._receiver.has_ended:
            return False
        if connected.family != socket.AF_UNIX:
            return True
        poll = select.poll()
        poll.register(connected, 0)
        return bool(poll.poll(0))  # POLLHUP, or an error

    @property
    def peer_pid(self) -> int:
        """The process at the other end of a Unix socket; 0 where that is not known."""
        if self._socket is None or self._socket.family != socket.AF_UNIX:
            return 0
        return find_peer(self._socket)

    @property
    def is_open(self) -> bool:
        """Whether it has neither ended nor been released."""
        return self._socket is not None

    @property
    def is_sending(self) -> bool:
        """Whether the client has still to take some of an answer."""
        return self._outgoing is not None

    @property
    def is_at_rest(self) -> bool:
        """Whether it can be released: no request is being received beyond its head, or answered."""
        return self.is_open and not self.closes and not self.is_busy and self._receiver.body_bytes is None

    def close_if_idle(self) -> None:
        """Close unless a request is under way, which then is the last one."""
        if not self.is_busy and self._receiver.body_bytes is None and not self._receiver.unread:
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
        self.admit()
        unread = self._receiver.unread
        connected = self._detach()
        if connected is None:
            raise RequestError(500, "the connection is closed already")
        return connected, unread

    def _detach(self) -> socket.socket | None:
        connected, self._socket, self._lease = self._socket, None, None
        if connected is None:
            return None
        self._receiver.stop()
        if self._outgoing is not None:
            self._server.loop.remove_writer(connected.fileno())
            self._server.sending_bytes -= self._outgoing.left_bytes
            self._outgoing = None
        self._close_descriptors()
        self._server.forget(self)
        if self.on_close is not None:
            self.on_close()
        return connected

    def _close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
