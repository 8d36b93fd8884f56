"""The processes of one isolated model: kept alive, standing by, and given up."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, UnavailableError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.worker_wire.messages import Given, Order, TrialWord
from edgekit_runtime.service.worker_wire.snapshots import read_snapshots
from edgekit_runtime.service.workers.lives import Lives
from edgekit_runtime.service.workers.metric_sums import Tally
from edgekit_runtime.service.workers.remote_model import IsolatedLane
from edgekit_runtime.service.workers.remote_trial import IsolatedTrial
from edgekit_runtime.service.workers.restart_policy import Crashes
from edgekit_runtime.service.workers.worker_handle import Worker

if TYPE_CHECKING:
    from edgekit_runtime.service.workers.supervisor import Workers

_RESTART_S: Final = 1.0  # about how long a start takes, for who asks when to come again
_MAX_FIRST_CRASHES: Final = 3  # while loading for the first time: the machine may have lacked memory
_MAX_FIRST_REFUSALS: Final = 7  # of the system to let it load; with the waits between them about 8 s

_logger = logging.getLogger(__name__)


class IsolatedModel:
    """Keeps the workers of one model; all on the thread of the loop but `close`.

    Attributes:
        lane: stands for the version in use.
        lives: its processes.
        restarts: how often a worker was started after a crash.
        trial: of a version beside that one, or None.
    """

    def __init__(
        self,
        http: HttpServer,
        regions: Regions,
        manifest: Manifest,
        order: Order,
        *,
        package: int,
        workers: "Workers",
    ) -> None:
        """Make it; `begin` starts its first worker.

        Args:
            http: whose connections it is lent.
            regions: shared memory of clients.
            manifest: of the version.
            order: for each worker.
            package: descriptor of the package; owned by this.
            workers: hears of it.
        """
        self._http, self._order, self._package = http, order, package
        self._loop = http.loop
        self.lives = Lives(self._loop, order.isolation, regions)
        self.lane = IsolatedLane(self, manifest)
        self.restarts = 0
        self._workers = workers
        self._has_started = self._is_over = False
        self.trial: IsolatedTrial | None = None
        self._crashes, self._traps = Crashes(), Crashes()
        self._refusals = 0  # of the system, in a row
        self._restart_s = 0.0  # when the next start may be, on the clock of the loop

    @property
    def _ready(self) -> list[Worker]:
        """Those that may be asked: the first `processes` of them answer, and one may stand by."""
        return [] if self._is_over else self.lives.ready

    # For its lanes

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way in any worker."""
        return all(worker.is_idle for worker in self.lives)

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let the worker answer the present request of `connection`; see `Worker.lend`."""
        answering = self._ready[: self._order.isolation.processes]
        return any(
            worker.lend(connection, is_default=is_default)
            for worker in sorted(answering, key=attrgetter("lent"))
        )

    def explain(self) -> UnavailableError:
        """Return why no worker can take a call now."""
        name = self._order.name
        if self._ready:
            return UnavailableError(f"{name}: its process takes no more connections", _RESTART_S)
        left_s = max(0.0, self._restart_s - self._loop.time())
        return UnavailableError(f"{name}: its process ended and is being started again", _RESTART_S + left_s)

    def say(self, tally: Tally) -> dict[str, JsonValue]:
        """Return what the worker that answers, or the oldest of them, says of a version."""
        ready = self._ready
        return tally.said_by(ready[0]) if ready else {}

    def try_beside(
        self, manifest: Manifest, given: Given, package: int, opened: "Future[IsolatedLane]"
    ) -> None:
        """Try a version, see `IsolatedTrial`, in the worker of the one in use, as soon as that answers."""
        gates = self._order.config.models[self._order.name].gates
        trial = IsolatedTrial(IsolatedLane(self, manifest), given, package, opened, gates)
        if self._is_over:
            trial.close()
            return
        self.trial = trial.lane.trial = trial
        trial.limit(self._loop, self._order.isolation.start_timeout_s, self._check_opened)
        if ready := self._ready:
            trial.ask(ready[0])

    def promote(self, lane: IsolatedLane) -> bool:
        """Let the candidate take over, where it still lives: its worker goes on with it alone."""
        trial = self.trial
        if trial is None or trial.lane is not lane or trial.worker is None:
            return False
        self.trial = None
        trial.worker.settle(trial.given.version, is_promoted=True)
        self.lane, self._package, trial.package = lane, trial.package, self._package
        self._order = dataclasses.replace(self._order, given=trial.given)
        trial.close()
        self.lives.end_all_but(trial.worker)  # which have the old version
        self._fill()
        return True

    def drop(self, lane: IsolatedLane) -> None:
        """Try a candidate no more, if that is what `lane` stands for."""
        trial = self.trial
        if trial is None or trial.lane is not lane:
            return
        self.trial = None
        if trial.worker is not None:
            trial.worker.settle(trial.given.version, is_promoted=False)
        trial.close()

    def drain(self, lane: IsolatedLane, done: Callable[[], None]) -> None:
        """Lend no more where this is the version in use; call `done` once all connections have come back."""
        if lane is not self.lane:
            done()
            return
        if self.trial is not None:
            self.drop(self.trial.lane)
        self._is_over = True
        self.lives.retire(done, self._order.config.inference.drain_timeout_s)

    def close(self, lane: IsolatedLane) -> None:
        """End all processes, where this is the version in use; from any thread."""
        if lane is self.lane:
            with contextlib.suppress(RuntimeError):  # the loop is closed, after `Workers.close`
                self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """End all processes at once; what they were lent comes back."""
        if self._package < 0:
            return
        if self.trial is not None:
            self.drop(self.trial.lane)
        self._is_over = True
        self.lives.stop_watching()
        self.lives.end_all_but(None)
        os.close(self._package)
        self._package = -1
        self._workers.on_end(self)

    @property
    def is_over(self) -> bool:
        """Whether it was ended and so have all its processes."""
        return self._package < 0 and self.lives.is_over

    # What its workers tell

    def on_ready(self, worker: Worker) -> None:
        """Let it answer, or stand by."""
        self.lives.note_ready(worker)
        self._refusals = 0
        if self.trial is not None and len(self._ready) == 1:
            self.trial.ask(worker)
        if not self._has_started:
            self._has_started = True
            self._workers.on_started(self, None)
        self._fill()

    def on_snapshots(self, worker: Worker, payload: bytes) -> None:
        """Take in what it knows of the versions that are of interest here.

        Raises:
            ChannelError: it has said something else.
        """
        snapshots = read_snapshots(payload)
        trial = self.trial
        if trial is not None and trial.worker is worker and trial.given.version in snapshots:
            trial.take(snapshots[trial.given.version])
        own = snapshots.get(self._order.given.version)
        if own is not None:
            self.lane.tally.take(worker, own)

    def on_word(self, worker: Worker, word: TrialWord) -> None:
        """Take in what it says of a trial, unless that is over here.

        Raises:
            ChannelError: that makes no sense.
        """
        trial = self.trial
        if trial is None or trial.worker is not worker or trial.given.version != word.version:
            return
        trial.hear(word)
        if word.outcome in ("refused", "lacking"):
            self.trial = None
            trial.close()

    def on_end(self, worker: Worker, reason: str) -> None:
        """Start another, at once after a first crash and later after further ones."""
        self.lane.tally.keep(worker)
        lived_s = self.lives.lose(worker)
        if self._is_over:
            return
        self.restarts += 1
        trial = self.trial
        if trial is not None and trial.worker is worker:
            self.trial = None
            trial.crash(reason)
            self._restart(Crashes())
        elif worker.has_lacked:
            self._take_refusal(reason)
        elif worker.has_trapped and worker.is_ready:
            self._take_trap(reason, lived_s)
        else:
            self._take_crash(reason, lived_s, is_final=worker.has_refused)

    def _take_crash(self, reason: str, lived_s: float, *, is_final: bool) -> None:
        self._crashes = self._crashes.after(lived_s, self._order.isolation)
        what = f"{self.lane.manifest.name} {self.lane.manifest.version}"
        if not self._has_started and (is_final or self._crashes.count >= _MAX_FIRST_CRASHES):
            self._workers.on_started(self, BackendError(f"{what}, in its worker: {reason}"))
            self.end()
            return
        _logger.error("%s: its worker is lost: %s", what, reason)
        if self._has_started:
            self._workers.on_crash(self, reason, is_loop=self._crashes.is_loop(self._order.isolation))
        if not self._is_over:
            self._restart(self._crashes)

    def _take_trap(self, reason: str, lived_s: float) -> None:
        """Start another: a request divided by what it held, and clients must not get a version rejected."""
        self._traps = self._traps.after(lived_s, self._order.isolation)
        manifest = self.lane.manifest
        _logger.error("%s %s: a request ended its worker: %s", manifest.name, manifest.version, reason)
        self._restart(self._traps)

    def _restart(self, crashes: Crashes) -> None:
        delay_s = crashes.delay_s(self._order.isolation)
        self._restart_s = self._loop.time() + delay_s
        self._loop.call_later(delay_s, self._fill)

    def _fill(self) -> None:
        """Start a worker where one is missing and it is time for it."""
        isolation = self._order.isolation
        wanted = isolation.processes + isolation.standby if self._has_started else 1
        is_waiting = self._restart_s > self._loop.time() + 1e-3
        if len(self.lives) < wanted and not self._is_over and not is_waiting:
            self.begin()

    def begin(self) -> None:
        """Start a worker; the first one from outside, all others by itself."""
        self._restart_s = 0.0
        try:
            worker = Worker(self._http, self, self._order, self._package)
        except (OSError, MemoryError, ImportError) as cause:
            self._loop.call_soon(self._take_refusal, repr(cause))
            return
        self.lives.add(worker)

    def _take_refusal(self, reason: str) -> None:
        """Try again, later each time: what the system lacks for a process says nothing of the version."""
        if self._is_over:
            return
        self._refusals += 1
        manifest = self.lane.manifest
        what = f"{manifest.name} {manifest.version}: its process cannot be started: {reason}"
        if not self._has_started and self._refusals >= _MAX_FIRST_REFUSALS:
            self._workers.on_started(self, UnavailableError(f"{what}; load it again later", _RESTART_S))
            self.end()
            return
        _logger.error("%s", what)
        self._restart(Crashes(self._crashes.count + self._refusals))

    def _check_opened(self, trial: IsolatedTrial) -> None:
        """End a trial that has not begun: its worker hangs, or the version in use has none that lives."""
        reason = f"it did not load version {trial.given.version} in time"
        if trial.worker is not None:
            trial.worker.kill(reason)
        else:  # it was never asked
            self.trial = None
            what = f"{self._order.name} {trial.given.version} cannot be tried now"
            why = "no process of the version in use lives; load it again later"
            trial.refuse(UnavailableError(f"{what}: {why}", _RESTART_S))
            trial.close()
