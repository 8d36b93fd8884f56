"""Measures the load of a model from counters that already exist."""

from collections import deque
from statistics import fmean, pvariance
from typing import Final

from edgekit_runtime.power.governor.settings import Load

_TICKS: Final = 30
_FEW_TICKS: Final = 10  # with fewer, arrivals are assumed to be random
_MOST_BURSTY: Final = 4.0  # a step of the load looks like a burst until it is `_TICKS` old


class LoadMeter:
    """Converts counters to a `Load`.

    The burstiness is the variance of the arrivals per tick divided by their mean. For many arrival processes,
    this ratio approaches the squared coefficient of variation of the time between arrivals.

    Source: D. R. Cox and P. A. W. Lewis, The Statistical Analysis of Series of Events, 1966, section 4.5
    (index of dispersion of counts).
    """

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._arrived = self._answered = self._late = 0
        self._counts: deque[int] = deque(maxlen=_TICKS)

    def measure(
        self,
        now_s: float,
        *,
        arrived: int,
        answered: int,
        late: int,
        run_s: float | None = None,
        fill: float | None = None,
    ) -> Load:
        """Return the load since the last call. The first call returns an empty load.

        Args:
            now_s: The time of a monotonic clock.
            arrived: The number of requests since the start, including rejected ones.
            answered: The number of requests since the start that were answered with outputs.
            late: The number of requests since the start that missed their deadline.
            run_s: The mean time of the runs since the last call, or None if there were none.
            fill: The mean number of requests in these runs.
        """
        seconds = 0.0 if self._at_s is None else now_s - self._at_s
        new, done, missed = arrived - self._arrived, answered - self._answered, late - self._late
        self._at_s, self._arrived, self._answered, self._late = now_s, arrived, answered, late
        if seconds <= 0:
            return Load()
        self._counts.append(new)
        return Load(
            rate_hz=new / seconds,
            run_s=run_s,
            burstiness=self._burstiness(),
            missed=min(1.0, missed / max(1, done)),
            fill=fill,
        )

    def _burstiness(self) -> float:
        mean = fmean(self._counts)
        if len(self._counts) < _FEW_TICKS or mean == 0:
            return 1.0
        return min(_MOST_BURSTY, pvariance(self._counts) / mean)
