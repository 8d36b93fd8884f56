"""Opening, confirming and freeing versions of models, on behalf of the registry.

Each piece of work that reads packages, or opens or closes sessions, has a thread of its own, so that a model
that hangs holds up no other; who changes a model holds its lock, so its changes are in order. Listing and
recording share one thread. All else is on the thread of the event loop.
"""

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeAlias, TypeVar

from edgekit_runtime.errors import EdgekitError, UnavailableError
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.serving.loader import Loaded, OpenRemote, load
from edgekit_runtime.service.serving.served_version import Served

Result = TypeVar("Result")
MakeServed: TypeAlias = Callable[[Loaded], Served]

_CONFIRM_AFTER_S: Final = 10.0
_RECORD_AGAIN_S: Final = 60.0  # where it could not be recorded

_logger = logging.getLogger(__name__)


class Keeper:
    """Opens what is to be served, and frees what is not.

    Attributes:
        source: where packages lie.
        make_served: makes what takes the calls of a version, on the loop's thread.
        leaving: what no request finds any more, and whose memory is not free yet.
    """

    def __init__(
        self,
        source: Source,
        make_served: MakeServed,
        open_remote: OpenRemote | None,
        metrics: ServiceMetrics,
        drain_timeout_s: float,
    ) -> None:
        """Keep nothing yet.

        Args:
            source: where packages lie.
            make_served: see `Keeper`.
            open_remote: opens models in worker processes, see `load`.
            metrics: where versions that do not come to their end are counted.
            drain_timeout_s: how long calls under way are waited for.
        """
        self.source, self.make_served = source, make_served
        self._open_remote = open_remote
        self.leaving: set[Served] = set()
        self._metrics, self._drain_timeout_s = metrics, drain_timeout_s
        self._working: set[Future[Any]] = set()
        self._disk = ThreadPoolExecutor(1, "edgekit-disk")  # what shall not wait for a model that is loading
        self._unconfirmed: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._crashed: set[tuple[str, str]] = set()
        self._confirmed: set[tuple[str, str]] = set()  # and served since

    async def open(self, name: str, options: ModelOptions, beside: Loaded | None = None) -> list[Served]:
        """Return what is to be served of `name`, see `Source.open` and `load`."""
        load_one = functools.partial(load, options=options, open_remote=self._open_remote, beside=beside)
        opened = await self.on_thread(
            functools.partial(self.source.open, name, VersionPolicy.of(options), load_one)
        )
        return [self.make_served(loaded) for loaded in opened]

    async def open_again(self, package: Servable, options: ModelOptions) -> Served:
        """Return a version that was served before."""
        load_one = functools.partial(load, options=options, open_remote=self._open_remote)
        return self.make_served(
            await self.on_thread(functools.partial(self.source.open_again, package, load_one))
        )

    async def list_names(self) -> Sequence[str]:
        """Return the names of all installed models; waits for the disk, and for no model that is loading.

        Raises:
            EdgekitError: they cannot be listed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._disk, self.source.names)

    async def drain(self, served: Served, late: Callable[[], object] | None = None) -> bool:
        """Let the calls under way end; returns whether they did in time.

        Args:
            served: whose; it takes no more calls.
            late: called when they end after that.
        """
        if served.cache is not None:
            served.cache.close()
        drained = asyncio.get_running_loop().create_future()
        served.own_lane.drain(functools.partial(_settle, drained))
        await asyncio.wait([drained], timeout=self._drain_timeout_s)
        if drained.done():
            return True
        if late is not None:
            drained.add_done_callback(lambda _: late())
        name = served.loaded.manifest.name
        self._metrics.swaps[name, "hung"].value += 1
        _logger.error(
            "%s %s: a call does not come to its end within %g s; going on without it, and its memory stays"
            " taken until it does",
            *(name, served.version, self._drain_timeout_s),
        )
        return False

    async def retire(self, old: Iterable[Served]) -> None:
        """Let what is under way end, then free the sessions; those of a call that hangs once it ends."""
        going = list(old)
        self.leaving.update(going)  # now: a load that runs before they do must see their memory
        await asyncio.gather(*map(self._retire, going))

    async def _retire(self, served: Served) -> None:
        free = functools.partial(self._free, served)
        if await self.drain(served, free):
            await free()

    def _free(self, served: Served) -> "asyncio.Future[None]":
        freed = self._start(served.loaded.close)
        freed.add_done_callback(lambda _: self.leaving.discard(served))
        return freed

    async def on_thread(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns on a thread of its own."""
        return await self._start(work)

    def _start(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        done: Future[Result] = Future()
        self._working.add(done)
        done.add_done_callback(self._working.discard)
        threading.Thread(target=_work, args=(work, done), name="edgekit-change", daemon=True).start()
        return asyncio.wrap_future(done)

    def confirm_later(self, fresh: Sequence[Served]) -> None:
        """Count versions as good once they have served for a while: crashes come with the first requests."""
        for served in fresh:
            self._confirm_after(served.loaded.manifest.name, served.version, _CONFIRM_AFTER_S)

    def put_off(self, name: str, version: str) -> None:
        """Wait anew before a version counts as good: it has crashed."""
        if (name, version) in self._unconfirmed:
            self._unconfirmed[name, version].cancel()
            self._confirm_after(name, version, _CONFIRM_AFTER_S)
            self._crashed.add((name, version))

    def forget(self, served: Served) -> None:
        """Do not count a version as good any more."""
        self._end_wait(served.loaded.manifest.name, served.version)

    def confirm_all(self) -> None:
        """Count all versions that serve until now as good, but for those that crashed a moment ago."""
        for name, version in list(self._unconfirmed):
            if (name, version) in self._crashed:
                self._end_wait(name, version)
            else:
                self.confirm(name, version)

    def confirm(self, name: str, version: str) -> None:
        """Count a version as good now."""
        self._end_wait(name, version)
        self._confirmed.add((name, version))
        self._disk.submit(self._record, asyncio.get_running_loop(), name, version)

    async def shutdown(self) -> None:
        """End the threads, after what they have to do."""
        # Ending it waits for what it does, on the thread of the loop.
        await asyncio.get_running_loop().run_in_executor(self._disk, _do_nothing)
        self._disk.shutdown()
        await asyncio.gather(*map(asyncio.wrap_future, list(self._working)), return_exceptions=True)

    def abandon(self) -> None:
        """End without what they still have to do; what they do now goes on."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    def _confirm_after(self, name: str, version: str, delay_s: float) -> None:
        confirm = functools.partial(self.confirm, name, version)
        loop = asyncio.get_running_loop()
        self._unconfirmed[name, version] = loop.call_later(delay_s, confirm)

    def _end_wait(self, name: str, version: str) -> None:
        self._crashed.discard((name, version))
        self._confirmed.discard((name, version))
        timer = self._unconfirmed.pop((name, version), None)
        if timer is not None:
            timer.cancel()

    def _record(self, loop: asyncio.AbstractEventLoop, name: str, version: str) -> None:
        try:
            self.source.confirm(name, version)
        except UnavailableError as error:
            # Else it would count as begun and never confirmed, and be rejected for that at a later start.
            _logger.warning("%s %s serves well, which is recorded later: %s", name, version, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._record_later, name, version)
        except EdgekitError as error:
            _logger.warning("%s %s serves well, which is not recorded: %s", name, version, error)

    def _record_later(self, name: str, version: str) -> None:
        if (name, version) in self._confirmed:  # it still serves
            self._confirm_after(name, version, _RECORD_AGAIN_S)


def _work(work: Callable[[], Result], done: "Future[Result]") -> None:
    if done.set_running_or_notify_cancel():
        try:
            result = work()
        except BaseException as error:  # raised where the result is waited for
            done.set_exception(error)
        else:
            done.set_result(result)


def _do_nothing() -> None:
    """Be the last that a thread does."""


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
