"""A version on trial in the worker of the version in use; the worker judges it, the service decides."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, Protocol, TypeVar

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, UnavailableError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.options.rollout import Gates
from edgekit_runtime.service.rollout.gates import Arm, Promote, Rollback, may_be_promoted
from edgekit_runtime.service.serving.remote import RemoteTrial
from edgekit_runtime.service.worker_wire.channel import ChannelError, Passed
from edgekit_runtime.service.worker_wire.messages import TrialMessage, VerifiedPackage
from edgekit_runtime.service.workers.worker_handle import WorkerHandle

_RETRY_AFTER_S: Final = 1.0

_logger = logging.getLogger(__name__)


class Candidate(Passed, Protocol):
    """The version on trial; it is passed to the worker as the descriptor of its package."""

    manifest: Manifest


CandidateT = TypeVar("CandidateT", bound=Candidate)


class TrialHost(Protocol):
    """The version in use, in whose worker another one is tried."""

    def promote(self, trial: "WorkerTrial[Any]") -> bool:
        """Go on with the candidate alone; returns False if its worker is lost."""

    def drop(self, trial: "WorkerTrial[Any]") -> None:
        """End the trial without the candidate."""


class WorkerTrial(RemoteTrial, Generic[CandidateT]):
    """One candidate in the worker of the version in use; it ends with that worker.

    Attributes:
        model: the candidate.
        deadline_s: until when it must be open, on the clock of the loop.
        has_begun: whether `begin` was called.
        is_open: whether the candidate is loaded and gets calls.
        worker: the worker that tries it, or None as long as none was ready.
    """

    __slots__ = (
        *("_found", "_gates", "_host", "_opened", "_report", "_verdict"),
        *("deadline_s", "has_begun", "is_open", "model", "worker"),
    )

    def __init__(
        self,
        model: CandidateT,
        host: TrialHost,
        opened: "Future[CandidateT]",
        gates: Gates,
        deadline_s: float,
    ) -> None:
        """Prepare the trial; `start` begins it.

        Args:
            model: the candidate.
            host: the version in use.
            opened: gets `model` once it is open, or why it cannot be tried.
            gates: the gates that a promotion must agree with.
            deadline_s: see the attribute.
        """
        self.model, self._host, self._opened, self._gates = model, host, opened, gates
        self.deadline_s = deadline_s
        self.is_open = self.has_begun = False
        self.worker: WorkerHandle | None = None
        self._found: dict[str, JsonValue] = {}
        self._verdict: Promote | Rollback | None = None
        self._report: Callable[[Any], None] | None = None

    @property
    def version(self) -> str:
        """Version of the candidate."""
        return self.model.manifest.version

    def start(self, worker: WorkerHandle) -> None:
        """Make `worker` load and try the candidate; give the trial up if the message cannot be sent."""
        try:
            worker.start_trial(VerifiedPackage(self.version, self.model.manifest.sha256), self.model)
        except Exception as cause:  # the thread that loads all models waits for an outcome
            _logger.exception("%s: cannot send its worker the version to try", self.model.manifest.name)
            self.give_up(repr(cause))
            self.end()
        else:
            self.worker = worker

    def add_rollout(self, found: dict[str, JsonValue] | None) -> None:
        """Store the worker's figures on the rollout, if it sent any."""
        self._found = found or self._found

    def handle_message(self, message: TrialMessage) -> None:
        """Act on what the worker reports of the candidate.

        Raises:
            ChannelError: it makes no sense now.
        """
        outcome, is_open = message.outcome, self.is_open
        if outcome == "refused" and not is_open:
            self._fail(BackendError(message.reason))
        elif outcome == "unavailable" and not is_open:
            self._fail(UnavailableError(message.reason, _RETRY_AFTER_S))
        elif outcome == "tried" and not is_open and self._found:
            self.is_open = True
            if not set_outcome(self._opened, self.model):
                self.end()  # no thread waits for it any more
        elif outcome == "promote" and is_open and not self._may_be_promoted():
            raise ChannelError(
                f"it promotes version {message.version} against its own counts: {self._found}"[:300]
            )
        elif outcome in ("promote", "rollback") and is_open and self._verdict is None:
            self._decide(Promote() if outcome == "promote" else Rollback(message.gate, message.reason))
        else:
            raise ChannelError(f"it sent {outcome!r} of version {message.version} at the wrong time")

    def give_up(self, reason: str) -> None:
        """Report that the candidate cannot be tried now, which says nothing of it."""
        text = f"{self.model.manifest.name} {self.version} cannot be tried now: {reason}; load it again later"
        self._fail(UnavailableError(text, _RETRY_AFTER_S))

    def crash(self, reason: str) -> None:
        """Blame the candidate for the end of the worker: the version in use has served without it."""
        name = self.model.manifest.name
        _logger.error("%s: its worker is lost with %s: %s", name, self.version, reason)
        if not self.is_open:
            self._fail(BackendError(f"{name} {self.version}, in its worker: {reason}"))
        else:  # also if it was to be promoted: it has not been yet
            self._decide(Rollback("crash", f"the process in which it was tried is lost: {reason}"))

    def stop(self) -> None:
        """Report nothing any more."""
        self._opened.cancel()
        self._report = None

    # As a `RemoteTrial`

    def begin(self, report: Callable[[Any], None]) -> None:
        """Pass the verdict to `report`, at once if it has fallen already."""
        self.has_begun = True
        if self._verdict is None:
            self._report = report
        else:
            report(self._verdict)

    def look(self) -> None:
        """Do nothing: the worker judges by itself."""

    def add_energy(self, candidate_j: float, current_j: float) -> None:
        """Send the worker the energy of a request to each version, in joules."""
        if self.worker is not None:
            self.worker.send_energy(candidate_j, current_j)

    def to_json(self) -> dict[str, JsonValue]:
        """Return what the worker sent last."""
        return self._found

    def take_over(self) -> bool:
        """Go on with the candidate alone; returns False if it is lost, which is reported, too."""
        return self._host.promote(self)

    def end(self) -> None:
        """End the trial without the candidate."""
        self._host.drop(self)

    def _fail(self, error: EdgekitError) -> None:
        set_outcome(self._opened, error)

    def _may_be_promoted(self) -> bool:
        """Return whether the counts that the worker sent allow a promotion."""
        arms: dict[str, Any] = self._found
        current, candidate = (Arm(arms[name]["answers"], arms[name]["failed"]) for name in _ARMS)
        return may_be_promoted(current, candidate, self._gates)

    def _decide(self, verdict: Promote | Rollback) -> None:
        self._verdict = verdict
        if self._report is not None:
            self._report(verdict)


_ARMS: Final = ("current", "candidate")


def set_outcome(opened: "Future[CandidateT]", outcome: CandidateT | EdgekitError) -> bool:
    """Pass a version, or why it cannot be opened, to the thread that waits; returns whether one waits."""
    if not opened.set_running_or_notify_cancel():
        return False
    if isinstance(outcome, EdgekitError):
        opened.set_exception(outcome)
    else:
        opened.set_result(outcome)
    return True
