"""Starts, monitors, restarts and ends the worker processes of a version of an isolated model.

Requests do not pass through this module. A worker receives their connection, see `worker_handle`.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, UnavailableError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.rollout.gates import Arm, Promote, Rollback, may_be_promoted
from edgekit_runtime.service.scheduling.call import Call
from edgekit_runtime.service.serving.remote import IsolatedVersion, TrialRunner
from edgekit_runtime.service.worker_wire.channel import ChannelError, Kind
from edgekit_runtime.service.worker_wire.messages import (
    ENERGY,
    HEARTBEAT_S,
    TrialReport,
    WorkerSpec,
)
from edgekit_runtime.service.worker_wire.snapshots import Snapshot, add_up, read_snapshots
from edgekit_runtime.service.workers.restart_policy import End, RestartPolicy
from edgekit_runtime.service.workers.worker_handle import WorkerHandle

_RESTART_S: Final = 1.0  # about how long a start takes, for `Retry-After`
_DRAIN_POLL_S: Final = 0.01
_EVENTS: Final = {
    End.UNAVAILABLE: "its process cannot be started",
    End.TRAP: "a request ended its worker",
}

_logger = logging.getLogger(__name__)


class IsolatedModel(IsolatedVersion):
    """A version in worker processes. Use it on the event loop, except for `close`.

    A version on trial has no workers of its own. It runs in a worker of the version in use, which is called
    its host. After a promotion, that worker belongs to the new version.

    Attributes:
        opened: A future that is done when a worker is ready, or when the trial of this version has started.
            If opening fails, the future gets the error. `end` cancels the future.
        hosted: The trial of another version in a worker of this version, or None.
        workers: The workers that are starting or running. Ready workers are in the order of becoming ready.
        restarts: How often a worker was restarted after it was lost.
    """

    def __init__(
        self,
        http: HttpServer,
        regions: Regions,
        manifest: Manifest,
        spec: WorkerSpec,
        *,
        package: int,
        report_crash: Callable[..., None],
    ) -> None:
        """Create a version without workers. Call `begin` or `begin_trial` next.

        `package` is the file descriptor of the package, which this object owns. `report_crash` is
        `Registry.report_crash`.
        """
        self._http, self._regions, self.manifest, self.spec = http, regions, manifest, spec
        self._package, self._report_crash = package, report_crash
        self._loop = http.loop
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self._trial: WorkerTrialRunner | None = None
        self.hosted: WorkerTrialRunner | None = None
        self.workers: list[WorkerHandle] = []
        self.restarts = 0
        self._policy = RestartPolicy(spec.isolation)
        self._restart_s = 0.0  # when the next start may be, on the clock of the loop
        self._is_draining = self._is_ended = False
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._check_heartbeats)
        self.metrics = LaneMetrics(manifest.name, manifest.version)
        self._past = LaneMetrics("", "")  # of workers that have ended, and of calls that none could take
        self._snapshots: dict[WorkerHandle, Snapshot] = {}

    @property
    def ready(self) -> list[WorkerHandle]:
        """The workers that have loaded the model. For a version on trial, the workers of its host.

        Only the first `isolation.processes` workers get requests. The standby worker is the last one.
        """
        workers = self.workers if self._trial is None else self._trial.host.workers
        return [worker for worker in workers if worker.is_ready]

    @property
    def is_in_use(self) -> bool:
        """Whether the version uses its own workers, because it is neither on trial nor ended."""
        return self._trial is None and not self._is_ended

    @property
    def is_over(self) -> bool:
        """Whether `end` was called and all worker processes have ended."""
        return self._is_ended and not self.workers

    def fileno(self) -> int:
        """Return the file descriptor of the package, or -1 if it is closed."""
        return self._package

    def begin(self) -> None:
        """Start a worker. The owner calls this once. Further workers are started automatically.

        A failed start is retried later. If the restart policy gives up, `opened` gets an error.
        """
        try:
            worker = WorkerHandle(self._http, self, self.spec, self._package)
        except (OSError, MemoryError, ImportError) as cause:
            self._restart(End.UNAVAILABLE, repr(cause))
            return
        self.workers.append(worker)
        for region in self._regions:
            worker.add_region(region)

    def begin_trial(self, host: "IsolatedModel") -> None:
        """Start a trial of this version in a worker of `host` as soon as one is ready.

        If `host` is being unloaded, end this version instead.
        """
        if host._is_draining:
            self.end()
            return
        self._trial = host.hosted = WorkerTrialRunner(self, host)
        if ready := host.ready:
            self._trial.start(ready[0])

    def fail(self, error: EdgekitError) -> None:
        """End all processes of the version. If `opened` is not done, it gets `error`."""
        if not self.opened.done():
            self.opened.set_exception(error)
        self.end()

    def end(self) -> None:
        """Kill all processes and close the package. Lent connections are returned."""
        if self._is_ended:
            return
        if self.hosted is not None:
            self.drop(self.hosted)
        self._is_draining = self._is_ended = True
        self._heartbeat.cancel()
        self.opened.cancel()
        for worker in self.workers:
            worker.kill("")
        os.close(self._package)
        self._package = -1

    # As a `IsolatedVersion`

    @property
    def trial(self) -> "WorkerTrialRunner | None":
        return self._trial

    @property
    def is_idle(self) -> bool:
        """Whether no request is running in the workers of this version."""
        return all(worker.is_idle for worker in self.ready)

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let the worker with the fewest connections answer the current request of `connection`.

        `is_default` states whether the request names no version.

        Returns:
            True if a worker accepted the connection.
        """
        answering = [] if self._is_draining else self.ready[: self.spec.isolation.processes]
        return any(
            worker.lend(connection, is_default=is_default)
            for worker in sorted(answering, key=attrgetter("lent"))
        )

    def submit(self, call: Call) -> None:
        """Refuse `call`, because calls in this process do not reach the workers."""
        call.reply(self.refuse())

    def refuse(self) -> UnavailableError:
        """Count a request that no worker can answer now, and return the error for the client."""
        self._past.refused += 1
        self._add_up()
        if self.ready and not self._is_draining:
            text, left_s = "its process takes no more connections", 0.0
        else:
            text = "its process ended and is being started again"
            left_s = max(0.0, self._restart_s - self._loop.time())
        return UnavailableError(f"{self.manifest.name}: {text}", _RESTART_S + left_s)

    def drain(self, done: Callable[[], None]) -> None:
        """Lend no more connections, ask the workers to return all connections, and then call `done`.

        `done` is called after at most `drain_timeout_s`, possibly before this method returns. A hosted trial
        is ended. A version that is not open yet is ended at once.
        """
        if not self.opened.done():
            self.end()
        if self.hosted is not None:
            self.drop(self.hosted)
        self._is_draining = True
        for worker in self.workers:
            worker.channel.send(Kind.MAIN_RETIRE)
        self._await_returns(done, self._loop.time() + self.spec.config.inference.drain_timeout_s)

    def close(self) -> None:
        """Schedule the end of all processes without waiting. This may be called on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, after `Supervisor.close`
            self._loop.call_soon_threadsafe(self.end)

    def to_json(self) -> dict[str, JsonValue]:
        """Return the statistics of the first worker without its counts.

        The result is empty before the first report of the worker.
        """
        snapshot = self._snapshots.get(self.ready[0]) if self.ready else None
        return {} if snapshot is None else snapshot.details

    # As the owner of its workers

    def on_ready(self, worker: WorkerHandle) -> None:
        """Use a worker that has loaded its model, and start another worker if one is missing."""
        self.workers.remove(worker)
        self.workers.append(worker)  # behind those that were ready before
        self._policy.note_ready()
        if self.hosted is not None and self.hosted.worker is None:
            self.hosted.start(worker)
        if not self.opened.done():
            self.opened.set_result(None)
        self._fill()

    def on_snapshots(self, worker: WorkerHandle, payload: bytes) -> None:
        """Store the reports of a worker on this version and on a candidate in the same worker."""
        trial = self.hosted
        for version, snapshot in read_snapshots(payload).items():
            if version == self.manifest.version:
                self.add_snapshot(worker, snapshot)
            elif trial is not None and trial.worker is worker and trial.version == version:
                trial.figures = snapshot.rollout or trial.figures
                trial.model.add_snapshot(worker, snapshot)

    def on_trial_message(self, worker: WorkerHandle, message: TrialReport) -> None:
        """Handle the report of a worker on a trial, unless the trial has ended.

        Raises:
            ChannelError: The report is not allowed at this time.
        """
        trial = self.hosted
        if trial is not None and trial.worker is worker and trial.version == message.version:
            trial.handle_message(message)

    def on_end(self, worker: WorkerHandle, end: End, reason: str) -> None:
        """Remove an ended worker, roll back its candidate, and start a new worker if required."""
        ended = self._snapshots.pop(worker, None)
        if ended is not None:
            total = LaneMetrics("", "")
            add_up(total, [self._past, ended.counted])
            self._past = total
        self.workers.remove(worker)
        if self._is_draining:
            return
        self.restarts += 1
        trial = self.hosted
        if trial is not None and trial.worker is worker:
            trial.crash(reason)
            end = End.TRIAL
        self._restart(end, reason, worker.ready_for_s)

    # As the host of a trial

    def promote(self, trial: "WorkerTrialRunner") -> bool:
        """Put the candidate in use and end all other workers. Return False if the trial has ended."""
        if self.hosted is not trial or trial.worker is None:
            return False
        self.hosted = trial.report = None
        trial.worker.end_trial(trial.version, is_promoted=True)
        self.workers.remove(trial.worker)
        trial.model._take_over(trial.worker, self)
        self.end()  # also the other workers, which have the old version
        return True

    def drop(self, trial: "WorkerTrialRunner") -> None:
        """End the trial and unload the candidate, unless the trial has already ended."""
        if self.hosted is not trial:
            return
        if trial.worker is not None:
            trial.worker.end_trial(trial.version, is_promoted=False)
        self.end_trial(trial)

    def end_trial(self, trial: "WorkerTrialRunner") -> None:
        """End the trial and the candidate. The worker is not notified."""
        self.hosted = trial.report = None
        trial.model.end()

    def add_snapshot(self, worker: WorkerHandle, snapshot: Snapshot) -> None:
        """Replace the counts of `worker`, which are totals since its start."""
        self._snapshots[worker] = snapshot
        self._add_up()

    # Starts

    def _take_over(self, worker: WorkerHandle, host: "IsolatedModel") -> None:
        self._trial = None
        self._policy, self.restarts = host._policy, host.restarts
        self.workers, worker.owner = [worker], self
        self._fill()

    def _restart(self, end: End, reason: str, ready_for_s: float = 0.0) -> None:
        decision = self._policy.decide(end, ready_for_s)
        description = f"{self.manifest.name} {self.manifest.version}"
        if decision.fails_load:
            text = f"{description}, in its worker: {reason}"
            error: EdgekitError = BackendError(text)
            if end is End.UNAVAILABLE:
                error = UnavailableError(f"{text}; load it again later", _RESTART_S)
            self.fail(error)
            return
        if end is not End.TRIAL:
            _logger.error("%s: %s: %s", description, _EVENTS.get(end, "its worker is lost"), reason)
        if end in (End.CRASH, End.REFUSED) and self._policy.has_started:
            name, version = self.manifest.name, self.manifest.version
            self._report_crash(name, version, reason, is_loop=decision.is_loop)
        if not self._is_draining:
            self._restart_s = self._loop.time() + decision.delay_s
            self._loop.call_later(decision.delay_s, self._fill)

    def _fill(self) -> None:
        """Start a worker if one is missing and may start now."""
        isolation = self.spec.isolation
        worker_count = isolation.processes + isolation.standby if self._policy.has_started else 1
        is_waiting = self._restart_s > self._loop.time() + 1e-3
        if len(self.workers) < worker_count and not self._is_draining and not is_waiting:
            self.begin()

    def _await_returns(self, done: Callable[[], None], end_s: float) -> None:
        is_late = self._loop.time() > end_s
        if is_late:
            _logger.warning("connections of a worker did not come back in time")
        if is_late or not any(worker.lent for worker in self.workers):
            done()
            return
        self._loop.call_later(_DRAIN_POLL_S, self._await_returns, done, end_s)

    def _check_heartbeats(self) -> None:
        """End workers that hang, and a trial that has not started in time."""
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._check_heartbeats)
        for worker in self.workers:
            worker.check_heartbeat()
        trial = self.hosted
        if trial is None or trial.model.opened.done() or self._loop.time() < trial.deadline_s:
            return
        if trial.worker is not None:
            trial.worker.kill(f"it did not load version {trial.version} in time")
        else:
            trial.give_up("no process of the version in use is ready")

    def _add_up(self) -> None:
        add_up(self.metrics, [self._past, *(snapshot.counted for snapshot in self._snapshots.values())])


class WorkerTrialRunner(TrialRunner):
    """A trial of a candidate in a worker of the version in use. If the worker ends, the trial ends too.

    The worker reports a verdict, and the service checks the verdict.

    Attributes:
        host: The version in use.
        deadline_s: The latest time to open the candidate, on the clock of the event loop.
        worker: The worker that runs the candidate, or None until a worker is ready.
        figures: The statistics of the rollout in the worker. Empty before the first report.
        report: Called with the verdict. None before `begin` and after the trial.
    """

    def __init__(self, model: IsolatedModel, host: IsolatedModel) -> None:
        self.model, self.host = model, host
        self.deadline_s = asyncio.get_running_loop().time() + model.spec.isolation.start_timeout_s
        self.worker: WorkerHandle | None = None
        self.figures: dict[str, JsonValue] = {}
        self.report: Callable[[Any], None] | None = None
        self._verdict: Promote | Rollback | None = None

    @property
    def version(self) -> str:
        return self.model.manifest.version

    def start(self, worker: WorkerHandle) -> None:
        """Tell `worker` to start the trial. If the message cannot be sent, give up the trial."""
        try:
            worker.start_trial(self.model.spec.package, self.model)
        except Exception as cause:  # the thread that loads all models waits for an outcome
            _logger.exception("%s: cannot send its worker the version to try", self.model.manifest.name)
            self.give_up(repr(cause))
        else:
            self.worker = worker

    def handle_message(self, message: TrialReport) -> None:
        """Handle a report of the worker on the candidate.

        Raises:
            ChannelError: The report is not allowed at this time, or its verdict contradicts the worker's
                counts.
        """
        outcome, is_open = message.outcome, self.model.opened.done()
        if outcome == "refused" and not is_open:
            self._fail(BackendError(message.reason))
        elif outcome == "unavailable" and not is_open:
            self._fail(UnavailableError(message.reason, _RESTART_S))
        elif outcome == "tried" and not is_open and self.figures:
            self.model.opened.set_result(None)
        elif outcome == "promote" and is_open and not self._may_be_promoted():
            raise ChannelError(
                f"it promotes version {message.version} against its own counts: {self.figures}"[:300]
            )
        elif outcome in ("promote", "rollback") and is_open and self._verdict is None:
            self._decide(Promote() if outcome == "promote" else Rollback(message.gate, message.reason))
        else:
            raise ChannelError(f"it sent {outcome!r} of version {message.version} at the wrong time")

    def give_up(self, reason: str) -> None:
        """End the trial because the candidate cannot be tried now. This does not count against it."""
        text = f"{self.model.manifest.name} {self.version} cannot be tried now: {reason}; load it again later"
        self._fail(UnavailableError(text, _RESTART_S))

    def crash(self, reason: str) -> None:
        """Roll back the candidate because its worker crashed during the trial."""
        name = self.model.manifest.name
        _logger.error("%s: its worker is lost with %s: %s", name, self.version, reason)
        if self.model.opened.done():  # also if it was to be promoted: it has not been yet
            self._decide(Rollback("crash", f"the process in which it was tried is lost: {reason}"))
            self.host.end_trial(self)
        else:
            self._fail(BackendError(f"{name} {self.version}, in its worker: {reason}"))

    # As a `TrialRunner`

    def begin(self, report: Callable[[Any], None]) -> None:
        """Call `report` with the verdict when it is known, possibly at once."""
        if self._verdict is None:
            self.report = report
        else:
            report(self._verdict)

    def look(self) -> None:
        """Do nothing, because the worker judges the candidate."""

    def add_energy(self, candidate_j: float, current_j: float) -> None:
        """Send the energy per request of each version in joules to the worker."""
        if self.worker is not None:
            self.worker.channel.send(Kind.MAIN_ENERGY, ENERGY.pack(candidate_j, current_j))

    def to_json(self) -> dict[str, JsonValue]:
        """Return the worker's latest `Trial.to_json`, or {} before its first report."""
        return self.figures

    def take_over(self) -> bool:
        """Replace the version in use with the candidate.

        Return False if the trial has already ended, for example because its worker crashed.
        """
        return self.host.promote(self)

    def end(self) -> None:
        """End the trial and unload the candidate."""
        self.host.drop(self)

    def _fail(self, error: EdgekitError) -> None:
        self.model.fail(error)
        self.host.end_trial(self)

    def _may_be_promoted(self) -> bool:
        """Return whether the counts that the worker sent allow a promotion."""
        arms: dict[str, Any] = self.figures
        current, candidate = (
            Arm(arms[name]["answers"], arms[name]["failed"]) for name in ("current", "candidate")
        )
        gates = self.model.spec.config.models[self.model.manifest.name].gates
        return may_be_promoted(current, candidate, gates)

    def _decide(self, verdict: Promote | Rollback) -> None:
        self._verdict = verdict
        if self.report is not None:
            self.report(verdict)
