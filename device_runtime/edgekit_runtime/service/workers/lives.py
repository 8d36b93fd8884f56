"""The worker processes of one isolated model that live: their regions, their signs of life, their end."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.service.oip.shared_memory import Region, Regions
from edgekit_runtime.service.options.model import Isolation
from edgekit_runtime.service.worker_wire.messages import BEAT_S
from edgekit_runtime.service.workers.worker_handle import Worker

_DRAIN_POLL_S: Final = 0.01

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Life:
    """What is known of one process."""

    begun_s: float
    ready_s: float | None = None


class Lives:
    """Processes; on the thread of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, isolation: Isolation, regions: Regions) -> None:
        """Begin with none.

        Args:
            loop: on whose thread all this happens.
            isolation: how long they may take for what.
            regions: shared memory of clients, which all of them must know.
        """
        self._loop, self._isolation, self._regions = loop, isolation, regions
        self._lives: dict[Worker, _Life] = {}
        self._ending: list[Worker] = []
        self._watching = loop.call_later(BEAT_S, self._watch)

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._lives)

    @property
    def is_over(self) -> bool:
        """Whether all processes have ended that ever were in here."""
        return not self._lives and all(worker.is_over for worker in self._ending)

    @property
    def ready(self) -> list[Worker]:
        """Those that have loaded their model, in the order in which they had."""
        return [worker for worker, life in self._lives.items() if life.ready_s is not None]

    def add(self, worker: Worker) -> None:
        """Look after a process that was started."""
        self._lives[worker] = _Life(self._loop.time())
        for region in self._regions:
            worker.add_region(region)

    def note_ready(self, worker: Worker) -> None:
        """Take note that it has loaded its model."""
        life = self._lives.pop(worker)
        life.ready_s = self._loop.time()
        self._lives[worker] = life  # behind those that had before

    def lose(self, worker: Worker) -> float:
        """Take out a process that has ended; return for how many seconds it had been ready."""
        life = self._lives.pop(worker)
        return 0.0 if life.ready_s is None else self._loop.time() - life.ready_s

    def end_all_but(self, kept: Worker | None) -> None:
        """End processes of whose end nobody needs to hear."""
        ended = [worker for worker in self._lives if worker is not kept]
        self._ending = [each for each in (*self._ending, *ended) if not each.is_over]
        for worker in ended:
            del self._lives[worker]
            worker.end()

    def stop_watching(self) -> None:
        """Let nothing be ended any more for want of a sign of life."""
        self._watching.cancel()

    def add_region(self, region: Region) -> None:
        """Let requests name `region`."""
        for worker in self._lives:
            worker.add_region(region)

    def remove_region(self, name: str) -> None:
        """Forget a region."""
        for worker in self._lives:
            worker.remove_region(name)

    def retire(self, done: Callable[[], None], limit_s: float) -> None:
        """Have all connections back that they were lent, and call `done` then, or after `limit_s`."""
        for worker in self._lives:
            worker.retire()
        self._await_returns(done, limit_s)

    def _await_returns(self, done: Callable[[], None], left_s: float) -> None:
        if left_s < 0:
            _logger.warning("connections of a worker did not come back in time")
        if left_s < 0 or not any(worker.lent for worker in self._lives):
            done()
            return
        self._loop.call_later(_DRAIN_POLL_S, self._await_returns, done, left_s - _DRAIN_POLL_S)

    def _watch(self) -> None:
        """End processes that show no life.

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
