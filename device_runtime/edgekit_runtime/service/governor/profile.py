"""Reports the profile of a loaded model to the governor once, and its load every second.

The governor itself is in `edgekit_runtime.power`.
"""

from bisect import bisect_left
from collections.abc import Mapping
from statistics import median
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.power.governor.loads import LoadMeter
from edgekit_runtime.power.governor.settings import Cost, ModelSetting, Profile, Seen
from edgekit_runtime.service.governor.lane import GovernedLane
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.options.model import GovernorOptions, SchedulingLimits
from edgekit_runtime.sessions.instances import LoadedSetting

_WATTS: Final = 1.0  # of one busy thread: a guess that the governor corrects by a common factor
_NO_SCORE: Final = 0.5


def make_profile(
    loaded_settings: tuple[LoadedSetting, ...], options: GovernorOptions, scheduling: SchedulingLimits
) -> Profile:
    """Return the time, energy and accuracy of each loaded setting with each allowed batch size.

    The running times were measured when the model was loaded. The energy is assumed to be proportional to the
    running time and to the number of threads. The accuracy is the score in the package.
    """
    costs = {}
    for loaded in loaded_settings:
        for batch in sorted({min(batch, scheduling.max_batch) for batch in options.batches}):
            run_s = _run_s(loaded, batch)
            energy_j = run_s * max(1, loaded.threads) * _WATTS / batch
            setting = ModelSetting(loaded.variant, batch, loaded.threads)
            costs[setting] = Cost(run_s, energy_j, _score(loaded.figures))
    deadline_s = None if options.deadline_ms is None else options.deadline_ms / 1e3
    return Profile(costs, deadline_s, hold_s=scheduling.max_delay_s)


def _run_s(loaded: LoadedSetting, batch: int) -> float:
    sizes = sorted({run.size_bytes for run in loaded.warm_runs})
    # The golden inputs are the first size; a batch of n has about n times its bytes.
    size = sizes[min(bisect_left(sizes, sizes[0] * batch), len(sizes) - 1)]
    return max(1e-6, median(run.seconds for run in loaded.warm_runs if run.size_bytes == size))


def _score(figures: Mapping[str, JsonValue]) -> float:
    score = figures.get("score")
    value = score.get("value") if isinstance(score, Mapping) else figures.get("accuracy")
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else _NO_SCORE


class GovernedModel:
    """A loaded version that is controlled by a governor. `lane` applies the governor's decisions."""

    __slots__ = ("_counted", "_loads", "_metrics", "_profile", "lane")

    def __init__(self, lane: GovernedLane, metrics: LaneMetrics, profile: Profile) -> None:
        self.lane, self._metrics, self._profile = lane, metrics, profile
        self._loads = LoadMeter()
        self._counted = (0.0, 0, 0)

    def see(self, now_s: float) -> Seen:
        """Return the load since the last call, and the current setting.

        `now_s` is the time of `time.monotonic()`.
        """
        metrics = self._metrics
        answered = metrics.succeeded + metrics.failed
        run_s, fill = self._measure_runs()
        load = self._loads.measure(
            now_s,
            arrived=answered + metrics.shed + metrics.late + metrics.waiting,
            answered=answered,
            late=metrics.late + self._overdue(),
            run_s=run_s,
            fill=fill,
        )
        return Seen(self._profile, load, running=self.lane.setting)

    def _measure_runs(self) -> tuple[float | None, float | None]:
        """Return the mean time of the runs since the last call, and the mean number of calls in one."""
        runs = self._metrics.runs.items()
        now = (
            sum(run.infer_s for _, run in runs),
            sum(run.count for _, run in runs),
            sum(calls * run.count for (calls, _), run in runs),
        )
        busy_s, count, calls = (total - before for total, before in zip(now, self._counted, strict=True))
        self._counted = now
        return (busy_s / count, calls / count) if count > 0 and busy_s > 0 else (None, None)

    def _overdue(self) -> int:
        """Return how many requests were answered after the deadline, by whole ranges of the histogram."""
        if self._profile.deadline_s is None:
            return 0
        total = self._metrics.total
        return sum(total.counts[bisect_left(total.bounds, self._profile.deadline_s) + 1 :])
