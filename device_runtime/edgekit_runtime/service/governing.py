"""What a governor may choose from for one model, and what it is told every second.

The governor itself, one for all models, is in `edgekit_runtime.power`; this turns what was loaded and counted
into its terms.
"""

from bisect import bisect_left
from collections.abc import Mapping
from statistics import median
from typing import Final

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.power.loads import LoadMeter
from edgekit_runtime.power.settings import Cost, Profile, Seen, Setting
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
    return Profile(costs, None if options.deadline_ms is None else options.deadline_ms / 1e3)


def _run_s(way: LoadedWay, batch: int) -> float:
    sizes = sorted({run.size_bytes for run in way.warm_runs})
    # The golden inputs are the first size; a batch of n has about n times its bytes.
    size = sizes[min(bisect_left(sizes, sizes[0] * batch), len(sizes) - 1)]
    return max(1e-6, median(run.seconds for run in way.warm_runs if run.size_bytes == size))


def _score(figures: Mapping[str, JsonValue]) -> float:
    score = figures.get("score")
    value = score.get("value") if isinstance(score, Mapping) else figures.get("accuracy")
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else _NO_SCORE


class GovernedModel:
    """One loaded version, for a governor to see and to direct.

    Attributes:
        lane: that does what is decided.
    """

    __slots__ = ("_busy_s", "_loads", "_metrics", "_profile", "_runs", "lane")

    def __init__(self, lane: GovernedLane, metrics: LaneMetrics, profile: Profile) -> None:
        """Begin.

        Args:
            lane: that does what is decided.
            metrics: what it counts.
            profile: what there is to choose from.
        """
        self.lane, self._metrics, self._profile = lane, metrics, profile
        self._loads = LoadMeter()
        self._busy_s, self._runs = 0.0, 0

    def see(self, now_s: float) -> Seen:
        """Return what a governor is told: what was counted since the last call, and what is in force.

        Args:
            now_s: `time.monotonic()`.
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
        return Seen(self._profile, load, running=self.lane.setting)

    def _mean_run_s(self) -> float | None:
        busy_s = sum(run.infer_s for run in self._metrics.runs.values())
        runs = sum(run.count for run in self._metrics.runs.values())
        spent_s, count = busy_s - self._busy_s, runs - self._runs
        self._busy_s, self._runs = busy_s, runs
        return spent_s / count if count > 0 and spent_s > 0 else None

    def _overdue(self) -> int:
        """Return how many answers came later than the deadline, those of whole ranges of the histogram."""
        if self._profile.deadline_s is None:
            return 0
        total = self._metrics.total
        return sum(total.counts[bisect_left(total.bounds, self._profile.deadline_s) + 1 :])
