"""A version of an isolated model and its worker processes: started, watched, restarted, and ended.

Requests reach a worker together with their connection and do not pass through here: see `worker_handle`.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from operator import attrgetter
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, UnavailableError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.oip.shared_memory import Region, Regions
from edgekit_runtime.service.scheduling.call import Call
from edgekit_runtime.service.serving.remote import RemoteTrial, RemoteVersion
from edgekit_runtime.service.worker_wire.messages import HEARTBEAT_S, TrialMessage, WorkerSpec
from edgekit_runtime.service.worker_wire.snapshots import Snapshot, add_up, read_snapshots
from edgekit_runtime.service.workers.restart_policy import End, RestartPolicy
from edgekit_runtime.service.workers.worker_handle import WorkerHandle
from edgekit_runtime.service.workers.worker_trial import WorkerTrial, set_outcome

_RESTART_S: Final = 1.0  # about how long a start takes, for `Retry-After`
_DRAIN_POLL_S: Final = 0.01
_EVENTS: Final = {
    End.CRASH: "its worker is lost",
    End.REFUSED: "its worker is lost",
    End.UNAVAILABLE: "its process cannot be started",
    End.TRAP: "a request ended its worker",
}

_logger = logging.getLogger(__name__)


class RemoteModel(RemoteVersion):
    """A version in worker processes; all of it on the thread of the loop but `close`.

    A version on trial has no workers of its own: it runs in one of the version in use, its host, and takes
    that worker over if it is promoted.

    Attributes:
        manifest: manifest of the version.
        spec: what each worker is started with.
        hosted: the trial of another version in one of its workers, or None.
        workers: the workers that run or start; the ready ones are in the order in which they became so.
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
        """Begin without workers; call `begin` or `begin_trial` next.

        Args:
            http: the HTTP server whose connections the workers are lent.
            regions: shared memory of clients.
            manifest: manifest of the version.
            spec: what each worker is started with.
            package: descriptor of the package; owned by this, -1 if no worker is to open it.
            opened: gets this once a worker is ready or the trial has begun, or why that cannot be.
            report_crash: called with this, the reason, and whether it crashes again and again.
        """
        self._http, self._regions, self.manifest, self.spec = http, regions, manifest, spec
        self._package, self._opened, self._report_crash = package, opened, report_crash
        self._loop = http.loop
        self._trial: WorkerTrial[RemoteModel] | None = None
        self._host: RemoteModel | None = None
        self.hosted: WorkerTrial[RemoteModel] | None = None
        self.workers: list[WorkerHandle] = []
        self._ending: list[WorkerHandle] = []
        self.restarts = 0
        self._policy = RestartPolicy(spec.isolation)
        self._restart_s = 0.0  # when the next start may be, on the clock of the loop
        self._is_draining = self.is_ended = False
        self._heartbeat: asyncio.TimerHandle | None = None
        self._metrics: LaneMetrics | None = None
        self._past = LaneMetrics("", "")  # of workers that have ended, and of calls that none could take
        self._snapshots: dict[WorkerHandle, Snapshot] = {}

    @property
    def ready(self) -> list[WorkerHandle]:
        """The workers that have loaded the model, its own or its host's; the last one may stand by."""
        workers = self.workers if self._host is None else self._host.workers
        return [worker for worker in workers if worker.is_ready]

    @property
    def is_in_use(self) -> bool:
        """Whether it has, or is to have, workers of its own."""
        return self._host is None and not self.is_ended

    @property
    def is_over(self) -> bool:
        """Whether it was ended and so have all its processes."""
        return self.is_ended and all(worker.is_over for worker in self._ending)

    def fileno(self) -> int:
        """Return the descriptor of the package, or -1 once it is closed."""
        return self._package

    def add_region(self, region: Region) -> None:
        """Allow requests to name `region`."""
        for worker in self.workers:
            worker.add_region(region)

    def remove_region(self, name: str) -> None:
        """Forget a region."""
        for worker in self.workers:
            worker.remove_region(name)

    def begin_trial(self, host: "RemoteModel") -> None:
        """Try this version in the first ready worker of `host`."""
        self._host = host
        if host._is_draining:
            self._opened.cancel()
            self.end()
            return
        gates = self.spec.config.models[self.manifest.name].gates
        deadline_s = self._loop.time() + self.spec.isolation.start_timeout_s
        host.hosted = self._trial = WorkerTrial(self, host, self._opened, gates, deadline_s)
        if ready := host.ready:
            host.hosted.start(ready[0])

    def begin_stop(self) -> None:
        """Request all connections back, if a worker was ever ready; else end at once."""
        if self._opened.done():
            self.drain(lambda: None)
        else:
            self.end()
            self._opened.cancel()

    def end(self) -> None:
        """End all processes at once; the connections that they were lent come back."""
        if self.is_ended:
            return
        if self.hosted is not None:
            self.drop(self.hosted)
        self._is_draining = self.is_ended = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._ending, self.workers = self.workers, []
        for worker in self._ending:
            worker.end()
        if self._package >= 0:
            os.close(self._package)
            self._package = -1

    # As a `RemoteVersion`

    @property
    def trial(self) -> RemoteTrial | None:
        """The trial in which this is the candidate, until that has begun; or None."""
        trial = self._trial
        return None if trial is None or trial.has_begun else trial

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way in any of its workers, whichever version it is for."""
        return all(worker.is_idle for worker in self.ready)

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let the worker with the fewest connections answer the present request of `connection`."""
        answering = [] if self._is_draining else self.ready[: self.spec.isolation.processes]
        return any(
            worker.lend(connection, is_default=is_default)
            for worker in sorted(answering, key=attrgetter("lent"))
        )

    def submit(self, call: Call) -> None:
        """Answer that no worker can take the call now."""
        self._past.refused += 1
        self._add_up()
        if self.ready and not self._is_draining:
            text, left_s = "its process takes no more connections", 0.0
        else:
            text = "its process ended and is being started again"
            left_s = max(0.0, self._restart_s - self._loop.time())
        call.reply(UnavailableError(f"{self.manifest.name}: {text}", _RESTART_S + left_s))

    def drain(self, done: Callable[[], None]) -> None:
        """Stop lending, and call `done` once all connections have come back."""
        if self.hosted is not None:
            self.drop(self.hosted)
        self._is_draining = True
        for worker in self.workers:
            worker.retire()
        self._await_returns(done, self._loop.time() + self.spec.config.inference.drain_timeout_s)

    def close(self) -> None:
        """End all processes; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, after `Supervisor.close`
            self._loop.call_soon_threadsafe(self.end)

    def count_into(self, metrics: LaneMetrics) -> None:
        """Keep the sums over all workers in `metrics` from now on."""
        self._metrics = metrics
        self._add_up()

    def to_json(self) -> dict[str, JsonValue]:
        """Return the statistics of the first worker beyond its counts; empty before it has sent any."""
        found = self._snapshots.get(self.ready[0]) if self.ready else None
        return {} if found is None else found.details

    # As the owner of its workers

    def on_ready(self, worker: WorkerHandle) -> None:
        """Use a worker that has loaded its model, to answer or to stand by."""
        self.workers.remove(worker)
        self.workers.append(worker)  # behind those that were ready before
        is_first = not self._policy.has_started
        self._policy.note_ready()
        if self.hosted is not None and self.hosted.worker is None:
            self.hosted.start(worker)
        if is_first and not set_outcome(self._opened, self):
            self.end()  # no thread waits for it any more
        self._fill()

    def on_snapshots(self, worker: WorkerHandle, payload: bytes) -> None:
        """Store a worker's figures on this version and on the one that it tries.

        Raises:
            ChannelError: it cannot be read.
        """
        snapshots, trial = read_snapshots(payload), self.hosted
        if trial is not None and trial.worker is worker and trial.version in snapshots:
            found = snapshots[trial.version]
            trial.add_rollout(found.rollout)
            trial.model.add_snapshot(worker, found)
        own = snapshots.get(self.manifest.version)
        if own is not None:
            self.add_snapshot(worker, own)

    def on_trial_message(self, worker: WorkerHandle, message: TrialMessage) -> None:
        """Act on what it reports of a trial, unless that is over.

        Raises:
            ChannelError: it makes no sense now.
        """
        trial = self.hosted
        if trial is None or trial.worker is not worker or trial.version != message.version:
            return
        trial.handle_message(message)
        if message.outcome in ("refused", "unavailable"):
            self._end_trial(trial)

    def on_end(self, worker: WorkerHandle, end: End, reason: str) -> None:
        """Start another one, when and if the policy says so."""
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
            self._end_trial(trial)
            end = End.TRIAL
        self._restart(end, reason, worker.ready_for_s)

    # As the host of a trial

    def promote(self, trial: "WorkerTrial[RemoteModel]") -> bool:
        """Put the candidate in use if its worker still runs, which goes on with it alone."""
        if self.hosted is not trial or trial.worker is None:
            return False
        self.hosted = None
        trial.stop()
        trial.worker.end_trial(trial.version, is_promoted=True)
        self.workers.remove(trial.worker)
        trial.model._take_over(trial.worker, self)
        self.end()  # also the other workers, which have the old version
        return True

    def drop(self, trial: "WorkerTrial[RemoteModel]") -> None:
        """End the trial without the candidate; does nothing if it is over."""
        if self.hosted is not trial:
            return
        if trial.worker is not None:
            trial.worker.end_trial(trial.version, is_promoted=False)
        self._end_trial(trial)

    def add_snapshot(self, worker: WorkerHandle, snapshot: Snapshot) -> None:
        """Replace what is known of `worker`, which counts since its start."""
        self._snapshots[worker] = snapshot
        self._add_up()

    # Starts

    def begin(self) -> None:
        """Start a worker; the first one from outside, all others by itself."""
        self._restart_s = 0.0
        if self._heartbeat is None:
            self._check_heartbeats()
        try:
            worker = WorkerHandle(self._http, self, self.spec, self._package)
        except (OSError, MemoryError, ImportError) as cause:
            self._loop.call_soon(self._on_start_failed, repr(cause))
            return
        self.workers.append(worker)
        for region in self._regions:
            worker.add_region(region)

    def _take_over(self, worker: WorkerHandle, host: "RemoteModel") -> None:
        self._host, self._trial = None, None
        self._policy, self.restarts = host._policy, host.restarts
        self.workers, worker.owner = [worker], self
        self._check_heartbeats()
        self._fill()

    def _on_start_failed(self, reason: str) -> None:
        if not self._is_draining:
            self._restart(End.UNAVAILABLE, reason)

    def _restart(self, end: End, reason: str, ready_for_s: float = 0.0) -> None:
        decision = self._policy.decide(end, ready_for_s)
        what = f"{self.manifest.name} {self.manifest.version}"
        if decision.fails_load:
            text = f"{what}, in its worker: {reason}"
            error: EdgekitError = BackendError(text)
            if end is End.UNAVAILABLE:
                error = UnavailableError(f"{text}; load it again later", _RESTART_S)
            set_outcome(self._opened, error)
            self.end()
            return
        if end is not End.TRIAL:
            _logger.error("%s: %s: %s", what, _EVENTS[end], reason)
        if end in (End.CRASH, End.REFUSED) and self._policy.has_started:
            self._report_crash(self, reason, decision.is_loop)
        if not self._is_draining:
            self._restart_s = self._loop.time() + decision.delay_s
            self._loop.call_later(decision.delay_s, self._fill)

    def _fill(self) -> None:
        """Start a worker if one is missing and may start now."""
        isolation = self.spec.isolation
        wanted = isolation.processes + isolation.standby if self._policy.has_started else 1
        is_waiting = self._restart_s > self._loop.time() + 1e-3
        if len(self.workers) < wanted and not self._is_draining and not is_waiting:
            self.begin()

    def _end_trial(self, trial: "WorkerTrial[RemoteModel]") -> None:
        self.hosted = None
        trial.stop()
        trial.model.end()

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
        trial = self.hosted
        if trial is None or trial.is_open or self._loop.time() < trial.deadline_s:
            return
        if trial.worker is not None:
            trial.worker.kill(f"it did not load version {trial.version} in time")
        else:
            trial.give_up("no process of the version in use is ready")
            self._end_trial(trial)

    def _add_up(self) -> None:
        if self._metrics is not None:
            add_up(self._metrics, [self._past, *(one.counted for one in self._snapshots.values())])
