"""The interface of a version that runs in worker processes. It is implemented in `workers`."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import DrainingLane


class TrialRunner(Protocol):
    """Runs a trial of two versions, in this process or in the worker of the version in use."""

    def begin(self, report: Callable[[Any], None]) -> None:
        """Call `report` with the verdict (`Promote` or `Rollback`) when it is known, possibly at once."""

    def look(self) -> None:
        """Judge the candidate. Call this regularly, because a verdict may depend on time."""

    def add_energy(self, candidate_j: float, current_j: float) -> None:
        """Add the energy per request of each version in joules."""

    def take_over(self) -> bool:
        """Replace the version in use with the candidate.

        Return False if the candidate is no longer running, so that it must be rolled back.
        """

    def end(self) -> None:
        """Stop sending calls to the candidate. Running calls are still answered."""

    def to_json(self) -> Mapping[str, JsonValue]:
        """Return the observations for the `/v2` statistics."""


class IsolatedVersion(DrainingLane, Protocol):
    """A version in worker processes. `lend` passes requests to the workers, and `submit` refuses calls.

    Attributes:
        metrics: The sums of the metrics of all workers.
    """

    metrics: LaneMetrics

    @property
    def trial(self) -> TrialRunner | None:
        """The trial in which this version is the candidate, or None."""

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let a worker answer the current request of `connection`. Return False if no worker can.

        `is_default` states whether the request names no version.
        """

    def refuse(self) -> EdgekitError:
        """Count a request that no worker can answer now, and return the error for the client."""

    def to_json(self) -> Mapping[str, JsonValue]:
        """Return the statistics of the first worker, or {} before its first report."""

    def close(self) -> None:
        """End the worker processes. This may be called on any thread."""
