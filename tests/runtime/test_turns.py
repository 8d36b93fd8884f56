import threading
from collections.abc import Mapping
from typing import Any

import pytest

from edgekit_runtime.autotune.interleaving import Runner, take_turns
from edgekit_runtime.sessions.latency import LatencyLimits
from edgekit_runtime.tensors import TensorSpec

TEN = LatencyLimits(warmup_rounds=0, min_rounds=10, max_rounds=10, time_limit_s=1e6)


class Clocked:
    """A session that takes the same time always, on a clock of its own."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def __init__(self, name: str, seconds: float, log: list[str], now: list[float]) -> None:
        self.name, self.seconds, self.log, self.now = name, seconds, log, now

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append(self.name)
        self.now[0] += self.seconds
        return {}

    def close(self) -> None:
        pass


def test_turns_of_short_runs_hold_several_after_one_that_does_not_count() -> None:
    log: list[str] = []
    now = [0.0]
    runners = {
        name: Runner([Clocked(name, seconds, log, now)], {}) for name, seconds in (("a", 2.5e-4), ("b", 5e-4))
    }
    found = take_turns(runners, TEN, clock=lambda: now[0])
    assert found["a"].median_s == pytest.approx(2.5e-4)
    assert found["b"].median_s == pytest.approx(5e-4)
    assert (log[:4], len(log)) == (["a", "a", "b", "b"], 4 + 10 * (5 + 3))
    rounds = ["".join(log[start : start + 8]) for start in range(4, len(log), 8)]
    assert set(rounds) == {"aaaaabbb", "bbbaaaaa"}  # turns of 1 ms, in both orders


def test_long_runs_are_turns_by_themselves() -> None:
    log: list[str] = []
    now = [0.0]
    take_turns({"a": Runner([Clocked("a", 0.01, log, now)], {})}, TEN, clock=lambda: now[0])
    assert len(log) == 2 + 10


def test_sessions_of_one_runner_run_at_once_and_each_row_counts() -> None:
    together = threading.Barrier(2, timeout=60)
    now = [0.0]

    class Meeting(Clocked):
        def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
            if together.wait() == 0:
                now[0] += 0.08
            together.wait()
            return {}

    runner = Runner([Meeting("a", 0.0, [], now), Meeting("b", 0.0, [], now)], {}, rows=8)
    assert take_turns({"both": runner}, TEN, clock=lambda: now[0])["both"].median_s == pytest.approx(0.01)
