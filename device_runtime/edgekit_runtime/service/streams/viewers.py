"""Clients that read a response without an end: pictures of the live page, or lines of answers."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

_PART: Final = b"edgekit-frame"
PICTURES_TYPE: Final = f"multipart/x-mixed-replace; boundary={_PART.decode()}"
_MAX_HEAD_BYTES: Final = 16 << 10  # of an answer in the head of a part


class Viewer:
    """One client. If more than `max_queued` chunks wait for it, the oldest are dropped."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connected: socket.socket,
        *,
        max_queued: int,
        timeout_s: float,
        on_close: Callable[["Viewer"], None],
    ) -> None:
        """Serve a client; its socket `connected` is the viewer's from now on. All runs on the loop's thread.

        `timeout_s`: a client that reads nothing for this time is disconnected. `on_close`: called once when
        the connection has ended.
        """
        self._loop, self._socket, self._timeout_s, self._on_close = loop, connected, timeout_s, on_close
        self._queued: deque[bytes] = deque(maxlen=max_queued)
        self._unsent = memoryview(b"")
        self.is_open, self._is_ending = True, False
        self._timer: asyncio.TimerHandle | None = None
        connected.setblocking(False)
        loop.add_reader(connected.fileno(), self._on_readable)

    def put(self, chunk: bytes) -> None:
        """Send a chunk as soon as the client takes it."""
        if self.is_open and not self._is_ending:
            self._queued.append(chunk)
            if self._timer is None:
                self._send()

    def finish(self) -> None:
        """Close once the client has received everything that waits."""
        self._is_ending = True
        if self.is_open and self._timer is None:
            self.close()

    def close(self) -> None:
        """Close now; a second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket.fileno())
        self._stop_waiting()
        self._socket.close()
        self._on_close(self)

    def _send(self) -> None:
        """Send as much as the socket takes; wait for the socket if bytes remain."""
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
    """Return a part of `PICTURES_TYPE`: a picture with its answer in the part's head, or the answer alone.

    Args:
        picture: a JPEG, or empty.
        answer: one line of JSON in ASCII; left out beside a picture if it is over 16 KiB.
    """
    kind, body = (b"image/jpeg", picture) if picture else (b"application/json", answer)
    field = b"Edgekit-Answer: %b\r\n" % answer if picture and len(answer) <= _MAX_HEAD_BYTES else b""
    head = b"--%b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (_PART, kind, len(body), field)
    return head + body + b"\r\n"
