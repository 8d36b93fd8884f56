"""The body of a request that does not come in one piece with its head: received straight to where it stays.

A body gives its bytes as a `memoryview`; what follows it is the next request's.
"""

import os
import socket
from array import array
from typing import Final

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.service.http.chunks import ChunkReader
from edgekit_runtime.tensors import allocate_aligned

READ_BYTES: Final = 64 << 10
_MAX_DESCRIPTORS: Final = 4


class SizedBody:
    """A body whose length is known, in memory that is aligned for the first tensor.

    Attributes:
        data: all of it.
        received_bytes: that have come.
        rest: what follows it.
    """

    __slots__ = ("_descriptors", "data", "received_bytes", "rest")

    def __init__(self, size_bytes: int, json_bytes: int, begun: bytes, descriptors: list[int] | None) -> None:
        """Make room for a body, of which `begun` has come with its head.

        Args:
            size_bytes: of it.
            json_bytes: where its first tensor begins.
            begun: its first bytes; may go on behind it.
            descriptors: takes those that come with it, or None where none may.
        """
        taken = min(len(begun), size_bytes)
        self.data = allocate_aligned(size_bytes, json_bytes)
        self.data[:taken] = begun[:taken]
        self.received_bytes = taken
        self.rest = begun[taken:]
        self._descriptors = descriptors

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return self.received_bytes == len(self.data)

    def receive(self, connected: socket.socket) -> None:
        """Take what has come.

        Raises:
            OSError: nothing has come, or nothing more will.
            UnavailableError: a descriptor has come that this process has no place for.
        """
        free = self.data[self.received_bytes :]
        if self._descriptors is None:
            count = connected.recv_into(free)
        else:
            count = _receive_with_descriptors(connected, free, self._descriptors)
        if count == 0:
            raise ConnectionResetError("the client ended in the middle of a body")
        self.received_bytes += count


class ChunkedBody:
    """A body in chunks.

    Attributes:
        rest: what follows it.
    """

    __slots__ = ("_chunks", "is_whole", "rest")

    def __init__(self, max_bytes: int, begun: bytes) -> None:
        """Begin one of at most `max_bytes`, of which `begun` has come with its head.

        Raises:
            RequestError: that is not in chunks, or too long.
        """
        self._chunks = ChunkReader(max_bytes)
        self.is_whole = False
        self.rest = b""
        self._feed(begun)

    @property
    def received_bytes(self) -> int:
        """How much has come."""
        return len(self._chunks.body)

    @property
    def data(self) -> memoryview:
        """What has come."""
        return memoryview(self._chunks.body)

    def receive(self, connected: socket.socket) -> None:
        """Take what has come.

        Raises:
            OSError: nothing has come, or nothing more will.
            RequestError: it is not in chunks, or too long.
        """
        data = connected.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError("the client ended in the middle of a body")
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        rest = self._chunks.feed(data)
        if rest is not None:
            self.is_whole, self.rest = True, rest


def _receive_with_descriptors(connected: socket.socket, free: memoryview, descriptors: list[int]) -> int:
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array("i").itemsize)
    count, extras, flags, _ = connected.recvmsg_into([free], room, socket.MSG_CMSG_CLOEXEC)
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
