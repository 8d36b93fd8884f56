"""What all workers of a model have counted of one version, those that have ended too."""

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.worker_wire.snapshots import Snapshot, add_up


class Tally:
    """Sums of one version; workers are told apart by any object."""

    __slots__ = ("_into", "_live", "_past")

    def __init__(self) -> None:
        self._past = LaneMetrics("", "")  # of workers that have ended, and of the service itself
        self._live: dict[object, Snapshot] = {}
        self._into: LaneMetrics | None = None

    def count_into(self, metrics: LaneMetrics) -> None:
        """Let `metrics` hold the sums from now on."""
        self._into = metrics
        self._add_up()

    def refuse(self) -> None:
        """Count a call that no worker could take."""
        self._past.refused += 1
        self._add_up()

    def take(self, worker: object, snapshot: Snapshot) -> None:
        """Take in what `worker` has counted since its start."""
        self._live[worker] = snapshot
        self._add_up()

    def keep(self, worker: object) -> None:
        """Keep what `worker` has counted, which has ended."""
        ended = self._live.pop(worker, None)
        if ended is not None:
            total = LaneMetrics("", "")
            add_up(total, [self._past, ended.counted])
            self._past = total

    def said_by(self, worker: object) -> dict[str, JsonValue]:
        """Return what `worker` said last beyond counts; empty before its first word."""
        snapshot = self._live.get(worker)
        return {} if snapshot is None else snapshot.said

    def _add_up(self) -> None:
        if self._into is not None:
            add_up(self._into, [self._past, *(snapshot.counted for snapshot in self._live.values())])
