"""The interface of a version whose sessions are in worker processes; `workers` implements it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import DrainingLane


class TrialRunner(Protocol):
    """Runs two versions side by side, in this process or in the worker of the version in use."""

    def begin(self, report: Callable[[Any], None]) -> None:
        """Pass the verdict (`Promote` or `Rollback`) to `report`; at once if the verdict is there already."""

    def look(self) -> None:
        """Judge now; a verdict may depend on time alone."""

    def add_energy(self, candidate_j: float, current_j: float) -> None:
        """Count the energy of a request to each version, in joules."""

    def take_over(self) -> bool:
        """Use the candidate from now on. Return False if it has ended; a rollback then follows."""

    def end(self) -> None:
        """Send no more calls to the candidate; calls under way are still answered."""

    def to_json(self) -> Mapping[str, JsonValue]:
        """Return what was observed, for `/v2` statistics."""


class IsolatedVersion(DrainingLane, Protocol):
    """A version in worker processes. As a lane it only refuses calls: requests reach workers by `lend`.

    Attributes:
        metrics: sums over all workers.
    """

    metrics: LaneMetrics

    @property
    def trial(self) -> TrialRunner | None:
        """The trial in which this version is the candidate, or None."""

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let a worker answer the present request of `connection`; return False if none can.

        `is_default`: whether the request names no version.
        """

    def refuse(self) -> EdgekitError:
        """Count a request that no worker can take now, and return the error to answer."""

    def to_json(self) -> Mapping[str, JsonValue]:
        """Return a worker's statistics beyond its counts; empty before its first report."""

    def close(self) -> None:
        """End the worker processes. May be called on any thread."""
