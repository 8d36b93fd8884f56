"""What a governor may choose from for one model, and what it is told every second.

The governor itself is in `edgekit_runtime.power`; this turns what was loaded and counted into its terms.
"""

from bisect import bisect_left
from collections.abc import Mapping
from statistics import median
from typing import Final

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.power.governor import Governor
from edgekit_runtime.power.loads import LoadMeter
from edgekit_runtime.power.readings import Readings
from edgekit_runtime.power.settings import Cost, Profile, Setting
from edgekit_runtime.service.governed_lane import GovernedLane
from edgekit_runtime.service.governor_options import GovernorOptions, LoadedWay
from edgekit_runtime.service.metrics import LaneMetrics

_WATTS: Final = 1.0  # of one busy thread: a guess that the governor corrects by a common factor
_NO_SCORE: Final = 0.5


def make_profile(ways: tuple[LoadedWay, ...], options: GovernorOptions, max_batch: int) -> Profile:
    """Return the settings that are loaded, with what they cost as far as that is known.

    Running times were measured on loading. Energy is taken as proportional to the time of the engine's
    threads: a governor learns the factor. Accuracy is the score in the package.
    """
    costs = {}
    for way in ways:
        for batch in sorted({min(batch, max_batch) for batch in options.batches}):
            run_s = _run_s(way, batch)
            energy_j = run_s * max(1, way.threads) * _WATTS / batch
            setting = Setting(way.variant, batch, way.threads)
            costs[setting] = Cost(run_s, energy_j, _score(way.figures))
    return Profile(costs, options.idle_w)


def _run_s(way: LoadedWay, batch: int) -> float:
    sizes = sorted({run.size_bytes for run in way.warm_runs})
    # The golden inputs are the first size; a batch of n has about n times its bytes.
    size = sizes[min(bisect_left(sizes, sizes[0] * batch), len(sizes) - 1)]
    return max(1e-6, median(run.seconds for run in way.warm_runs if run.size_bytes == size))


def _score(figures: Mapping[str, JsonValue]) -> float:
    score = figures.get("score")
    value = score.get("value") if isinstance(score, Mapping) else figures.get("accuracy")
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else _NO_SCORE


class ModelGovernor:
    """Holds the limits of one loaded version; ticked once a second."""

    __slots__ = ("_busy_s", "_deadline_s", "_governor", "_lane", "_loads", "_metrics", "_runs")

    def __init__(
        self,
        lane: GovernedLane,
        metrics: LaneMetrics,
        profile: Profile,
        options: GovernorOptions,
        now_s: float,
    ) -> None:
        """Begin.

        Args:
            lane: that does what is decided.
            metrics: what it counts.
            profile: what there is to choose from.
            options: the limits.
            now_s: on the clock of `tick`.
        """
        self._lane, self._metrics = lane, metrics
        limits = options.limits(now_s)
        self._deadline_s = limits.deadline_s
        self._governor = Governor(profile, limits)
        self._loads = LoadMeter()
        self._busy_s, self._runs = 0.0, 0

    def tick(self, now_s: float, readings: Readings) -> None:
        """Tell the governor what was counted since the last tick, and do what it decides.

        Args:
            now_s: `time.monotonic()`.
            readings: the latest.
        """
        metrics = self._metrics
        answered = metrics.succeeded + metrics.failed
        load = self._loads.measure(
            now_s,
            came=answered + metrics.shed + metrics.late + metrics.waiting,
            answered=answered,
            late=metrics.late + self._overdue(),
            run_s=self._mean_run_s(),
        )
        decision = self._governor.tick(now_s, readings, load, running=self._lane.setting)
        if decision is not None:
            self._lane.follow(decision)

    def _mean_run_s(self) -> float | None:
        busy_s = sum(run.infer_s for run in self._metrics.runs.values())
        runs = sum(run.count for run in self._metrics.runs.values())
        spent_s, count = busy_s - self._busy_s, runs - self._runs
        self._busy_s, self._runs = busy_s, runs
        return spent_s / count if count > 0 and spent_s > 0 else None

    def _overdue(self) -> int:
        """Return how many answers came later than the deadline, those of whole ranges of the histogram."""
        if self._deadline_s is None:
            return 0
        total = self._metrics.total
        return sum(total.counts[bisect_left(total.bounds, self._deadline_s) + 1 :])
