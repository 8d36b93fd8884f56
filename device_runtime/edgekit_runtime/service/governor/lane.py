"""The lane of a governed model, which switches between several settings.

All settings are loaded and warmed up before the first call, so a switch delays no call. Calls that were
accepted under an earlier setting are still answered by the lane of that setting.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import OverloadedError
from edgekit_runtime.power.governor.settings import Decision, ModelSetting
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane
from edgekit_runtime.service.scheduling.golden_ratio import GOLDEN
from edgekit_runtime.service.scheduling.scheduler import Scheduler
from edgekit_runtime.tensors import Array

LaneKey: TypeAlias = tuple[str, int]  # variant and threads, 0 for those of the package

_RETRY_S = 1.0  # a governor decides once a second


class GovernedLane(Lane):
    """Passes calls to the lane of the current setting. It rejects a share of them if the governor decides so.

    Attributes:
        admit: The share of the calls that are accepted, 0 to 1.
        changes: The number of changes of the setting since the start.
    """

    __slots__ = ("_lanes", "_metrics", "_now", "_phase", "_reason", "admit", "changes", "setting")

    def __init__(self, lanes: Mapping[LaneKey, Scheduler], first: ModelSetting, metrics: LaneMetrics) -> None:
        """Create a lane that accepts all calls with the setting `first`.

        `lanes` holds a lane for each combination of variant and number of threads, including that of `first`.
        All of them count calls in `metrics`.
        """
        self._lanes, self._metrics = lanes, metrics
        self._phase, self._reason = 0.0, ""
        self.admit = 1.0
        self.changes = 0
        self.setting = first
        self._now = self._choose(first)

    def submit(self, call: Call) -> None:
        """Accept or reject `call`, and answer it through its `reply`. Never raises."""
        if self.admit < 1.0:
            self._phase = (self._phase + GOLDEN) % 1.0  # evenly among all clients
            if self._phase >= self.admit:
                self._metrics.shed += 1
                call.reply(
                    OverloadedError(
                        f"{self._metrics.model}: refused to hold a limit: {self._reason}", _RETRY_S
                    )
                )
                return
        self._now.submit(call)

    def attempt(self, inputs: Mapping[str, Array]) -> "Answer | None":
        """Return the answer if `admit` is 1 and the current lane can compute it immediately, else None."""
        return self._now.attempt(inputs) if self.admit >= 1.0 else None

    def follow(self, decision: Decision) -> None:
        """Apply a decision of the governor to all following calls."""
        self.admit, self._reason = decision.admit, decision.reason
        if decision.setting != self.setting:
            self.setting = decision.setting
            self.changes += 1
            self._now = self._choose(decision.setting)

    @property
    def is_idle(self) -> bool:
        """Whether the lanes of all settings are idle, including those not in use."""
        return all(lane.is_idle for lane in self._lanes.values())

    def drain(self, done: Callable[[], None]) -> None:
        """Accept no more calls, and call `done` when all accepted calls have been answered."""
        open_count = len(self._lanes)

        def count() -> None:
            nonlocal open_count
            open_count -= 1
            if not open_count:
                done()

        for lane in self._lanes.values():
            lane.drain(count)

    def to_json(self) -> dict[str, JsonValue]:
        """Return the current setting for the statistics."""
        return {
            "variant": self.setting.variant,
            "batch": self.setting.batch,
            "threads": self.setting.threads,
            "admit": round(self.admit, 4),
            "reason": self._reason,
            "changes": self.changes,
        }

    def _choose(self, setting: ModelSetting) -> Scheduler:
        lane = self._lanes[setting.variant, setting.threads]
        lane.limit_batch(setting.batch)
        return lane
