"""Long work on the thread of the event loop, in slices, between which all others have their turn."""

import asyncio
import time
from collections import deque
from typing import Final

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.protocol.json_tensors import Sliced

_SLICE_S: Final = 100e-6  # about what a small request takes: the longest that one waits for a slice
_RETRY_AFTER_S: Final = 1.0


class Slicer:
    """Does works side by side, one slice of one work in each turn of the loop.

    A thread would not do: what reads and writes JSON keeps Python's lock for a whole document.
    """

    __slots__ = ("_held_bytes", "_loop", "_max_held_bytes", "_works")

    def __init__(self, loop: asyncio.AbstractEventLoop, max_held_bytes: int) -> None:
        """Make one without work.

        Args:
            loop: on whose thread the work is done.
            max_held_bytes: that all works may hold together; a single one may hold more.
        """
        self._loop = loop
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._works: deque[tuple[Sliced[None], int]] = deque()

    def start(self, work: Sliced[None], held_bytes: int) -> None:
        """Do `work`, which raises nothing.

        Args:
            work: to do; closed at once where it is refused.
            held_bytes: how much memory it needs until its end.

        Raises:
            UnavailableError: the works under way hold too much.
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
        finally:  # whatever it raises, the others go on
            self._works.popleft()
            if is_over:
                self._held_bytes -= held_bytes
            else:
                self._works.append((work, held_bytes))
            if self._works:
                self._loop.call_soon(self._turn)


def _advance(work: Sliced[None]) -> bool:
    """Do a slice of `work`; returns whether that was the last one."""
    end_s = time.perf_counter() + _SLICE_S
    while True:
        try:
            next(work)
        except StopIteration:
            return True
        if time.perf_counter() >= end_s:
            return False
