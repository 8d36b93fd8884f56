"""Decides when samples are sent, and reports their state."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.agent.conditions import DeviceConditions, check_window, has_power
from edgekit_runtime.agent.documents import ReportedSamples
from edgekit_runtime.agent.execution.step_result import StepResult
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.samples import SampleOrder
from edgekit_runtime.samples.folder import SAMPLES_FOLDER, SampleFolder, StoredSample

_LIST_S: Final = 10.0  # between looks at the folder
_AGAIN_S: Final = 60.0  # after an upload that failed, doubled each time
_MAX_AGAIN_S: Final = 3600.0
_MAX_ERROR: Final = 200


class SampleUploads:
    """Decides when to upload samples. Each `now_s` is a time of the monotonic clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = SampleFolder(folder / SAMPLES_FOLDER)
        self._waiting: list[StoredSample] = []
        self._listed_s = self._due_s = float("-inf")
        self._failures = 0

    def look(self, now_s: float) -> bool:
        """Return whether samples are waiting. The folder is read at most every few seconds."""
        if now_s - self._listed_s >= _LIST_S:
            self._listed_s, self._waiting = now_s, self._folder.list_samples()
        return bool(self._waiting)

    def list_held(self, orders: Sequence[SampleOrder], conditions: DeviceConditions) -> tuple[str, ...]:
        """Return the ids of the orders whose samples may not be sent at this time of day."""
        return tuple(order.id for order in orders if check_window(order.window, conditions) is not None)

    def may_send(
        self, now_s: float, orders: Sequence[str], conditions: DeviceConditions, stated: Mapping[str, Any]
    ) -> bool:
        """Return whether a sample is waiting and may be sent now. The device's owner must allow it.

        `orders` is the result of `list_held`. `stated` is the result of `control.read_samples`.
        `now_s` is monotonic.
        """
        return (
            stated.get("allowed") is True
            and self.look(now_s)
            and now_s >= self._due_s
            and has_power(conditions)
            and conditions.budget_left_bytes != 0
            and any(sample.order not in orders for sample in self._waiting)
        )

    def note_end(self, result: StepResult, now_s: float) -> None:
        """Record the end of an upload. After each failure the pause doubles, from a minute to an hour."""
        self._listed_s = float("-inf")
        self._failures = self._failures + 1 if result.outcome == "retry" else 0
        pause_s = min(_MAX_AGAIN_S, _AGAIN_S * 2.0 ** min(self._failures - 1, 10)) if self._failures else 0.0
        self._due_s = now_s + pause_s

    def report(
        self, orders: Sequence[SampleOrder], stated: Mapping[str, Any], now: float
    ) -> Mapping[str, ReportedSamples]:
        """Return a dict from order id to the state of its samples. `now` is in seconds since 1970."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for sample in self._waiting:
            counts[sample.order] += 1
            sizes[sample.order] += sample.size_bytes
        of_service = stated.get("orders")
        reports = {}
        for order in orders:
            result = of_service.get(order.id) if isinstance(of_service, Mapping) else None
            fields = {
                "state": _name_state(order, stated, now, is_served=result is not None),
                "waiting": counts[order.id],
                "waiting_bytes": sizes[order.id],
            }
            try:
                report = from_plain(ReportedSamples, {**fields, **(result or {})})
            except (ConfigError, TypeError):  # a service of another edgekit states something else
                report = from_plain(ReportedSamples, fields)
            reports[order.id] = replace(report, error=report.error[:_MAX_ERROR])
        return reports


def _name_state(order: SampleOrder, stated: Mapping[str, Any], now: float, *, is_served: bool) -> str:
    if stated.get("allowed") is False:
        return "forbidden"
    if now >= order.ends_at:
        return "ended"
    return "collecting" if is_served else "missing"
