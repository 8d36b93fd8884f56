"""Opens, drains and frees versions of models.

Packages are read, and sessions are opened and closed, on new threads, so a model that hangs does not delay
others. Listing models and recording results share one thread. Everything else runs on the event loop.
"""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from edgekit_runtime.service.models.confirmation import Confirmations
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.serving.first_load import load_tested
from edgekit_runtime.service.serving.loader import Loaded, OpenRemote, load
from edgekit_runtime.service.serving.served_version import Served

Result = TypeVar("Result")
MakeServed: TypeAlias = Callable[[Loaded], Served]

_logger = logging.getLogger(__name__)


class Lifecycle:
    """Opens the versions to serve, and frees versions that are no longer served.

    Attributes:
        source: The source of the packages.
        make_served: Builds the lanes of a loaded version. It is called on the event loop.
        confirmations: Confirms versions that have served without a crash.
        leaving: The versions that get no new requests but still occupy memory.
    """

    def __init__(
        self,
        source: Source,
        make_served: MakeServed,
        open_remote: OpenRemote | None,
        metrics: ServiceMetrics,
        *,
        drain_timeout_s: float,
        tries_in_child: bool = False,
    ) -> None:
        """Create a lifecycle without versions.

        `drain_timeout_s` is the longest wait for the calls of a version. `tries_in_child` states whether
        packages are first opened in a child process, see `load_tested`.
        """
        self.source, self.make_served = source, make_served
        self._load = functools.partial(load_tested if tries_in_child else load, open_remote=open_remote)
        self.leaving: set[Served] = set()
        self._metrics, self._drain_timeout_s = metrics, drain_timeout_s
        self._working: set[Future[Any]] = set()
        self._disk = ThreadPoolExecutor(1, "edgekit-disk")  # for work that must not wait for a loading model
        self.confirmations = Confirmations(source, self._disk)

    async def open(self, name: str, options: ModelOptions, beside: Loaded | None = None) -> list[Served]:
        """Open the versions of a model that `Source.open` chooses. They get no requests yet.

        Args:
            name: The name of the model.
            options: The options of the model.
            beside: The version in use if the new version is opened for a trial, else None.
        """
        load_one = functools.partial(self._load, options=options, beside=beside)
        opened = await self.on_thread(self.source.open, name, VersionPolicy.of(options), load_one)
        return [self.make_served(loaded) for loaded in opened]

    async def open_again(self, package: Servable, options: ModelOptions) -> Served:
        """Open a version that was served before."""
        load_one = functools.partial(self._load, options=options)
        return self.make_served(await self.on_thread(self.source.open_again, package, load_one))

    async def list_names(self) -> Sequence[str]:
        """Return the names of all installed models. A model that is loading does not delay this.

        Raises:
            EdgekitError: The models cannot be listed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._disk, self.source.names)

    async def drain(self, served: Served, late: Callable[[], object] | None = None) -> bool:
        """Wait for the last calls of a version that accepts no new calls.

        Args:
            served: The version.
            late: Called when the calls end after the time limit.

        Returns:
            True if all calls ended within the time limit. Otherwise an error is logged.
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
        self._metrics.swaps[name, "hung"] += 1
        _logger.error(
            "%s %s: a call did not end within %g s; the service goes on, and the memory of this version"
            " stays occupied until the call ends",
            name,
            served.version,
            self._drain_timeout_s,
        )
        return False

    async def retire(self, old: Iterable[Served]) -> None:
        """Cancel the confirmations of versions, wait for their calls, then free their sessions.

        A version with a hanging call is freed when the call ends.
        """
        old = list(old)
        self.confirmations.cancel(old)
        self.leaving.update(old)  # now: a load that begins before they are free must see their memory
        await asyncio.gather(*map(self._retire, old))

    async def _retire(self, served: Served) -> None:
        free = functools.partial(self._free, served)
        if await self.drain(served, free):
            await free()

    def _free(self, served: Served) -> "asyncio.Future[None]":
        freed = self.on_thread(served.loaded.close)
        freed.add_done_callback(lambda _: self.leaving.discard(served))
        return freed

    def on_thread(self, work: Callable[..., Result], *args: Any) -> "asyncio.Future[Result]":
        """Run `work` on a new thread, and return a future of its result."""
        done: Future[Result] = Future()
        self._working.add(done)
        done.add_done_callback(self._working.discard)
        arguments = (done, work, *args)
        threading.Thread(target=_work, args=arguments, name="edgekit-change", daemon=True).start()
        return asyncio.wrap_future(done)

    async def shutdown(self) -> None:
        """Wait for all pending work, then end the threads."""
        await self.on_thread(self._disk.shutdown)
        await asyncio.gather(*map(asyncio.wrap_future, list(self._working)), return_exceptions=True)

    def abandon(self) -> None:
        """Drop queued work without waiting. Work that is already running continues."""
        self._disk.shutdown(wait=False, cancel_futures=True)


def _work(done: "Future[Result]", work: Callable[..., Result], *args: Any) -> None:
    if done.set_running_or_notify_cancel():
        try:
            result = work(*args)
        except BaseException as error:  # raised where the result is waited for
            done.set_exception(error)
        else:
            done.set_result(result)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
