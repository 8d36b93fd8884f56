"""Checks whether this machine runs at its usual speed, so that timings can be compared.

If other machines share a core, or if the clock changes with load and heat, the same work can take twice as
long for several seconds.
"""

import contextlib
import math
import platform
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MOST_WAITING: Final = 3
"""A measurement may take this multiple of the planned time if the processor's speed is unusual."""

_STEPS: Final = 5_000  # steps of the fixed work: 0.1 to 0.25 ms
_TIMES: Final = 3  # repetitions: at first the caches hold other data, above all after a reply
_PAUSE_S: Final = 0.02
_ENOUGH_CHECKS: Final = 20
_RECENT_CHECKS: Final = 100
_RARE_SHARE: Final = 1 / 3
_MOST_WORK_S: Final = 0.5e-3  # several slices of an evenly spread quota: a slice is 0.05 ms or more
_TOLERANCE: Final = 0.25  # a shared core is half as fast at this work. Caches cost up to a fifth


class SpeedGate:
    """Compares the processor time of a fixed workload with its usual time.

    Attributes:
        usual_s: The processor time at the usual speed, in seconds.
        now_s: The processor time at the last check, in seconds. Infinite before the first check.
    """

    def __init__(self, usual_s: float | None = None, seconds: float = 1.2) -> None:
        """Measure the most frequent speed for `seconds`, unless the usual one is known.

        `usual_s`: that of an earlier gate on the same processor; None to measure.
        """
        self.now_s = math.inf
        self._speeds: deque[float] = deque(maxlen=_RECENT_CHECKS)
        if usual_s is not None:
            self.usual_s = usual_s
            return
        times = []
        for _ in range(math.ceil(seconds / _PAUSE_S)):
            time.sleep(_PAUSE_S)
            times.append(time_fixed_work())
        self.usual_s = _most_frequent(times)

    def check(self) -> bool:
        """Measure the speed. Return True if it was usual at this check and at the previous check."""
        before_s, self.now_s = self.now_s, time_fixed_work()
        self._speeds.append(self.now_s)
        return self.is_usual(before_s, self.now_s)

    def is_usual(self, *speeds: float) -> bool:
        """Return whether all given times, in seconds, differ from `usual_s` by at most 25 %."""
        return all(_is_near(speed_s, self.usual_s) for speed_s in speeds)

    def follow(self) -> bool:
        """Replace the usual speed by the most frequent speed if the usual speed has become rare.

        A speed is rare if less than a third of the last 100 checks measured it. Nothing changes before
        20 checks. Return True if the usual speed was replaced.
        """
        usual = sum(self.is_usual(speed_s) for speed_s in self._speeds)
        if len(self._speeds) < _ENOUGH_CHECKS or usual >= _RARE_SHARE * len(self._speeds):
            return False
        frequent_s = _most_frequent(self._speeds)
        if self.is_usual(frequent_s):
            return False
        self.usual_s = frequent_s
        return True


def _most_frequent(speeds: Sequence[float]) -> float:
    return max(speeds, key=lambda speed_s: sum(_is_near(other_s, speed_s) for other_s in speeds))


def _is_near(seconds: float, usual_s: float) -> bool:
    return abs(seconds - usual_s) <= _TOLERANCE * usual_s


def time_fixed_work() -> float:
    """Run a fixed workload several times, and return its minimum processor time in seconds."""
    least_s = math.inf
    for _ in range(_TIMES):
        begin_s, total = time.thread_time(), 0
        for number in range(_STEPS):
            total += number
        least_s = min(least_s, time.thread_time() - begin_s)
    return least_s


def begin_anywhere(draws: random.Random, share: float) -> None:
    """Keep the processor busy for a random time before a measurement under a CPU quota.

    Otherwise, a short measurement would always fit into one time slice, so the quota would not slow it down.

    `share` is the share of a processor that the quota allows. If it is 1, this does nothing.
    """
    if share >= 1:
        return
    until_s = time.thread_time() + draws.uniform(0, _MOST_WORK_S)
    while time.thread_time() < until_s:
        pass


def find_cpu() -> str:
    """Return the board model in the device tree, else the name of the processor, else its architecture."""
    with contextlib.suppress(OSError):
        return Path("/proc/device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
