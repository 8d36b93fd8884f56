"""The models that are served: found for every request, loaded, swapped and unloaded now and then.

All of it happens on the thread of the event loop, but for reading packages and opening sessions, which
happens on one thread of its own: two models that load at once would need twice the memory for loading.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.service.call import Lane
from edgekit_runtime.service.cap import choose_victims
from edgekit_runtime.service.eviction import MemoryCapError
from edgekit_runtime.service.loading import Loaded, ModelOptions, settle, unload
from edgekit_runtime.service.memory import available_bytes, needed_bytes
from edgekit_runtime.service.metrics import LaneMetrics, ServiceMetrics
from edgekit_runtime.service.oip import Codec
from edgekit_runtime.service.versions import Installed, SwapOrder, choose_order

Result = TypeVar("Result")

_SWAP_RETRY_S: Final = 1
_CONFIRM_AFTER_S: Final = 10.0
_AT_REST: Final = ("UNLOADED", "EVICTED", "RECALLED")  # not serving, as it should be

_logger = logging.getLogger(__name__)


class DrainingLane(Lane, Protocol):
    """A lane that can come to its end."""

    def drain(self, done: Callable[[], None]) -> None:
        """Take no more calls, and call `done` once those that were taken are answered, maybe at once."""


class Source(Protocol):
    """Where packages lie; all but `names` may wait for the disk and for engines, and run on a thread."""

    def names(self) -> Sequence[str]:
        """Return the names of all installed models."""

    def find(self, name: str) -> Sequence[Installed]:
        """Return the packages of a model that may be opened.

        Raises:
            EdgekitError: there are none, or they cannot be read.
        """

    def open(self, name: str, options: ModelOptions) -> list[Loaded]:
        """Return what is to be served of `name`; the first answers requests that name no version.

        Raises:
            EdgekitError: that says why nothing can be served; nothing stays open then.
        """

    def reopen(self, path: Path, options: ModelOptions) -> Loaded:
        """Return the model of a package that was served before.

        Raises:
            EdgekitError: it cannot be opened any more.
        """

    def confirm(self, name: str, version: str) -> None:
        """Record that a version serves well.

        Raises:
            EdgekitError: it cannot be recorded.
        """


@dataclass(slots=True, eq=False)
class Served:
    """One version of a model that takes calls.

    Attributes:
        loaded: its sessions.
        codec: for its requests.
        metrics: what its lane counts.
        own_lane: the lane to its sessions.
        lane: where its calls go: `own_lane`, or a canary, a cache or the like in front of it.
    """

    loaded: Loaded
    codec: Codec
    metrics: LaneMetrics
    own_lane: DrainingLane
    lane: Lane

    @property
    def version(self) -> str:
        """Of its package."""
        return self.loaded.manifest.version


MakeServed: TypeAlias = Callable[[Loaded], Served]


@dataclass(frozen=True, slots=True)
class Status:
    """A line of the repository's index.

    Attributes:
        name, version: of the model; the version is empty where none was ever loaded.
        state: `READY`, `LOADING` or `UNAVAILABLE`.
        reason: why it is not ready, or empty.
    """

    name: str
    version: str
    state: str
    reason: str = ""


class _Model:
    """What is known of one name."""

    __slots__ = ("default", "lock", "reason", "state", "versions")

    def __init__(self) -> None:
        self.versions: dict[str, Served] = {}
        self.default: Served | None = None
        self.state = "UNAVAILABLE"
        self.reason = "not loaded"
        self.lock = asyncio.Lock()


class Registry:
    """All models by name and version."""

    def __init__(
        self,
        source: Source,
        make_served: MakeServed,
        options: Mapping[str, ModelOptions],
        metrics: ServiceMetrics,
        *,
        cap_bytes: int | None = None,
    ) -> None:
        """Make a registry without models.

        Args:
            source: where packages lie.
            make_served: makes what takes the calls of a version, on the loop's thread.
            options: by name, for the models that have some of their own.
            metrics: where changes of versions are counted.
            cap_bytes: of all models together, or None; the least recently used ones make room.
        """
        self._source = source
        self._make_served = make_served
        self._options = options
        self._metrics = metrics
        self._cap_bytes = cap_bytes
        self._loading = asyncio.Lock()  # one model at a time makes room and takes it
        self._recalls: set[asyncio.Task[None]] = set()
        self._models: dict[str, _Model] = {}
        self._thread = ThreadPoolExecutor(1, "edgekit-load")
        self._unconfirmed: dict[tuple[str, str], asyncio.TimerHandle] = {}

    def find(self, name: str, version: str | None) -> Served:
        """Return what serves `name`, of the given version or of the default one.

        Raises:
            RequestError: there is no such model, no such version, or it is not ready.
        """
        model = self._models.get(name)
        if model is not None:
            served = model.default if version is None else model.versions.get(version)
            if served is not None:
                return served
        raise self._explain(name, version)

    def served(self) -> list[Served]:
        """Return all that is ready, the default version of each name first."""
        found = []
        for model in self._models.values():
            first = [model.default] if model.default is not None else []
            found += [*first, *(served for served in model.versions.values() if served is not model.default)]
        return found

    def versions_of(self, name: str) -> list[str]:
        """Return the versions of `name` that are ready."""
        model = self._models.get(name)
        return [] if model is None else list(model.versions)

    def index(self) -> list[Status]:
        """Return the state of all models, installed or loaded.

        Raises:
            EdgekitError: the installed ones cannot be listed.
        """
        lines = []
        for name in sorted({*self._source.names(), *self._models}):
            model = self._models.get(name) or _Model()
            lines += [Status(name, version, "READY") for version in model.versions]
            if not model.versions or model.reason:
                lines.append(Status(name, "", model.state, model.reason))
        return lines

    def is_ready(self) -> bool:
        """Whether every model that was asked for serves."""
        return all(model.default is not None or model.state in _AT_REST for model in self._models.values())

    async def load_all(self) -> None:
        """Load all installed models; one that fails is said in the log and does not stop the others."""
        names = self._source.names()
        for name in names:
            self._models.setdefault(name, _Model()).state = "LOADING"
        for name in names:
            try:
                await self.load(name)
            except EdgekitError as error:  # noqa: PERF203  # one that fails stops no other
                _logger.error("model '%s' is not served: %s", name, error)  # noqa: TRY400  # says all
        await self._on_thread(settle)

    async def load(self, name: str) -> None:
        """Serve the versions of `name` that its policy asks for, in the place of those that are served.

        Where that fails, what was served before is served on.

        Raises:
            EdgekitError: that says why.
        """
        model = self._models.get(name) or _Model()
        if name in self._source.names():
            self._models[name] = model
        async with self._loading, model.lock:
            state, model.state, model.reason = model.state, "LOADING", "loading"
            try:
                await self._make_room(name)
                fresh = await self._swap(name, model)
            except EdgekitError as error:
                if name in self._models:  # else any client could make up names that stay
                    self._metrics.swaps[name, "failed"].value += 1
                model.reason = str(error)
                model.state = "READY" if model.versions else "UNAVAILABLE"
                if state == "RECALLED" and isinstance(error, MemoryCapError):
                    model.state = "EVICTED"  # the next request tries again
                raise
            except BaseException:
                model.state = state
                raise
            self._metrics.swaps[name, "done"].value += 1
            model.state, model.reason = "READY", ""
        self._confirm_later(name, fresh)

    async def unload(self, name: str) -> None:
        """Stop serving `name` once what is under way has been answered.

        Raises:
            RequestError: no such model is loaded.
        """
        model = self._models.get(name)
        if model is None or not model.versions:
            raise RequestError(404, f"model '{name}' is not loaded")
        async with model.lock:
            old = self._take_out(model)
            model.state, model.reason = "UNLOADED", "unloaded"
            await self._retire(old)

    async def close(self) -> None:
        """Stop serving all models; those that served until now served well."""
        for name, version in list(self._unconfirmed):
            self._confirm(name, version)
        for model in self._models.values():
            async with model.lock:
                await self._retire(self._take_out(model))
        self._thread.shutdown()

    def abandon(self) -> None:
        """Wait for nothing any more, where `close` takes too long."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _swap(self, name: str, model: _Model) -> list[Served]:
        options = self._options.get(name, ModelOptions())
        before = [served.loaded.path for served in model.versions.values()]
        order: SwapOrder = "availability"
        if before:
            packages = await self._on_thread(functools.partial(self._source.find, name))
            order = choose_order(needed_bytes(packages), available_bytes(), options.swap)
        if order == "resource":
            await self._retire(self._take_out(model))
            try:
                fresh = await self._open(name, options)
            except EdgekitError:
                again = [functools.partial(self._source.reopen, path, options) for path in before]
                opened = [await self._on_thread(reopen) for reopen in again]
                self._put_in(model, [self._make_served(loaded) for loaded in opened])
                raise
        else:
            fresh = await self._open(name, options)
        old = self._take_out(model)
        self._put_in(model, fresh)
        self._models[name] = model
        await self._retire(old)
        return fresh

    async def _make_room(self, name: str) -> None:
        """Unload the least recently used models until `name` fits under the cap.

        Raises:
            MemoryCapError: it never fits.
        """
        if self._cap_bytes is None:
            return
        packages = await self._on_thread(functools.partial(self._source.find, name))
        others = {
            other: [(served.loaded, served.metrics) for served in model.versions.values()]
            for other, model in self._models.items()
            if other != name
        }
        for victim in choose_victims(others, needed_bytes(packages), self._cap_bytes):
            model = self._models[victim]
            async with model.lock:
                old = self._take_out(model)
                model.state = "EVICTED"
                model.reason = "unloaded to make room; loaded again when it is asked for"
                await self._retire(old)

    def _recall(self, name: str) -> None:
        """Load a model again that had to make room."""

        async def load() -> None:
            try:
                await self.load(name)
            except EdgekitError as error:
                _logger.warning("model '%s' is not loaded again: %s", name, error)

        task = asyncio.get_running_loop().create_task(load())
        self._recalls.add(task)
        task.add_done_callback(self._recalls.discard)

    async def _open(self, name: str, options: ModelOptions) -> list[Served]:
        opened = await self._on_thread(functools.partial(self._source.open, name, options))
        return [self._make_served(loaded) for loaded in opened]

    def _confirm_later(self, name: str, fresh: Sequence[Served]) -> None:
        """Count a version as good once it has served for a while: crashes come with the first requests."""
        loop = asyncio.get_running_loop()
        for served in fresh:
            confirm = functools.partial(self._confirm, name, served.version)
            self._unconfirmed[name, served.version] = loop.call_later(_CONFIRM_AFTER_S, confirm)

    def _confirm(self, name: str, version: str) -> None:
        timer = self._unconfirmed.pop((name, version), None)
        if timer is not None:
            timer.cancel()
            self._thread.submit(self._record, name, version)

    def _record(self, name: str, version: str) -> None:
        try:
            self._source.confirm(name, version)
        except EdgekitError as error:
            _logger.warning("%s %s serves well, which is not recorded: %s", name, version, error)

    @staticmethod
    def _put_in(model: _Model, fresh: Sequence[Served]) -> None:
        """Let requests find `fresh`, of which the first answers those that name no version."""
        model.versions = {served.version: served for served in fresh}
        model.default = fresh[0]

    def _take_out(self, model: _Model) -> list[Served]:
        old = list(model.versions.values())
        for served in old:
            timer = self._unconfirmed.pop((served.loaded.manifest.name, served.version), None)
            if timer is not None:
                timer.cancel()
        model.versions, model.default = {}, None
        return old

    async def _retire(self, old: Sequence[Served]) -> None:
        """Let what is under way end, then free the sessions."""
        for served in old:
            drained = asyncio.get_running_loop().create_future()
            served.own_lane.drain(functools.partial(_settle, drained))
            await drained
            await self._on_thread(functools.partial(unload, served.loaded.instances))

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _explain(self, name: str, version: str | None) -> RequestError:
        model = self._models.get(name)
        if model is None:
            known = ", ".join(sorted(self._models)[:20]) or "none"
            return RequestError(404, f"model '{name[:80]}' is unknown, there are: {known}")
        if model.versions:
            known = ", ".join(model.versions)
            return RequestError(
                404, f"model '{name}' has no version '{str(version)[:80]}', there are: {known}"
            )
        if model.state == "EVICTED":
            model.state = "RECALLED"
            self._recall(name)
        if model.state in ("LOADING", "RECALLED"):
            return RequestError(503, f"model '{name}' is being loaded", retry_after_s=_SWAP_RETRY_S)
        return RequestError(503, f"model '{name}' is not ready: {model.reason}")


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
