"""One timer of a lane, which goes off at the earliest time that it was set to.

It refers to its lane only while it is set. So a lane that has ended is freed at once, and its model.
"""

import math
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Any, Final

TIMER_S: Final = 1e-3  # what epoll counts in


class Alarm:
    """Calls back once, on the thread of the loop."""

    __slots__ = ("_at_s", "_loop", "_timer")

    def __init__(self, loop: AbstractEventLoop) -> None:
        """Make a timer that is not set; `loop` keeps time."""
        self._loop = loop
        self._timer: Any = None
        self._at_s = math.inf

    def set(self, action: Callable[[], None], at_s: float, now_s: float, *, is_exact: bool) -> None:
        """Call `action` at `at_s`, unless the alarm is set to an earlier time. That earlier time then stays.

        So `action` must set the alarm again for its next time.

        Args:
            action: the function to call; every `set` passes this function.
            at_s: when; infinite for never.
            now_s: present time on the clock of `at_s`.
            is_exact: whether to poll during the last millisecond, which keeps a core busy. Otherwise the call
                may be a millisecond late.
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
        """Unset the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._at_s = None, math.inf

    def _go_off(self, action: Callable[[], None]) -> None:
        self._timer, self._at_s = None, math.inf
        action()
