"""Deadlines of connections where the event loop is held up."""

import socket
from collections.abc import Callable
from typing import Any

import pytest

from edgekit_runtime.service.http.connection import TICK_S, Connection
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.options.http import HttpLimits


class FakeLoop:
    """Keeps the timer, for the test to let it go off."""

    def __init__(self) -> None:
        self.timer: Callable[[], None] | None = None

    def call_later(self, _delay_s: float, callback: Callable[[], None]) -> "FakeLoop":
        self.timer = callback
        return self

    def add_reader(self, *_: Any) -> None:
        pass

    remove_reader = add_reader

    def go_off(self) -> None:
        callback, self.timer = self.timer, None
        assert callback is not None
        callback()


def test_time_in_which_the_loop_was_held_up_counts_against_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    loop: Any = FakeLoop()
    ignore: Any = None
    server = HttpServer(loop, ignore, ignore, HttpLimits(idle_timeout_s=10.0))
    pairs = [socket.socketpair() for _ in range(2)]
    before = Connection(server, pairs[0][0], is_local=True)
    now_s += 30.0
    after = Connection(server, pairs[1][0], is_local=True)  # in the turn that took so long
    loop.go_off()
    assert before.is_open
    assert after.is_open
    for _ in range(int(10.0 / TICK_S) - 1):
        loop.go_off()
    assert before.is_open
    assert after.is_open
    for _ in range(3):
        if loop.timer is not None:
            loop.go_off()
    assert not before.is_open
    assert not after.is_open
    assert loop.timer is None
    server.close()
    for _, client in pairs:
        client.close()
