"""Decides from measured durations whether a model runs on the event loop or on a thread.

On a thread, durations include waits for Python's global lock, so a model moves to the loop if the shortest of
several runs is short enough. It moves back to threads if the moving mean of the runs on the loop is too long.

A model may be fast for most inputs and slow for a few, and a slow run on the loop delays every request. After
a run of 10 ms or more, the model therefore stays on threads for at least 250 runs. The number of runs grows
with the duration of the slow run, and with each further slow run. With `short_s = 0`, the model always runs
on threads.
"""

import math
from typing import Final

from edgekit_runtime.tensors import Shapes

_WEIGHT: Final = 1 / 8  # of a new value in a mean
_HICCUP: Final = 8.0  # a longer run counts as this multiple of the mean
_HYSTERESIS: Final = 1.5  # a model leaves the loop at this many times the limit under which it came
_FIRST_PATIENCE: Final = 3
_LAST_PATIENCE: Final = 1024
_MAX_SHAPES: Final = 256  # shapes whose times are kept
# A run of this, or more, freezes the loop, unless the limit is as large. With fifteen busy threads on two
# cores, 1.3 in a thousand runs of 65 us took that long for want of a core, and 0.04 took 50 ms.
_FREEZE_S: Final = 10e-3
_SAVED_S: Final = 40e-6  # by a run on the loop, compared with a thread
_REPEATS: Final = 8.0  # most runs on threads over those due, if a model keeps freezing the loop


def move_mean(mean_s: float, seconds: float) -> float:
    """Return the moving mean after another value, in seconds. `mean_s` is the previous mean, initially 0."""
    return mean_s + (seconds - mean_s) * (_WEIGHT if mean_s else 1.0)


class RunPlacement:
    """Decides whether a model runs on the event loop or on a thread, for one set of input shapes.

    Attributes:
        short: Whether the next run may use the event loop.
        mean_s: The moving mean of the durations, initially 0.
    """

    __slots__ = (
        "_countdown",
        "_freeze_s",
        "_least_s",
        "_limit_s",
        "_patience",
        "_upper_s",
        "mean_s",
        "short",
    )

    def __init__(self, limit_s: float) -> None:
        """Create a placement on threads, without measurements.

        Args:
            limit_s: Shorter runs may use the event loop. 0 allows none.
        """
        self.short = False
        self.mean_s = 0.0
        self._limit_s, self._upper_s = limit_s, limit_s * _HYSTERESIS
        self._freeze_s = max(_FREEZE_S, limit_s * _HICCUP)
        self._patience = self._countdown = _FIRST_PATIENCE
        self._least_s = float("inf")

    def note_on_loop(self, seconds: float) -> None:
        """Count a run on the event loop. If runs have become too long for the loop, set `short` to False."""
        mean_s = self.mean_s
        if seconds > mean_s * _HICCUP:
            if seconds >= self._freeze_s:
                self._leave(seconds / _SAVED_S)
                return
            seconds = mean_s * _HICCUP
        self.mean_s = mean_s = mean_s + (seconds - mean_s) * _WEIGHT
        if mean_s > self._upper_s:
            self._leave(0.0)

    def note_on_thread(self, seconds: float) -> None:
        """Count a run on a thread. After several runs, set `short` according to the shortest of them."""
        self.mean_s = move_mean(self.mean_s, seconds)
        if seconds >= self._freeze_s:  # it would have frozen the loop
            due = min(self._patience, math.ceil(seconds / _SAVED_S))
            self._countdown, self._least_s = max(self._countdown, due), float("inf")
            return
        self._least_s = min(self._least_s, seconds)
        self._countdown -= 1
        if self._countdown <= 0:
            self.short = self._least_s < self._limit_s
            if self.short:
                self.mean_s = self._least_s
            self._countdown, self._least_s = self._patience, float("inf")

    def _leave(self, due: float) -> None:
        """Move to threads for at least `due` runs. The number grows each time this happens."""
        self.short = False
        most = max(_LAST_PATIENCE, _REPEATS * due)
        self._patience = self._countdown = math.ceil(max(due, min(2 * self._patience, most)))


class RunPlacements(dict[Shapes, RunPlacement]):
    """A dict from input shapes to `RunPlacement`, created on first use. It is cleared when it is full."""

    __slots__ = ("_limit_s",)

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __missing__(self, shapes: Shapes) -> RunPlacement:
        if len(self) >= _MAX_SHAPES:
            self.clear()
        placement = self[shapes] = RunPlacement(self._limit_s)
        return placement
