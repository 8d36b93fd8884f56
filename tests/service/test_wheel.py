"""Time-outs of connections where the event loop is held up."""

from collections.abc import Callable
from typing import Any

import pytest

from edgekit_runtime.service.http.timer_wheel import NEVER, TICK_S, Wheel


class FakeLoop:
    """Keeps the timer, for the test to let it go off."""

    def __init__(self) -> None:
        self.timer: Callable[[], None] | None = None

    def call_later(self, _delay_s: float, callback: Callable[[], None]) -> "FakeLoop":
        self.timer = callback
        return self

    def go_off(self) -> None:
        callback, self.timer = self.timer, None
        assert callback is not None
        callback()


class Item:
    """Counts its time-outs."""

    def __init__(self) -> None:
        self.expires = self.looked_at = NEVER
        self.timeouts = 0

    def on_timeout(self) -> None:
        self.timeouts += 1


def test_time_in_which_the_loop_was_held_up_counts_against_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    loop: Any = FakeLoop()
    wheel, before, after = Wheel(loop), Item(), Item()
    wheel.expire(before, 10.0)
    now_s += 30.0
    wheel.expire(after, 10.0)  # in the turn that took so long
    loop.go_off()
    assert (before.timeouts, after.timeouts) == (0, 0)
    for _ in range(int(10.0 / TICK_S) - 1):
        loop.go_off()
    assert (before.timeouts, after.timeouts) == (0, 0)
    for _ in range(3):
        if loop.timer is not None:
            loop.go_off()
    assert (before.timeouts, after.timeouts) == (1, 1)
