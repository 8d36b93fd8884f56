"""The unsent part of a response."""

import itertools
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from edgekit_runtime.tensors import Array

Buffer: TypeAlias = "bytes | memoryview | Array"

MAX_PARTS: Final = 512  # per sendmsg. The system's limit is 1,024


class SendBuffer:
    """The unsent parts of a response."""

    __slots__ = ("_parts", "left_bytes")

    def __init__(self, parts: Sequence[Buffer], sent_bytes: int) -> None:
        """Store `parts`, of which the first `sent_bytes` bytes were already sent."""
        self._parts = deque(part for part in map(flatten, parts) if len(part))
        self.left_bytes = sum(map(len, self._parts))
        self._drop(sent_bytes)

    def send(self, connected: socket.socket) -> int:
        """Send as much as the socket accepts, and return the number of bytes.

        Raises:
            OSError: The socket accepts nothing at the moment, or the connection failed.
        """
        sent_bytes = connected.sendmsg(tuple(itertools.islice(self._parts, MAX_PARTS)))
        self._drop(sent_bytes)
        return sent_bytes

    def _drop(self, sent_bytes: int) -> None:
        self.left_bytes -= sent_bytes
        parts = self._parts
        while sent_bytes:
            if len(parts[0]) <= sent_bytes:
                sent_bytes -= len(parts.popleft())
            else:
                parts[0] = parts[0][sent_bytes:]
                sent_bytes = 0


def flatten(part: Buffer) -> memoryview:
    """Return the bytes of a part without copying. Arrays must be C-contiguous."""
    if isinstance(part, np.ndarray):
        return memoryview(part.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    return memoryview(part)
