"""Arrays in memory that the client shares with the service."""

import fcntl
import json
import math
import mmap
import os
import secrets
from typing import Any, Final

import numpy as np

from edgekit_runtime.client.link import Link
from edgekit_runtime.client.requests import make_request_head
from edgekit_runtime.client.responses import make_error
from edgekit_runtime.errors import DataError, TransportError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.protocol.rest import region_path
from edgekit_runtime.tensors import Array

_NEVER: Final = -1  # no connection has this number


class SharedMemory:
    """A sealed memfd that contains one array.

    Attributes:
        descriptor: file descriptor of the memfd, or -1 once it is closed.
        array: array with the dtype and shape from the caller. It is initially zero.
        connection: `Link.connection` at the last registration with the service, or -1 if not registered.
    """

    __slots__ = ("_end", "_start", "array", "connection", "descriptor", "name", "size_bytes")

    def __init__(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        """Make memory for an array.

        Raises:
            TransportError: the system has no memory for it.
            DataError: no tensor has such a shape or dtype.
        """
        if min(shape, default=0) < 0:
            raise DataError(f"shared memory: shape is {list(shape)}, expected sizes from 0")
        if dtype.name not in DATATYPE_OF_DTYPE or not dtype.isnative:
            raise DataError(f"shared memory: dtype {dtype.str} cannot be sent; use one such as np.float32")
        self.name = f"client-{os.getpid()}-{secrets.token_hex(6)}"
        self.connection = _NEVER
        size_bytes = math.prod(shape) * dtype.itemsize
        self.size_bytes = max(size_bytes, 1)
        self.descriptor = os.memfd_create("edgekit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(self.descriptor, self.size_bytes)
        except (OSError, OverflowError) as cause:
            os.close(self.descriptor)
            raise TransportError(f"cannot make shared memory of {size_bytes} bytes: {cause}") from cause
        self.array: Array = np.ndarray(shape, dtype, memory)
        self._start: int = self.array.__array_interface__["data"][0]
        self._end = self._start + self.size_bytes

    def offset_of(self, array: Array) -> int | None:
        """Return the offset of `array` in this memory, in bytes.

        Return None if `array` is elsewhere or not contiguous.
        """
        address: int = array.__array_interface__["data"][0]
        is_inside = self._start <= address and address + array.nbytes <= self._end
        return address - self._start if is_inside and array.flags.c_contiguous else None

    def register(self, link: Link, fields: str, timeout_s: float) -> bool:
        """Register this memory with the service, which is necessary on each new connection.

        `fields` contains the header lines of every request, with line ends. `timeout_s` limits the wait for
        the answer.

        Returns:
            True if the service answered, False if it had closed an idle connection.

        Raises:
            TransportError: see `Link.ask`.
            RequestError: the service refuses.
        """
        link.connect(timeout_s)
        connection = link.connection
        body = json.dumps({"key": self.name, "offset": 0, "byte_size": self.size_bytes}).encode()
        fields += "Expect: 100-continue\r\nEdgekit-Descriptor: 1\r\n"
        head = make_request_head("POST", region_path(self.name, "register"), fields, len(body))
        answer = link.pass_descriptor(head, body, self.descriptor, timeout_s)
        if answer is None:
            return False
        if answer[0].status != 200:
            raise make_error(*answer)
        self.connection = connection
        return True

    def close(self) -> None:
        """Close the descriptor. Arrays in the memory remain valid."""
        os.close(self.descriptor)
        self.descriptor = self.connection = _NEVER
