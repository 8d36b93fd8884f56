"""Runs long work on the event loop in slices of 100 us, so that other requests are served in between."""

import asyncio
import time
from collections import deque
from typing import Final

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.protocol.json_tensors import Sliced

_SLICE_S: Final = 100e-6  # about what a small request takes
_RETRY_AFTER_S: Final = 1.0


class Slicer:
    """Runs several long jobs in turn, one slice per iteration of the event loop.

    A thread would not help, because Python's JSON functions hold the interpreter lock for a whole document.
    """

    __slots__ = ("_held_bytes", "_loop", "_max_held_bytes", "_works")

    def __init__(self, loop: asyncio.AbstractEventLoop, max_held_bytes: int) -> None:
        """Create a slicer without work.

        Args:
            loop: The event loop that runs the slices.
            max_held_bytes: The limit of all `held_bytes` together. It does not apply to a single job.
        """
        self._loop = loop
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._works: deque[tuple[Sliced[None], int]] = deque()

    def start(self, work: Sliced[None], held_bytes: int) -> None:
        """Start `work`, which must not raise.

        Args:
            work: A generator that yields after each part of the work. It is closed if this method raises.
            held_bytes: The memory that the work needs until it ends.

        Raises:
            UnavailableError: The memory limit of all running work would be exceeded.
        """
        if self._works and self._held_bytes + held_bytes > self._max_held_bytes:
            work.close()
            raise UnavailableError("too much JSON is being read and written; try again", _RETRY_AFTER_S)
        self._held_bytes += held_bytes
        self._works.append((work, held_bytes))
        if len(self._works) == 1:
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        work, held_bytes = self._works[0]
        is_over = True
        try:
            is_over = _advance(work)
        finally:  # also after an error the other work goes on
            self._works.popleft()
            if is_over:
                self._held_bytes -= held_bytes
            else:
                self._works.append((work, held_bytes))
            if self._works:
                self._loop.call_soon(self._turn)


def _advance(work: Sliced[None]) -> bool:
    """Run a slice of `work`. Return whether it was the last one."""
    end_s = time.perf_counter() + _SLICE_S
    while True:
        try:
            next(work)
        except StopIteration:
            return True
        if time.perf_counter() >= end_s:
            return False
