"""One version of a model in worker processes, as the rest of the service uses it.

Requests reach a worker together with their connection and do not pass through here: see `worker_handle`.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import EdgekitError, UnavailableError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import Call
from edgekit_runtime.service.serving.remote import RemoteTrial, RemoteVersion
from edgekit_runtime.service.worker_wire.messages import VerifiedPackage
from edgekit_runtime.service.worker_wire.snapshots import Snapshot, add_up


class Processes(Protocol):
    """The processes of a model, as its versions use them; all but `close` on the thread of the loop."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way in any of them."""

    def find_first_ready(self) -> object | None:
        """Return the worker that has been ready for the longest time, or None."""

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let a worker answer the present request of `connection`; returns whether one does."""

    def explain(self) -> UnavailableError:
        """Return why no worker can take a call now."""

    def drain(self, model: "RemoteModel", done: Callable[[], None]) -> None:
        """Stop lending if `model` is in use; call `done` once all connections have come back."""

    def close(self, model: "RemoteModel") -> None:
        """End all processes if `model` is in use; from any thread."""


class RemoteModel(RemoteVersion):
    """A version in the processes of its model; on the thread of the loop but for `close`.

    Attributes:
        manifest: of the version.
        trial: the trial in which it is the candidate, until that begins; or None.
    """

    __slots__ = ("_metrics", "_package", "_past", "_processes", "_snapshots", "manifest", "trial")

    def __init__(self, processes: Processes, manifest: Manifest, package: int = -1) -> None:
        """Make it.

        Args:
            processes: that run it.
            manifest: of the version.
            package: descriptor of its file, owned by this; or -1 if no worker is to open it.
        """
        self._processes, self._package = processes, package
        self.manifest = manifest
        self.trial: RemoteTrial | None = None
        self._metrics: LaneMetrics | None = None
        self._past = LaneMetrics("", "")  # of workers that have ended, and of calls that none could take
        self._snapshots: dict[object, Snapshot] = {}  # by worker

    @property
    def verified(self) -> VerifiedPackage:
        """What a worker is to find in the package."""
        return VerifiedPackage(self.manifest.version, self.manifest.sha256)

    def fileno(self) -> int:
        """Return the descriptor of the package, or -1 once it is closed."""
        return self._package

    def close_package(self) -> None:
        """Close the package: no further worker opens it. A second call does nothing."""
        if self._package >= 0:
            os.close(self._package)
            self._package = -1

    def add_snapshot(self, worker: object, snapshot: Snapshot) -> None:
        """Replace what is known of `worker`, which counts since its start."""
        self._snapshots[worker] = snapshot
        self._add_up()

    def remove_worker(self, worker: object) -> None:
        """Keep the counts of a worker that has ended, and nothing else of it."""
        ended = self._snapshots.pop(worker, None)
        if ended is not None:
            total = LaneMetrics("", "")
            add_up(total, [self._past, ended.counted])
            self._past = total

    def _add_up(self) -> None:
        if self._metrics is not None:
            add_up(self._metrics, [self._past, *(one.counted for one in self._snapshots.values())])

    # As a version

    def close(self) -> None:
        """End the processes if this is the version in use; from any thread."""
        self._processes.close(self)

    def count_into(self, metrics: LaneMetrics) -> None:
        """Keep the sums over all workers in `metrics` from now on."""
        self._metrics = metrics
        self._add_up()

    def to_json(self) -> dict[str, JsonValue]:
        """Return the statistics of the first worker beyond its counts; empty before it has sent any."""
        snapshot = self._snapshots.get(self._processes.find_first_ready())
        return {} if snapshot is None else snapshot.details

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let a worker answer the present request of `connection`; see `WorkerHandle.lend`."""
        return self._processes.lend(connection, is_default=is_default)

    def submit(self, call: Call) -> None:
        """Answer that no worker can take the call now."""
        self._past.refused += 1
        self._add_up()
        call.reply(self._processes.explain())

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way in any of its workers, whichever version it is for."""
        return self._processes.is_idle

    def drain(self, done: Callable[[], None]) -> None:
        """Stop serving, and call `done` once all requests under way are answered."""
        self._processes.drain(self, done)


def set_outcome(opened: "Future[RemoteModel]", outcome: RemoteModel | EdgekitError) -> bool:
    """Pass a model, or why it cannot be opened, to the thread that waits; returns whether one waits."""
    if not opened.set_running_or_notify_cancel():
        return False
    if isinstance(outcome, RemoteModel):
        opened.set_result(outcome)
    else:
        opened.set_exception(outcome)
    return True
