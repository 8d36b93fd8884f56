"""One version of a model whose sessions are in worker processes, as the rest of the service sees it.

As a lane it answers what reaches the service itself while no worker can take it. Requests reach a worker
without passing through here: see `worker_handle`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import Call, Lane
from edgekit_runtime.service.workers.metric_sums import Tally

if TYPE_CHECKING:
    from edgekit_runtime.service.workers.process_group import IsolatedModel
    from edgekit_runtime.service.workers.remote_trial import IsolatedTrial


class IsolatedLane(Lane):
    """Stands for a version; all of it on the thread of the loop but `close`.

    Attributes:
        processes: that serve it.
        manifest: of the version.
        tally: what is counted of it.
        trial: in which it is the candidate, until that begins; or None.
    """

    __slots__ = ("manifest", "processes", "tally", "trial")

    def __init__(self, processes: "IsolatedModel", manifest: Manifest) -> None:
        self.processes = processes
        self.manifest = manifest
        self.tally = Tally()
        self.trial: IsolatedTrial | None = None

    def close(self) -> None:
        """Free it; from any thread."""
        self.processes.close(self)

    def count_into(self, metrics: LaneMetrics) -> None:
        """Keep the sums over all workers in `metrics` from now on."""
        self.tally.count_into(metrics)

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let a worker answer the present request of `connection`; see `Worker.lend`."""
        return self.processes.lend(connection, is_default=is_default)

    def submit(self, call: Call) -> None:
        """Answer that the model cannot be asked now."""
        self.tally.refuse()
        call.reply(self.processes.explain())

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way in any of its workers, whichever version it is for."""
        return self.processes.is_idle

    def drain(self, done: Callable[[], None]) -> None:
        """Serve no more, and call `done` once all that was taken is answered."""
        self.processes.drain(self, done)

    def to_json(self) -> dict[str, JsonValue]:
        """Return what its worker says of it, for `/v2` statistics."""
        return self.processes.say(self.tally)
