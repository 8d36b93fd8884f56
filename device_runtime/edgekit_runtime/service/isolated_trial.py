"""A version that a worker tries beside the one in use, as the service knows it, which alone settles it."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.errors import BackendError
from edgekit_runtime.service.canary import Promote, Rollback
from edgekit_runtime.service.channel import ChannelError
from edgekit_runtime.service.isolated_lane import IsolatedLane
from edgekit_runtime.service.orders import Given, TrialWord
from edgekit_runtime.service.snapshots import Snapshot
from edgekit_runtime.service.worker_process import Worker

Report: TypeAlias = Callable[[Promote | Rollback], None]


class IsolatedTrial:
    """One candidate in the worker of the version in use; it ends with that worker.

    Attributes:
        lane: stands for the candidate.
        given: its package.
        package: descriptor of that; owned by this until `close`.
        opened: gets `lane` once the trial has begun, or why it has not.
        worker: that was asked to try it, or None so far.
    """

    __slots__ = ("_found", "_report", "_verdict", "given", "lane", "opened", "package", "worker")

    def __init__(
        self, lane: IsolatedLane, given: Given, package: int, opened: "Future[IsolatedLane]"
    ) -> None:
        self.lane, self.given, self.package, self.opened = lane, given, package, opened
        self.worker: Worker | None = None
        self._found: dict[str, JsonValue] = {}
        self._verdict: Promote | Rollback | None = None
        self._report: Report | None = None

    @property
    def is_open(self) -> bool:
        """Whether the candidate is loaded and gets calls."""
        return self.opened.done()

    def ask(self, worker: Worker) -> None:
        """Let `worker` load the candidate and try it."""
        self.worker = worker
        worker.try_beside(self.given, self.package)

    def take(self, snapshot: Snapshot) -> None:
        """Take in what the worker knows of the candidate."""
        self.lane.tally.take(self.worker, snapshot)
        self._found = snapshot.rollout or self._found

    def hear(self, word: TrialWord) -> None:
        """Take in what the worker says of the candidate.

        Raises:
            ChannelError: it makes no sense now.
        """
        if word.outcome == "refused" and not self.is_open:
            self.opened.set_exception(BackendError(word.reason))
        elif word.outcome == "tried" and not self.is_open and self._found:
            self.opened.set_result(self.lane)
        elif word.outcome in ("promote", "rollback") and self.is_open and self._verdict is None:
            self._tell(Promote() if word.outcome == "promote" else Rollback(word.gate, word.reason))
        else:
            raise ChannelError(f"it said {word.outcome!r} of version {word.version} at the wrong time")

    def crash(self, reason: str) -> None:
        """Lay the end of the worker on the candidate: the version in use has proved itself without it."""
        if not self.is_open:
            manifest = self.lane.manifest
            self.opened.set_exception(
                BackendError(f"{manifest.name} {manifest.version}, in its worker: {reason}")
            )
        else:  # also where it was to take over: it has not yet
            self._tell(Rollback("crash", f"the process in which it was tried is lost: {reason}"))

    def close(self) -> None:
        """Free what this owns; nothing is heard of it any more."""
        self.opened.cancel()
        self._report = None
        if self.package >= 0:
            os.close(self.package)
            self.package = -1

    # As `Trial` sees it

    def begin(self, report: Report) -> None:
        """Let `report` have the verdict, which may be there already."""
        self.lane.trial = None  # which would be a cycle
        if self._verdict is None:
            self._report = report
        else:
            report(self._verdict)

    def look(self) -> None:
        """Nothing: the worker looks itself."""

    def add_energy(self, candidate_j: float, current_j: float) -> None:
        """Tell the worker what a request took; see `Watch.add_energy`."""
        if self.worker is not None:
            self.worker.tell_energy(candidate_j, current_j)

    def to_json(self) -> dict[str, JsonValue]:
        """Return what the worker said last."""
        return self._found

    def take_over(self) -> bool:
        """Go on with the candidate alone; returns False where it is lost, of which `report` hears too."""
        return self.lane.processes.promote(self.lane)

    def end(self) -> None:
        """Let the worker try it no more."""
        self.lane.processes.drop(self.lane)

    def _tell(self, verdict: Promote | Rollback) -> None:
        self._verdict = verdict
        if self._report is not None:
            self._report(verdict)
