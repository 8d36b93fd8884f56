"""Arrays in memory that the client shares with the service."""

import fcntl
import mmap
import os
import secrets
from typing import Any

import numpy as np

from edgekit_runtime.errors import TransportError
from edgekit_runtime.sessions.session import Array


class SharedMemory:
    """A sealed memfd with one array in it.

    Attributes:
        name: of the region.
        array: of the caller's dtype and shape, zeros at first.
        descriptor: of the memfd.
        connection: number of the one on which it was registered last; 0 for none.
    """

    __slots__ = ("_end", "_start", "array", "connection", "descriptor", "name", "size_bytes")

    def __init__(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        """Make memory for an array.

        Raises:
            TransportError: the system has no memory for it.
        """
        self.name = f"client-{os.getpid()}-{secrets.token_hex(6)}"
        self.connection = 0
        size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.size_bytes = max(size_bytes, 1)
        self.descriptor = os.memfd_create("edgekit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(self.descriptor, self.size_bytes)
        except OSError as cause:
            os.close(self.descriptor)
            raise TransportError(f"cannot make shared memory of {size_bytes} bytes: {cause}") from cause
        self.array: Array = np.ndarray(shape, dtype, memory)
        self._start: int = self.array.__array_interface__["data"][0]
        self._end = self._start + self.size_bytes

    def offset_of(self, array: Array) -> int | None:
        """Return where `array` begins in this memory, or None where it lies elsewhere or has gaps."""
        address: int = array.__array_interface__["data"][0]
        is_inside = self._start <= address and address + array.nbytes <= self._end
        return address - self._start if is_inside and array.flags.c_contiguous else None

    def close(self) -> None:
        """Give the descriptor up; the memory lives as long as arrays of it."""
        os.close(self.descriptor)
