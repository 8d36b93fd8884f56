"""A timer for a lane, which fires at the earliest time that was set.

The timer refers to the lane only while it is set, so that a closed lane and its model are freed at once.
"""

import math
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Any, Final

TIMER_S: Final = 1e-3  # what epoll counts in


class Alarm:
    """A timer that calls a function once on the event loop."""

    __slots__ = ("_at_s", "_loop", "_timer")

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: Any = None
        self._at_s = math.inf

    def set(self, action: Callable[[], None], at_s: float, now_s: float, *, is_exact: bool) -> None:
        """Call `action` at `at_s`. If the alarm is already set to an earlier time, this has no effect.

        `action` must then set the alarm again for the later time.

        Args:
            action: The function to call. All calls of `set` must pass the same function.
            at_s: The time of the call. Infinity means never.
            now_s: The current time on the clock of `at_s`.
            is_exact: Whether to poll during the last millisecond, which keeps a processor core busy.
                Otherwise the call may be a millisecond late.
        """
        if at_s >= self._at_s:
            return
        self.cancel()
        self._at_s = at_s
        left_s = at_s - now_s
        if is_exact and left_s < TIMER_S:
            self._timer = self._loop.call_soon(self._go_off, action)
        else:
            self._timer = self._loop.call_later(max(left_s, 0.0), self._go_off, action)

    def cancel(self) -> None:
        """Cancel the alarm."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at_s = None, math.inf

    def _go_off(self, action: Callable[[], None]) -> None:
        self._timer, self._at_s = None, math.inf
        action()
