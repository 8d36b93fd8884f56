"""Sends messages and file descriptors between the service and a worker process, over a Unix packet socket.

Long messages are split into several packets. The channel limits the size of messages and checks their format.
The callback `handle` checks their content, and raises `ChannelError` if it is invalid.
"""

import asyncio
import errno
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, Protocol, TypeAlias

from edgekit_runtime.errors import TransportError

MAX_MESSAGE_BYTES: Final = 4 << 20
_PACKET_BYTES: Final = 32 << 10
_MAX_DESCRIPTORS: Final = 2
_MAX_QUEUED_BYTES: Final = 16 << 20
_PACKETS_AT_ONCE: Final = 64
_MAX_REST: Final = 1 << 16  # packets, more than a socket holds
_RETRY_S: Final = 0.01
_MORE: Final = 0x80
CLOSED: Final = "it closed its channel"
_NO_ROOM: Final = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)


class Kind(IntEnum):
    """The kinds of messages. The prefix names the sender, which is the service (`MAIN`) or the worker."""

    MAIN_LEND = 2
    MAIN_RETIRE = 3
    MAIN_REGION = 4
    MAIN_FORGET_REGION = 5
    MAIN_TRY = 6
    MAIN_SETTLE = 7
    MAIN_ENERGY = 8
    WORKER_READY = 16
    WORKER_REFUSED = 17
    WORKER_RETURNS = 18
    WORKER_CLOSED = 19
    WORKER_HEARTBEAT = 20
    WORKER_TRIAL = 21
    WORKER_UNAVAILABLE = 22


Handle: TypeAlias = Callable[[Kind, bytes, list[int]], None]


class Passed(Protocol):
    """An object whose file descriptor is sent with a message. A closed descriptor is not sent."""

    def fileno(self) -> int:
        """Return the file descriptor, or -1 if it is closed."""


class ChannelError(TransportError):
    """The other process violated the protocol."""


class Channel:
    """One end of the channel between the service and a worker. It owns its socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connected: socket.socket,
        handle: Handle,
        on_end: Callable[[str], None],
    ) -> None:
        """Start to send and receive on `connected`.

        Args:
            loop: The event loop.
            connected: A Unix socket of type SOCK_SEQPACKET.
            handle: Called with the kind, content and file descriptors of each message. It owns the
                descriptors. If it raises `ChannelError`, the channel is closed.
            on_end: Called once with the reason when nothing more can be received, but not after `close`.
        """
        connected.setblocking(False)
        self._loop, self._socket, self._handle, self._on_end = loop, connected, handle, on_end
        self._is_open = True
        # Holds no duplicates of descriptors: a process without a free one could make none.
        self._queue: deque[tuple[bytes, Passed | None]] = deque()
        self._queued_bytes = 0
        self._kind: Kind | None = None
        self._size = 0
        self._parts: list[bytes] = []
        self._descriptors: list[int] = []
        loop.add_reader(connected.fileno(), self.receive)

    @property
    def is_full(self) -> bool:
        """Whether no more work should be sent, because too many bytes are queued or the channel is closed."""
        return not self._is_open or self._queued_bytes > _MAX_QUEUED_BYTES

    def send(self, kind: Kind, payload: bytes = b"", passed: Passed | None = None) -> None:
        """Send or queue a message. If the channel is closed, do nothing.

        `passed` owns a file descriptor to send with the message. A closed descriptor is not sent.
        """
        if not self._is_open:
            return
        begin = 0
        while True:
            end = begin + _PACKET_BYTES
            tag = kind | (_MORE if end < len(payload) else 0)
            packet = bytes((tag,)) + payload[begin:end]
            if self._queue or not self._try_send(packet, passed):
                self._queue.append((packet, passed))
                self._queued_bytes += len(packet)
            begin, passed = end, None
            if begin >= len(payload):
                return

    def receive(self) -> None:
        """Handle the messages that have arrived, at most 64 packets."""
        for _ in range(_PACKETS_AT_ONCE):
            if not self._is_open:
                return
            try:
                packet, extras, flags, _ = self._socket.recvmsg(
                    _PACKET_BYTES + 1,
                    socket.CMSG_SPACE(_MAX_DESCRIPTORS * array("i").itemsize),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:  # it had not read all
                self._stop(CLOSED)
                return
            except OSError as cause:
                self._stop(f"its channel broke: {cause}")
                return
            self._descriptors += _read_descriptors(extras)
            if not packet:
                self._stop(CLOSED)
                return
            try:
                self._handle_packet(packet, is_whole=not flags & socket.MSG_TRUNC)
            except ChannelError as error:
                self._stop(str(error))
                return

    def receive_rest(self) -> None:
        """Handle the remaining messages of a process that has ended."""
        for _ in range(_MAX_REST // _PACKETS_AT_ONCE):
            if not self._is_open:
                return
            self.receive()

    def close(self) -> None:
        """Close the channel for both processes, and drop all queued messages."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._queue.clear()

    def _stop(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._on_end(reason)

    def _handle_packet(self, packet: bytes, *, is_whole: bool) -> None:
        if not is_whole:
            raise ChannelError(f"it sent a packet of more than {_PACKET_BYTES} bytes")
        tag = packet[0]
        try:
            kind = Kind(tag & ~_MORE)
        except ValueError as cause:
            raise ChannelError(f"it sent a packet of the unknown kind {tag}") from cause
        if self._parts and kind is not self._kind:
            raise ChannelError(f"it sent a packet {kind.name} within a message of another kind")
        self._kind = kind
        self._parts.append(packet[1:])
        self._size += len(packet)
        if self._size > MAX_MESSAGE_BYTES:
            raise ChannelError(f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        if tag & _MORE:
            return
        payload, self._parts, self._size = b"".join(self._parts), [], 0
        descriptors, self._descriptors = self._descriptors, []
        self._handle(kind, payload, descriptors)

    def _try_send(self, packet: bytes, passed: Passed | None) -> bool:
        """Return whether the packet was sent. If not, it will be sent later."""
        descriptor = -1 if passed is None else passed.fileno()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", (descriptor,)))
        extras = [] if descriptor < 0 else [rights]
        try:
            self._socket.sendmsg([packet], extras)
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
            return False
        except OSError as cause:
            if cause.errno in _NO_ROOM:
                self._loop.call_later(_RETRY_S, self._on_writable)
                return False
            # `receive` reports the reason, once it has read what the other process had sent before.
        return True

    def _on_writable(self) -> None:
        if not self._is_open:
            return
        self._loop.remove_writer(self._socket.fileno())
        while self._queue:
            packet, passed = self._queue[0]
            if not self._try_send(packet, passed):
                return
            self._queue.popleft()
            self._queued_bytes -= len(packet)


def _read_descriptors(extras: Sequence[tuple[int, int, bytes]]) -> list[int]:
    received = array("i")
    for level, kind, data in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    return list(received)
