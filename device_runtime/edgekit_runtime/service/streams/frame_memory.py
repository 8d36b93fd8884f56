"""Shared memory for frames that a capture process writes and the service reads. It has 3 slots in a memfd.

A slot contains a frame and, if the stream has viewers, its picture as JPEG. The capture process writes only
to free slots. The service frees a slot after the model has answered.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SLOTS: Final = 3
PICTURE_BYTES: Final = 1 << 20
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # shrinking crashes the readers


class FrameMemory:
    """The slots for frames, mapped into this process. Unused parts of the slots need no memory."""

    def __init__(self, descriptor: int, frame_bytes: int) -> None:
        """Map the memory.

        Args:
            descriptor: The file descriptor of the memfd, which the caller must close.
            frame_bytes: The size limit of a frame.
        """
        self._frame_bytes = frame_bytes
        self._map = mmap.mmap(descriptor, SLOTS * (frame_bytes + PICTURE_BYTES))

    def frame(self, slot: int, shape: Sequence[int]) -> NDArray[Any]:
        """Return the frame in a slot: uint8 [height, width, 3] in RGB, or float32 [samples].

        Raises:
            ValueError: The slot does not exist, or the frame does not fit.
        """
        dtype = np.dtype(np.uint8 if len(shape) > 1 else np.float32)
        count = int(np.prod(shape, dtype=np.int64))
        if not 0 <= slot < SLOTS or not 0 < count * dtype.itemsize <= self._frame_bytes:
            raise ValueError(f"a frame {list(shape)} in slot {slot} is beyond {self._frame_bytes} bytes")
        return np.frombuffer(self._map, dtype, count, self._begin(slot)).reshape(shape)

    def picture(self, slot: int, size_bytes: int = PICTURE_BYTES) -> memoryview:
        """Return a view of the first `size_bytes` of the JPEG in a slot.

        Raises:
            ValueError: The slot does not exist, or `size_bytes` is greater than `PICTURE_BYTES`.
        """
        if not 0 <= slot < SLOTS or not 0 < size_bytes <= PICTURE_BYTES:
            raise ValueError(f"a picture of {size_bytes} bytes in slot {slot} is beyond {PICTURE_BYTES}")
        begin = self._begin(slot) + self._frame_bytes
        return memoryview(self._map)[begin : begin + size_bytes]

    def _begin(self, slot: int) -> int:
        return slot * (self._frame_bytes + PICTURE_BYTES)


def create_frame_file(frame_bytes: int) -> int:
    """Return a new memfd for the slots. Its size cannot be changed. The caller must close it."""
    descriptor = os.memfd_create("edgekit-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SLOTS * (frame_bytes + PICTURE_BYTES))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
