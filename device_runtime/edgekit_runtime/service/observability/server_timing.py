"""Response headers with the duration of a call and the load of the service.

Devices use these values to decide whether to send the next request. The headers cost a few microseconds per
response, so they are optional.

Source: W3C Server Timing, section 2, and the per-request reports of Open Request Cost Aggregation (ORCA).
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

from edgekit_runtime.service.observability.metrics import LaneMetrics

_WINDOW_S: Final = 0.25


class RunTimes:
    """The durations of one call. The lane sets them just before it answers the call.

    Attributes:
        queue_s: Seconds from the arrival of the call until it starts to run.
        compute_s: Seconds in the engine.
    """

    __slots__ = ("compute_s", "queue_s")

    def __init__(self) -> None:
        self.queue_s = self.compute_s = 0.0

    def take(self) -> tuple[float, float]:
        """Return both durations and reset them to 0."""
        durations = self.queue_s, self.compute_s
        self.queue_s = self.compute_s = 0.0
        return durations


class TimedMetrics(LaneMetrics):
    """Metrics of a lane that also stores the durations of the latest call in a `RunTimes`."""

    __slots__ = ("_times",)

    def __init__(self, model: str, version: str, times: RunTimes) -> None:
        super().__init__(model, version)
        self._times = times

    def note_lone(self, seconds: float, now_s: float, rows: int = 1) -> None:
        """Count a successful call that ran without waiting, see `LaneMetrics`."""
        super().note_lone(seconds, now_s, rows)
        self._times.queue_s, self._times.compute_s = 0.0, seconds

    def note_success(
        self, queue_s: float, compute_s: float, total_s: float, now_s: float, rows: int = 1
    ) -> None:
        """Count a successful call that waited before it ran, see `LaneMetrics`."""
        super().note_success(queue_s, compute_s, total_s, now_s, rows)
        self._times.queue_s, self._times.compute_s = queue_s, compute_s

    def note_hit(self, total_s: float, now_s: float) -> None:
        """Count a call that was answered from the cache, see `LaneMetrics`."""
        super().note_hit(total_s, now_s)
        self._times.queue_s = self._times.compute_s = 0.0


class UtilizationMeter:
    """Measures how much other clients use the sessions of a model or the processors of the machine."""

    __slots__ = ("_askers", "_began_s", "_busy_s", "_clock", "_own", "_share", "_slots")

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a meter whose utilization is 0.

        Args:
            slots: The maximum number of simultaneous runs.
            clock: Returns the time in seconds.
        """
        self._slots, self._clock = slots, clock
        self._began_s = clock()
        self._busy_s = self._share = 0.0
        self._askers: dict[int, float] = {}  # asker -> seconds of its calls since `_began_s`
        self._own: dict[int, float] = {}  # asker -> its share of the calls in the window before

    def note(self, asker: int, compute_s: float) -> None:
        """Count a call of the client `asker`. `compute_s` is the duration of its batch in seconds."""
        self._askers[asker] = self._askers.get(asker, 0.0) + compute_s

    def measure(self, list_lanes: Callable[[], Iterable[LaneMetrics]], asker: int = 0) -> float:
        """Return the mean utilization by clients other than `asker`, from 0 to 1.

        If `asker` is the only client, the result is 0. The mean covers the latest complete period of at least
        0.25 s.
        """
        now_s = self._clock()
        elapsed_s = now_s - self._began_s
        if elapsed_s >= _WINDOW_S:
            busy_s = sum(
                run.merge_s + run.infer_s + run.split_s for lane in list_lanes() for run in lane.runs.values()
            )
            # A version that was unloaded takes its seconds with it.
            self._share = min(max(busy_s - self._busy_s, 0.0) / (elapsed_s * self._slots), 1.0)
            self._began_s, self._busy_s = now_s, busy_s
            sum_s = sum(self._askers.values()) or 1.0
            self._own = {connection_key: seconds / sum_s for connection_key, seconds in self._askers.items()}
            self._askers = {}
        own = self._share * self._own.get(asker, 0.0)
        return (self._share - own) / (1 - own) if own < 1 else 0.0


def format_fields(times: tuple[float, float] | None, load: float) -> dict[str, str]:
    """Return the header `Endpoint-Load-Metrics` and, for a call that ran, `Server-Timing`.

    Args:
        times: `RunTimes.queue_s` and `compute_s`, or None for a call that did not run.
        load: The utilization by other clients, 0 to 1, and above 1 if calls are waiting.
    """
    fields = {"Endpoint-Load-Metrics": f"TEXT application_utilization={load:.3f}"}
    if times is not None:
        queue_s, compute_s = times
        fields["Server-Timing"] = f"queue;dur={queue_s * 1e3:.3f}, compute;dur={compute_s * 1e3:.3f}"
    return fields
