"""A version that a worker tries beside the one in use, as the service knows it, which alone settles it."""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, UnavailableError
from edgekit_runtime.service.options.rollout import Gates
from edgekit_runtime.service.rollout.gates import Arm, Promote, Rollback, may_be_promoted
from edgekit_runtime.service.worker_wire.channel import ChannelError
from edgekit_runtime.service.worker_wire.messages import Given, TrialWord
from edgekit_runtime.service.worker_wire.snapshots import Snapshot
from edgekit_runtime.service.workers.remote_model import IsolatedLane
from edgekit_runtime.service.workers.worker_handle import Worker

Report: TypeAlias = Callable[[Promote | Rollback], None]

_RETRY_AFTER_S: Final = 1.0

_logger = logging.getLogger(__name__)


class IsolatedTrial:
    """One candidate in the worker of the version in use; it ends with that worker.

    Attributes:
        lane: stands for the candidate.
        given: its package.
        package: descriptor of that; owned by this until `close`.
        opened: gets `lane` once the trial has begun, or why it has not.
        is_open: whether the candidate is loaded and gets calls.
        worker: that was asked to try it, or None so far.
    """

    __slots__ = (
        *("_found", "_gates", "_report", "_timer", "_verdict"),
        *("given", "is_open", "lane", "opened", "package", "worker"),
    )

    def __init__(
        self, lane: IsolatedLane, given: Given, package: int, opened: "Future[IsolatedLane]", gates: Gates
    ) -> None:
        self.lane, self.given, self.package, self.opened = lane, given, package, opened
        self._gates = gates
        self.is_open = False
        self._timer: asyncio.TimerHandle | None = None
        self.worker: Worker | None = None
        self._found: dict[str, JsonValue] = {}
        self._verdict: Promote | Rollback | None = None
        self._report: Report | None = None

    def limit(
        self, loop: asyncio.AbstractEventLoop, limit_s: float, late: "Callable[[IsolatedTrial], None]"
    ) -> None:
        """Call `late` unless the candidate gets calls, or is given up, within `limit_s`."""
        self._timer = loop.call_later(limit_s, late, self)

    def ask(self, worker: Worker) -> None:
        """Let `worker` load the candidate and try it, or refuse where it cannot even be asked."""
        try:
            worker.try_beside(self.given, self)
        except Exception as cause:  # the thread that loads all models waits for a word
            name = self.lane.manifest.name
            _logger.exception("%s: its worker cannot be asked to try a version", name)
            text = f"{name} {self.given.version} cannot be tried now: {cause!r}; load it again later"
            self.refuse(UnavailableError(text, _RETRY_AFTER_S))
            self.end()
        else:
            self.worker = worker

    def fileno(self) -> int:
        """Return the descriptor of the package, or -1 where this is closed or has given it away."""
        return self.package

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
            self.refuse(BackendError(word.reason))
        elif word.outcome == "lacking" and not self.is_open:
            self.refuse(UnavailableError(word.reason, _RETRY_AFTER_S))
        elif word.outcome == "tried" and not self.is_open and self._found:
            self._open()
        elif word.outcome == "promote" and self.is_open and not self._is_promising():
            raise ChannelError(
                f"it promotes version {word.version} against its own counts: {self._found}"[:300]
            )
        elif word.outcome in ("promote", "rollback") and self.is_open and self._verdict is None:
            self._tell(Promote() if word.outcome == "promote" else Rollback(word.gate, word.reason))
        else:
            raise ChannelError(f"it said {word.outcome!r} of version {word.version} at the wrong time")

    def refuse(self, error: EdgekitError) -> None:
        """Tell who waits for the candidate why it gets no calls."""
        if self.opened.set_running_or_notify_cancel():
            self.opened.set_exception(error)

    def crash(self, reason: str) -> None:
        """Lay the end of the worker on the candidate: the version in use has proved itself without it.

        It is closed then.
        """
        manifest = self.lane.manifest
        _logger.error("%s: its worker is lost with %s: %s", manifest.name, manifest.version, reason)
        if not self.is_open:
            self.refuse(BackendError(f"{manifest.name} {manifest.version}, in its worker: {reason}"))
        else:  # also where it was to take over: it has not yet
            self._tell(Rollback("crash", f"the process in which it was tried is lost: {reason}"))
        self.close()

    def close(self) -> None:
        """Free what this owns; nothing is heard of it any more."""
        self.opened.cancel()
        self._report = None
        self._end_limit()
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

    def _open(self) -> None:
        self.is_open = True
        self._end_limit()
        if self.opened.set_running_or_notify_cancel():
            self.opened.set_result(self.lane)
        else:
            self.end()  # nobody waits for it any more

    def _end_limit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_promising(self) -> bool:
        """Whether what the worker itself said allows that it promotes the candidate."""
        return may_be_promoted(self._find_arm("current"), self._find_arm("candidate"), self._gates)

    def _find_arm(self, name: str) -> Arm:
        counts: Any = self._found[name]
        return Arm(counts["answers"], counts["failed"])

    def _tell(self, verdict: Promote | Rollback) -> None:
        self._verdict = verdict
        if self._report is not None:
            self._report(verdict)
