"""The worker processes of one isolated model: started, watched, restarted, and ended."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future
from operator import attrgetter
from typing import Final

from edgekit_runtime.errors import BackendError, UnavailableError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.oip.shared_memory import Region, Regions
from edgekit_runtime.service.worker_wire.messages import HEARTBEAT_S, TrialMessage, WorkerSpec
from edgekit_runtime.service.worker_wire.snapshots import read_snapshots
from edgekit_runtime.service.workers.remote_model import Processes, RemoteModel, set_outcome
from edgekit_runtime.service.workers.restart_policy import End, RestartPolicy
from edgekit_runtime.service.workers.worker_handle import WorkerHandle
from edgekit_runtime.service.workers.worker_trial import WorkerTrial

_RESTART_S: Final = 1.0  # about how long a start takes, for `Retry-After`
_DRAIN_POLL_S: Final = 0.01

_EVENTS: Final = {
    End.CRASH: "its worker is lost",
    End.REFUSED: "its worker is lost",
    End.UNAVAILABLE: "its process cannot be started",
    End.TRAP: "a request ended its worker",
}

_logger = logging.getLogger(__name__)


class ProcessGroup(Processes):
    """Keeps the workers of one model running; all on the thread of the loop but `close`.

    Attributes:
        model: the version in use.
        trial: of a version beside that one, or None.
        workers: those that run or start; the ready ones are in the order in which they became so.
        restarts: how often a worker was started again after it was lost.
        is_ended: whether `end` was called.
    """

    def __init__(
        self,
        http: HttpServer,
        regions: Regions,
        manifest: Manifest,
        spec: WorkerSpec,
        *,
        package: int,
        opened: "Future[RemoteModel]",
        report_crash: "Callable[[RemoteModel, str, bool], None]",
    ) -> None:
        """Make it; `begin` starts its first worker.

        Args:
            http: whose connections the workers are lent.
            regions: shared memory of clients.
            manifest: of the version.
            spec: of each worker.
            package: descriptor of the package; owned by the group.
            opened: gets the model once a worker is ready, or why none can be.
            report_crash: called with the model, the reason, and whether it crashes again and again.
        """
        self._http, self._regions, self._spec = http, regions, spec
        self._opened, self._report_crash = opened, report_crash
        self._loop = http.loop
        self.model = RemoteModel(self, manifest, package)
        self.trial: WorkerTrial | None = None
        self.workers: list[WorkerHandle] = []
        self._ending: list[WorkerHandle] = []
        self.restarts = 0
        self._policy = RestartPolicy(spec.isolation)
        self._restart_s = 0.0  # when the next start may be, on the clock of the loop
        self._is_draining = self.is_ended = False
        self._heartbeat: asyncio.TimerHandle = self._loop.call_later(HEARTBEAT_S, self._check_heartbeats)

    @property
    def ready(self) -> list[WorkerHandle]:
        """The workers that have loaded the model: the first `processes` of them answer, one may stand by."""
        return [worker for worker in self.workers if worker.is_ready]

    @property
    def is_over(self) -> bool:
        """Whether it was ended and so have all its processes."""
        return self.is_ended and all(worker.is_over for worker in self._ending)

    def add_region(self, region: Region) -> None:
        """Let requests name `region`."""
        for worker in self.workers:
            worker.add_region(region)

    def remove_region(self, name: str) -> None:
        """Forget a region."""
        for worker in self.workers:
            worker.remove_region(name)

    def start_trial(self, manifest: Manifest, package: int, opened: "Future[RemoteModel]") -> None:
        """Try a version in the first worker that is ready.

        Args:
            manifest: of the version.
            package: descriptor of its package; owned by the group.
            opened: gets the version once it is on trial, or why it cannot be.
        """
        candidate = RemoteModel(self, manifest, package)
        if self._is_draining:
            opened.cancel()
            candidate.close_package()
            return
        gates = self._spec.config.models[self._spec.name].gates
        deadline_s = self._loop.time() + self._spec.isolation.start_timeout_s
        self.trial = candidate.trial = WorkerTrial(candidate, self, opened, gates, deadline_s)
        if ready := self.ready:
            self.trial.start(ready[0])

    def promote(self, trial: WorkerTrial) -> bool:
        """Put the candidate in use if its worker still runs, which goes on with it alone."""
        if self.trial is not trial or trial.worker is None:
            return False
        self.trial = None
        trial.stop()
        trial.worker.end_trial(trial.version, is_promoted=True)
        self.model.close_package()
        self.model = trial.model
        self._spec = dataclasses.replace(self._spec, package=trial.model.verified)
        self._end_workers(keep=trial.worker)  # the others have the old version
        self._fill()
        return True

    def drop(self, trial: WorkerTrial) -> None:
        """End the trial without the candidate; does nothing if it is over."""
        if self.trial is not trial:
            return
        if trial.worker is not None:
            trial.worker.end_trial(trial.version, is_promoted=False)
        self._forget_trial(trial)

    def begin_stop(self) -> None:
        """Have the connections back, if a worker was ever ready; else end at once."""
        if self._opened.done():
            self.drain(self.model, lambda: None)
        else:
            self.end()
            self._opened.cancel()

    def end(self) -> None:
        """End all processes at once; the connections that they were lent come back."""
        if self.is_ended:
            return
        if self.trial is not None:
            self.drop(self.trial)
        self._is_draining = self.is_ended = True
        self._heartbeat.cancel()
        self._end_workers(keep=None)
        self.model.close_package()

    # As `Processes`

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way in any worker."""
        return all(worker.is_idle for worker in self.workers)

    def find_first_ready(self) -> WorkerHandle | None:
        """Return the worker that has been ready for the longest time, or None."""
        return next(iter(self.ready), None)

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let the worker with the fewest connections answer the present request of `connection`."""
        answering = [] if self._is_draining else self.ready[: self._spec.isolation.processes]
        return any(
            worker.lend(connection, is_default=is_default)
            for worker in sorted(answering, key=attrgetter("lent"))
        )

    def explain(self) -> UnavailableError:
        """Return why no worker can take a call now."""
        name = self._spec.name
        if self.ready and not self._is_draining:
            return UnavailableError(f"{name}: its process takes no more connections", _RESTART_S)
        left_s = max(0.0, self._restart_s - self._loop.time())
        return UnavailableError(f"{name}: its process ended and is being started again", _RESTART_S + left_s)

    def drain(self, model: RemoteModel, done: Callable[[], None]) -> None:
        """Stop lending if `model` is in use; call `done` once all connections have come back."""
        if model is not self.model:
            done()
            return
        if self.trial is not None:
            self.drop(self.trial)
        self._is_draining = True
        for worker in self.workers:
            worker.retire()
        limit_s = self._spec.config.inference.drain_timeout_s
        self._await_returns(done, self._loop.time() + limit_s)

    def close(self, model: RemoteModel) -> None:
        """End all processes if `model` is in use; from any thread."""
        if model is self.model:
            with contextlib.suppress(RuntimeError):  # the loop is closed, after `Supervisor.close`
                self._loop.call_soon_threadsafe(self.end)

    # As the owner of its workers

    def on_ready(self, worker: WorkerHandle) -> None:
        """Let it answer, or stand by."""
        self.workers.remove(worker)
        self.workers.append(worker)  # behind those that were ready before
        is_first = not self._policy.has_started
        self._policy.note_ready()
        if self.trial is not None and self.trial.worker is None:
            self.trial.start(worker)
        if is_first and not set_outcome(self._opened, self.model):
            self.end()  # no thread waits for it any more
        self._fill()

    def on_snapshots(self, worker: WorkerHandle, payload: bytes) -> None:
        """Take what it knows of its versions.

        Raises:
            ChannelError: it cannot be read.
        """
        snapshots = read_snapshots(payload)
        trial = self.trial
        if trial is not None and trial.worker is worker and trial.version in snapshots:
            trial.add_snapshot(snapshots[trial.version])
        own = snapshots.get(self.model.manifest.version)
        if own is not None:
            self.model.add_snapshot(worker, own)

    def on_trial_message(self, worker: WorkerHandle, message: TrialMessage) -> None:
        """Act on what it reports of a trial, unless that is over.

        Raises:
            ChannelError: it makes no sense now.
        """
        trial = self.trial
        if trial is None or trial.worker is not worker or trial.version != message.version:
            return
        trial.handle_message(message)
        if message.outcome in ("refused", "unavailable"):
            self._forget_trial(trial)

    def on_end(self, worker: WorkerHandle, end: End, reason: str) -> None:
        """Start another one, when and if the policy says so."""
        self.model.remove_worker(worker)
        self.workers.remove(worker)
        if self._is_draining:
            return
        self.restarts += 1
        trial = self.trial
        if trial is not None and trial.worker is worker:
            trial.crash(reason)
            self._forget_trial(trial)
            end = End.TRIAL
        self._restart(end, reason, worker.ready_for_s)

    def begin(self) -> None:
        """Start a worker; the first one from outside, all others by itself."""
        self._restart_s = 0.0
        try:
            worker = WorkerHandle(self._http, self, self._spec, self.model.fileno())
        except (OSError, MemoryError, ImportError) as cause:
            self._loop.call_soon(self._on_start_failed, repr(cause))
            return
        self.workers.append(worker)
        for region in self._regions:
            worker.add_region(region)

    def _on_start_failed(self, reason: str) -> None:
        if not self._is_draining:
            self._restart(End.UNAVAILABLE, reason)

    def _restart(self, end: End, reason: str, ready_for_s: float = 0.0) -> None:
        decision = self._policy.decide(end, ready_for_s)
        what = f"{self.model.manifest.name} {self.model.manifest.version}"
        if decision.fails_load:
            text = f"{what}, in its worker: {reason}"
            is_fault = end is not End.UNAVAILABLE
            later = UnavailableError(f"{text}; load it again later", _RESTART_S)
            set_outcome(self._opened, BackendError(text) if is_fault else later)
            self.end()
            return
        if end is not End.TRIAL:
            _logger.error("%s: %s: %s", what, _EVENTS[end], reason)
        if end in (End.CRASH, End.REFUSED) and self._policy.has_started:
            self._report_crash(self.model, reason, decision.is_loop)
        if not self._is_draining:
            self._restart_s = self._loop.time() + decision.delay_s
            self._loop.call_later(decision.delay_s, self._fill)

    def _fill(self) -> None:
        """Start a worker if one is missing and may start now."""
        isolation = self._spec.isolation
        wanted = isolation.processes + isolation.standby if self._policy.has_started else 1
        is_waiting = self._restart_s > self._loop.time() + 1e-3
        if len(self.workers) < wanted and not self._is_draining and not is_waiting:
            self.begin()

    def _end_workers(self, keep: WorkerHandle | None) -> None:
        """End all workers but `keep`; none of them calls back."""
        ended = [worker for worker in self.workers if worker is not keep]
        self.workers = [] if keep is None else [keep]
        self._ending = [worker for worker in (*self._ending, *ended) if not worker.is_over]
        for worker in ended:
            worker.end()

    def _forget_trial(self, trial: WorkerTrial) -> None:
        self.trial = None
        trial.stop()
        trial.model.close_package()

    def _await_returns(self, done: Callable[[], None], end_s: float) -> None:
        is_late = self._loop.time() > end_s
        if is_late:
            _logger.warning("connections of a worker did not come back in time")
        if is_late or not any(worker.lent for worker in self.workers):
            done()
            return
        self._loop.call_later(_DRAIN_POLL_S, self._await_returns, done, end_s)

    def _check_heartbeats(self) -> None:
        """End the workers that hang, and a trial that has not begun in time."""
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._check_heartbeats)
        for worker in self.workers:
            worker.check_heartbeat()
        trial = self.trial
        if trial is None or trial.is_open or self._loop.time() < trial.deadline_s:
            return
        if trial.worker is not None:
            trial.worker.kill(f"it did not load version {trial.version} in time")
        else:
            trial.give_up("no process of the version in use is ready")
            self._forget_trial(trial)
