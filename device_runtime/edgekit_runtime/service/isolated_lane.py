"""One version of a model in a process of its own: kept alive, standing by, and given up.

As a session it stands for what is loaded elsewhere; as a lane it answers what reaches the service itself
while no worker can take it. Requests reach a worker without passing through here: see `worker_process`.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from edgekit_runtime.errors import BackendError, UnavailableError
from edgekit_runtime.manifest import Manifest
from edgekit_runtime.service.call import Call
from edgekit_runtime.service.connection import Connection
from edgekit_runtime.service.http import HttpServer
from edgekit_runtime.service.isolation import Crashes, Isolation
from edgekit_runtime.service.metrics import LaneMetrics
from edgekit_runtime.service.orders import BEAT_S, Order
from edgekit_runtime.service.sharedmem import Region, Regions
from edgekit_runtime.service.snapshots import add_up, read_snapshot
from edgekit_runtime.service.worker_process import Worker
from edgekit_runtime.sessions.session import Array
from edgekit_runtime.tensors import TensorSpec

_RESTART_S: Final = 1.0  # about how long a start takes, for who asks when to come again
_DRAIN_POLL_S: Final = 0.01
_MAX_FIRST_CRASHES: Final = 3  # while loading for the first time: the machine may have lacked memory

_logger = logging.getLogger(__name__)


class Events(Protocol):
    """What a lane tells of itself."""

    def on_started(self, lane: "IsolatedLane", error: BackendError | None) -> None:
        """The model is loaded for the first time, or cannot be, for `error`; said once."""

    def on_crash(self, lane: "IsolatedLane", reason: str, *, is_loop: bool) -> None:
        """A worker of a model that was loaded has crashed, too often where `is_loop`."""

    def on_end(self, lane: "IsolatedLane") -> None:
        """It has ended its processes; said once."""


@dataclass(slots=True, eq=False)
class _Life:
    """What is known of one process."""

    begun_s: float
    ready_s: float | None = None
    counted: LaneMetrics | None = None


class IsolatedLane:
    """Keeps the workers of one version; all on the thread of the loop but `close`.

    Attributes:
        manifest: of the version.
        restarts: how often a worker was started after a crash.
    """

    def __init__(
        self,
        http: HttpServer,
        regions: Regions,
        manifest: Manifest,
        order: Order,
        *,
        package: int,
        events: Events,
    ) -> None:
        """Start the first worker.

        Args:
            http: whose connections it is lent.
            regions: shared memory of clients.
            manifest: of the version.
            order: for each worker.
            package: descriptor of the package; owned by this.
            events: hears of it.
        """
        self._http, self._regions, self._order, self._package = http, regions, order, package
        self._loop = http.loop
        self.manifest = manifest
        self.restarts = 0
        self._isolation: Isolation = order.isolation
        self._events = events
        self._has_started = self._is_over = False
        self._lives: dict[Worker, _Life] = {}
        self._ending: list[Worker] = []
        self._active: Worker | None = None
        self._standby: Worker | None = None
        self._crashes = Crashes()
        self._restart_s: float | None = None
        self._past = LaneMetrics("", "")  # of workers that have ended, and of this lane itself
        self._metrics: LaneMetrics | None = None
        self._watching = self._loop.call_later(BEAT_S, self._watch)
        self._begin()

    # As a session

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """As the package states them."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """As the package states them."""
        return self.manifest.outputs

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:  # noqa: ARG002  # of the protocol
        """Not possible here: the model is loaded in another process.

        Raises:
            BackendError: always.
        """
        raise BackendError(f"{self.manifest.name} is isolated: it cannot be run within the service")

    def close(self) -> None:
        """End all processes; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, after `Workers.close`
            self._loop.call_soon_threadsafe(self.end)

    # As a lane

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let the worker answer the present request of `connection`; see `Worker.lend`."""
        return self._active is not None and self._active.lend(connection, is_default=is_default)

    def submit(self, call: Call) -> None:
        """Answer that the model cannot be asked now."""
        self._past.refused += 1
        self._count()
        name = self.manifest.name
        if self._active is not None:
            call.reply(UnavailableError(f"{name}: its process takes no more connections", _RESTART_S))
            return
        wait_s = _RESTART_S
        if self._restart_s is not None:
            wait_s += max(0.0, self._restart_s - self._loop.time())
        call.reply(UnavailableError(f"{name}: its process ended and is being started again", wait_s))

    def drain(self, done: Callable[[], None]) -> None:
        """Lend no more, and call `done` once all connections have come back."""
        self._is_over = True
        self._active = self._standby = None
        for worker in self._lives:
            worker.retire()
        self._await_returns(done)

    def end(self) -> None:
        """End all processes at once; what they were lent comes back."""
        if self._package < 0:
            return
        self._is_over = True
        self._active = self._standby = None
        self._watching.cancel()
        self._ending = list(self._lives)
        self._lives.clear()
        for worker in self._ending:
            worker.end()
        os.close(self._package)
        self._package = -1
        self._events.on_end(self)

    def count_into(self, metrics: LaneMetrics) -> None:
        """Let `metrics` hold what the workers count, from now on."""
        self._metrics = metrics
        self._count()

    def add_region(self, region: Region) -> None:
        """Let requests name `region`."""
        for worker in self._lives:
            worker.add_region(region)

    def remove_region(self, name: str) -> None:
        """Forget a region."""
        for worker in self._lives:
            worker.remove_region(name)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of its workers, the active one first."""
        workers = sorted(self._lives, key=lambda worker: worker is not self._active)
        return tuple(worker.pid for worker in workers)

    @property
    def is_over(self) -> bool:
        """Whether it was ended and so have all its processes."""
        return self._package < 0 and all(worker.is_over for worker in self._ending)

    @property
    def is_backed(self) -> bool:
        """Whether a worker stands by that has loaded the model."""
        return self._standby is not None

    # What its workers tell

    def on_ready(self, worker: Worker) -> None:
        """Let it answer, or stand by."""
        self._lives[worker].ready_s = self._loop.time()
        if self._active is None:
            self._active = worker
        else:
            self._standby = worker
        if not self._has_started:
            self._has_started = True
            self._events.on_started(self, None)
        self._fill()

    def on_snapshot(self, worker: Worker, payload: bytes) -> None:
        """Take in what it counted."""
        self._lives[worker].counted = read_snapshot(payload)
        self._count()

    def on_end(self, worker: Worker, reason: str) -> None:
        """Start another, at once after a first crash and later after further ones."""
        life = self._lives.pop(worker)
        if life.counted is not None:
            total = LaneMetrics("", "")
            add_up(total, [self._past, life.counted])
            self._past = total
        if self._is_over:
            return
        if worker is self._standby:
            self._standby = None
        if worker is self._active:
            self._active, self._standby = self._standby, None
        lived_s = 0.0 if life.ready_s is None else self._loop.time() - life.ready_s
        self._take_crash(reason, lived_s, is_final=worker.has_refused)

    def _take_crash(self, reason: str, lived_s: float, *, is_final: bool) -> None:
        self._crashes = self._crashes.after(lived_s, self._isolation)
        manifest = self.manifest
        if not self._has_started and (is_final or self._crashes.count >= _MAX_FIRST_CRASHES):
            self._events.on_started(
                self, BackendError(f"{manifest.name} {manifest.version}, in its worker: {reason}")
            )
            self.end()
            return
        _logger.error("%s %s: its worker is lost: %s", manifest.name, manifest.version, reason)
        if self._has_started:
            self._events.on_crash(self, reason, is_loop=self._crashes.is_loop(self._isolation))
        if not self._is_over:
            self.restarts += 1
            delay_s = self._crashes.delay_s(self._isolation)
            self._restart_s = self._loop.time() + delay_s
            self._loop.call_later(delay_s, self._fill)

    def _fill(self) -> None:
        """Start a worker where one is missing and it is time for it."""
        wanted = 2 if self._isolation.standby and self._has_started else 1
        is_waiting = self._restart_s is not None and self._restart_s > self._loop.time() + 1e-3
        if len(self._lives) < wanted and not self._is_over and not is_waiting:
            self._begin()

    def _begin(self) -> None:
        self._restart_s = None
        try:
            worker = Worker(self._http, self, self._order, self._package)
        except OSError as cause:
            reason = f"it cannot be started: {cause}"
            self._loop.call_soon(lambda: self._take_crash(reason, 0.0, is_final=False))
            return
        self._lives[worker] = _Life(self._loop.time())
        for region in self._regions:
            worker.add_region(region)

    def _watch(self) -> None:
        """End workers that show no life.

        Turns of this are counted, not time: a service that was stopped itself must not blame its workers.
        """
        self._watching = self._loop.call_later(BEAT_S, self._watch)
        isolation, now_s = self._isolation, self._loop.time()
        for worker, life in self._lives.items():
            worker.silent_s += BEAT_S
            if life.ready_s is None:
                if now_s - life.begun_s > isolation.start_timeout_s:
                    worker.kill(f"it did not load the model within {isolation.start_timeout_s:g} s")
            elif worker.silent_s > isolation.hang_s:
                worker.kill(f"it showed no life for {isolation.hang_s:g} s")

    def _await_returns(self, done: Callable[[], None], waited_s: float = 0.0) -> None:
        is_late = waited_s > self._order.config.inference.drain_timeout_s
        if is_late:
            _logger.warning("%s: connections of its worker did not come back in time", self.manifest.name)
        if is_late or not any(worker.lent for worker in self._lives):
            done()
            return
        self._loop.call_later(_DRAIN_POLL_S, self._await_returns, done, waited_s + _DRAIN_POLL_S)

    def _count(self) -> None:
        if self._metrics is not None:
            live = [life.counted for life in self._lives.values() if life.counted is not None]
            add_up(self._metrics, [self._past, *live])
