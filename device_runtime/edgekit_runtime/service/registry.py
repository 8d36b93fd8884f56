"""The models that are served: found for every request, loaded, swapped and unloaded now and then.

All of it happens on the thread of the event loop, but for reading packages and opening sessions, which happens
on one thread of its own: two models that load at once would need twice the memory for loading.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.service.call import Lane
from edgekit_runtime.service.loading import Loaded, unload
from edgekit_runtime.service.memory import available_bytes, needed_bytes
from edgekit_runtime.service.oip import Codec
from edgekit_runtime.service.versions import Installed, SwapOrder, VersionPolicy, choose_order

Result = TypeVar("Result")

_SWAP_RETRY_S: Final = 1

_logger = logging.getLogger(__name__)


class DrainingLane(Lane, Protocol):
    """A lane that can come to its end."""

    def drain(self, done: Callable[[], None]) -> None:
        """Take no more calls, and call `done` once those that were taken are answered, maybe at once."""


class Source(Protocol):
    """Where packages lie."""

    def names(self) -> Sequence[str]:
        """Return the names of all installed models."""

    def find(self, name: str) -> Sequence[Installed]:
        """Return the installed packages of a model."""


MakeLane = Callable[[Loaded], DrainingLane]
MakeCodec = Callable[[Loaded], Codec]


@dataclass(slots=True, eq=False)
class Served:
    """One version of a model that takes calls.

    Attributes:
        installed: its package.
        loaded: its session.
        codec: for its requests.
        lane: in front of its session; a canary or a cache may be put in the lane's place.
        own_lane: the lane to its session.
    """

    installed: Installed
    loaded: Loaded
    codec: Codec
    lane: Lane
    own_lane: DrainingLane


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How one model is kept.

    Attributes:
        policy: which of its versions are served.
        swap: order of a swap, or None to choose by the memory that is free.
        threads: of one inference, or None as its package says.
    """

    policy: VersionPolicy = field(default_factory=VersionPolicy)
    swap: SwapOrder | None = None
    threads: int | None = None


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
        load: Callable[[Installed, ModelOptions], Loaded],
        *,
        make_lane: MakeLane,
        make_codec: MakeCodec,
        options: Mapping[str, ModelOptions],
    ) -> None:
        """Make a registry without models.

        Args:
            source: where packages lie.
            load: opens one; called on a thread.
            make_lane: makes the lane to a session.
            make_codec: makes the codec of a model.
            options: by name, for the models that have some of their own.
        """
        self._source = source
        self._load = load
        self._make_lane = make_lane
        self._make_codec = make_codec
        self._options = options
        self._models: dict[str, _Model] = {}
        self._thread = ThreadPoolExecutor(1, "edgekit-load")

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
        """Return the state of all models, installed or loaded."""
        lines = []
        for name in sorted({*self._source.names(), *self._models}):
            model = self._models.get(name)
            if model is None:
                lines += [
                    Status(name, package.version, "UNAVAILABLE", "not loaded")
                    for package in self._source.find(name)
                ]
                continue
            lines += [Status(name, version, "READY") for version in model.versions]
            if not model.versions or model.reason:
                lines.append(Status(name, "", model.state, model.reason))
        return lines

    def is_ready(self) -> bool:
        """Whether every model that was asked for serves."""
        return all(model.default is not None or model.state == "UNLOADED" for model in self._models.values())

    async def load_all(self) -> None:
        """Load all installed models; one that fails is said in the log and does not stop the others."""
        names = self._source.names()
        for name in names:
            self._models.setdefault(name, _Model()).state = "LOADING"
        for name in names:
            try:
                await self.load(name)
            except EdgekitError as error:
                _logger.error("model '%s' is not served: %s", name, error)  # noqa: TRY400  # ours explain themselves

    async def load(self, name: str) -> None:
        """Load the versions of `name` that its policy asks for, in the place of those that are served.

        Where that fails, what was served before is served on.

        Raises:
            EdgekitError: that says why.
        """
        options = self._options.get(name, ModelOptions())
        chosen = options.policy.choose(name, self._source.find(name))
        model = self._models.setdefault(name, _Model())
        async with model.lock:
            model.state, model.reason = "LOADING", "loading"
            try:
                await self._swap(model, chosen, options)
            except EdgekitError as error:
                model.reason = str(error)
                model.state = "UNAVAILABLE"
                raise
            model.state, model.reason = "READY", ""

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
        """Stop serving all models."""
        for model in self._models.values():
            async with model.lock:
                await self._retire(self._take_out(model))
        self._thread.shutdown()

    async def _swap(self, model: _Model, chosen: Sequence[Installed], options: ModelOptions) -> None:
        before = [served.installed for served in model.versions.values()]
        order = choose_order(needed_bytes(chosen), available_bytes(), options.swap)
        if order == "resource" and before:
            await self._retire(self._take_out(model))
            try:
                fresh = await self._open(chosen, options)
            except EdgekitError:
                self._put_in(model, await self._open(before, options))
                raise
        else:
            fresh = await self._open(chosen, options)
        old = self._take_out(model)
        self._put_in(model, fresh)
        await self._retire(old)

    async def _open(self, chosen: Sequence[Installed], options: ModelOptions) -> list[Served]:
        opened: list[Served] = []
        try:
            for installed in chosen:
                loaded = await self._on_thread(functools.partial(self._load, installed, options))
                lane = self._make_lane(loaded)
                opened.append(Served(installed, loaded, self._make_codec(loaded), lane, lane))
        except BaseException:
            await self._retire(opened)
            raise
        return opened

    @staticmethod
    def _put_in(model: _Model, fresh: Sequence[Served]) -> None:
        """Let requests find `fresh`, of which the first answers those that name no version."""
        model.versions = {served.installed.version: served for served in fresh}
        model.default = fresh[0]

    @staticmethod
    def _take_out(model: _Model) -> list[Served]:
        old = list(model.versions.values())
        model.versions, model.default = {}, None
        return old

    async def _retire(self, old: Sequence[Served]) -> None:
        """Let what is under way end, then free the sessions."""
        for served in old:
            drained = asyncio.get_running_loop().create_future()
            served.own_lane.drain(functools.partial(_settle, drained))
            await drained
            await self._on_thread(functools.partial(unload, served.loaded.session))

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
        if model.state == "LOADING":
            return RequestError(503, f"model '{name}' is being loaded", retry_after_s=_SWAP_RETRY_S)
        return RequestError(503, f"model '{name}' is not ready: {model.reason}")


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
