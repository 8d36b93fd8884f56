"""Clients that receive an endless response: the pictures of the live page, or lines of answers."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

_PART: Final = b"edgekit-frame"
PICTURES_TYPE: Final = f"multipart/x-mixed-replace; boundary={_PART.decode()}"
_MAX_HEAD_BYTES: Final = 16 << 10  # of an answer in the head of a part


class Viewer:
    """A client. If more than `max_queued` chunks wait for it, the oldest ones are dropped."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connected: socket.socket,
        *,
        max_queued: int,
        timeout_s: float,
        on_close: Callable[["Viewer"], None],
    ) -> None:
        """Serve a client on the event loop. The viewer owns the socket `connected` from now on.

        A client that reads nothing for `timeout_s` is disconnected. `on_close` is called once when the
        connection has ended.
        """
        self._loop, self._socket, self._timeout_s, self._on_close = loop, connected, timeout_s, on_close
        self._queued: deque[bytes] = deque(maxlen=max_queued)
        self._unsent = memoryview(b"")
        self.is_open, self._is_ending = True, False
        self._timer: asyncio.TimerHandle | None = None
        connected.setblocking(False)
        loop.add_reader(connected.fileno(), self._on_readable)

    def put(self, chunk: bytes) -> None:
        """Send a chunk when the client can receive it."""
        if self.is_open and not self._is_ending:
            self._queued.append(chunk)
            if self._timer is None:
                self._send()

    def finish(self) -> None:
        """Close the connection after the client has received all waiting chunks."""
        self._is_ending = True
        if self.is_open and self._timer is None:
            self.close()

    def close(self) -> None:
        """Close the connection now if it is open."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket.fileno())
        self._stop_waiting()
        self._socket.close()
        self._on_close(self)

    def _send(self) -> None:
        """Send as much as the socket accepts. If bytes remain, wait for the socket."""
        self._stop_waiting()
        try:
            while self._unsent or self._queued:
                if not self._unsent:
                    self._unsent = memoryview(self._queued.popleft())
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._socket.fileno(), self._send)
            self._timer = self._loop.call_later(self._timeout_s, self.close)
        except OSError:
            self.close()
        else:
            if self._is_ending:
                self.close()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()


def write_part(picture: bytes, answer: bytes) -> bytes:
    """Return a part of a multipart response. It is a picture with its answer in a header, or only the answer.

    Args:
        picture: A JPEG, or empty.
        answer: A line of JSON in ASCII. With a picture, an answer of more than 16 KiB is omitted.
    """
    kind, body = (b"image/jpeg", picture) if picture else (b"application/json", answer)
    field = b"Edgekit-Answer: %b\r\n" % answer if picture and len(answer) <= _MAX_HEAD_BYTES else b""
    head = b"--%b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (_PART, kind, len(body), field)
    return head + body + b"\r\n"
