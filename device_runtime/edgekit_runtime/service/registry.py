"""The models that are served: found for every request, loaded, swapped, tried and unloaded now and then.

All of it happens on the thread of the event loop; what waits for the disk and for engines is `keeping`'s.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgekit_runtime.errors import EdgekitError, RequestError, UnavailableError
from edgekit_runtime.service.call import Lane
from edgekit_runtime.service.eviction import MemoryCapError
from edgekit_runtime.service.keeping import Keeper, MakeServed, Source
from edgekit_runtime.service.loading import ModelOptions, settle
from edgekit_runtime.service.memory import available_bytes, needed_bytes
from edgekit_runtime.service.metrics import ServiceMetrics
from edgekit_runtime.service.model import EvictedError, Model
from edgekit_runtime.service.rollouts import Rollouts
from edgekit_runtime.service.room import ModelMemory, Resident, choose_victims, estimate_bytes
from edgekit_runtime.service.served import Served
from edgekit_runtime.service.versions import SwapOrder, choose_order

_SWAP_RETRY_S: Final = 1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """A line of the repository's index.

    Attributes:
        name, version: of the model; the version is empty where none was ever loaded.
        state: `READY`, `LOADING`, `UNLOADED` or `UNAVAILABLE`.
        reason: why it is not ready, or what is special about it, or empty.
    """

    name: str
    version: str
    state: str
    reason: str = ""


class Registry:
    """All models by name and version.

    Attributes:
        metrics: where changes are counted; outcomes are `swapped`, `failed`, `tried`, `promoted`,
            `rolled_back`, `evicted` and `unloaded`.
    """

    def __init__(
        self,
        source: Source,
        make_served: MakeServed,
        options: Mapping[str, ModelOptions],
        *,
        memory: ModelMemory | None = None,
        metrics: ServiceMetrics | None = None,
    ) -> None:
        """Make a registry without models.

        Args:
            source: where packages lie.
            make_served: makes what takes the calls of a version, on the loop's thread.
            options: by name, for the models that have some of their own.
            memory: that all models may take together; by default there is no cap.
            metrics: where changes are counted.
        """
        self._source = source
        self._keeper = Keeper(source, make_served)
        self._options = options
        self._memory = memory or ModelMemory()
        self._models: dict[str, Model] = {}
        self._room = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.metrics = metrics or ServiceMetrics()
        self._rollouts = Rollouts(self._keeper, self.metrics, self._start)

    def find(self, name: str, version: str | None) -> Served:
        """Return what serves `name`, of the given version or of the default one.

        Raises:
            EvictedError: it was unloaded for others; see `wait_for`.
            RequestError: there is no such model, no such version, or it is not ready.
        """
        model = self._models.get(name)
        if model is not None:
            served = model.default if version is None else model.versions.get(version)
            if served is not None:
                return served
        raise self._explain(name, version)

    def find_lane(self, name: str, version: str | None) -> Lane | None:
        """Return the lane to the sessions of a version, or None where it is not ready."""
        model = self._models.get(name)
        if model is None:
            return None
        served = model.default if version is None else model.versions.get(version)
        return None if served is None else served.own_lane

    def put_off(self, name: str, version: str) -> None:
        """Wait anew before a version counts as good: it has crashed."""
        self._keeper.put_off(name, version)

    async def give_up(self, name: str, version: str, reason: str) -> None:
        """Serve another version in the place of one that keeps failing, if there is one."""
        reject = functools.partial(self._source.reject, name, version, reason)
        try:
            if await self._keeper.on_thread(reject):
                await self.load(name)
        except EdgekitError as error:
            _logger.error("%s %s keeps failing, and nothing takes its place: %s", name, version, error)  # noqa: TRY400  # says all

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
            model = self._models.get(name) or Model()
            for version, served in model.versions.items():
                is_candidate = model.trial is not None and served is model.trial.candidate
                said = model.trial.describe() if model.trial is not None and is_candidate else ""
                lines.append(Status(name, version, "READY", said))
            lines += [Status(name, version, "UNAVAILABLE", said) for version, said in model.failed.items()]
            if not model.versions or model.reason:
                lines.append(Status(name, "", model.state, model.reason))
        return lines

    def is_ready(self) -> bool:
        """Whether every model that was asked for serves, or will at its next request."""
        return all(
            model.default is not None or model.is_evicted or model.state == "UNLOADED"
            for model in self._models.values()
        )

    def look(self) -> None:
        """Judge what is on trial; to be called every second or so, as a verdict may fall by time alone."""
        for model in self._models.values():
            if model.trial is not None:
                model.trial.watch.look()

    async def load_all(self) -> None:
        """Load all installed models; one that fails is said in the log and does not stop the others."""
        names = self._source.names()
        for name in names:
            self._models.setdefault(name, Model()).state = "LOADING"
        for name in names:
            try:
                await self.load(name, for_others=False)
            except EdgekitError as error:  # noqa: PERF203  # one that fails stops no other
                _logger.error("model '%s' is not served: %s", name, error)  # noqa: TRY400  # says all
        await self._keeper.on_thread(settle)

    async def load(self, name: str, *, for_others: bool = True) -> None:
        """Serve the versions of `name` that its policy asks for, in the place of those that are served.

        Where that fails, what was served before is served on.

        Args:
            name: of the model.
            for_others: whether others may be unloaded for it; else it waits for its first request, where the
                memory cap leaves no room.

        Raises:
            EdgekitError: that says why.
        """
        model = self._models.get(name) or Model()
        if name in self._source.names():
            self._models[name] = model
        async with model.lock:
            state, model.state, model.reason = model.state, "LOADING", "loading"
            try:
                await self._swap(name, model, for_others=for_others)
            except EdgekitError as error:
                if name in self._models:  # else any client could make up names that stay
                    self.metrics.swaps[name, "failed"].value += 1
                model.reason = str(error)
                model.is_evicted = model.is_evicted and isinstance(error, UnavailableError)
                model.state = "READY" if model.versions else "UNAVAILABLE"
                raise
            except BaseException:
                model.state = state
                raise
            if not model.is_evicted:
                model.state, model.reason = "READY", ""

    async def unload(self, name: str) -> None:
        """Stop serving `name` once what is under way has been answered.

        Raises:
            RequestError: no such model is loaded.
        """
        model = self._models.get(name)
        if model is None or not (model.versions or model.is_evicted):
            raise RequestError(404, f"model '{name}' is not loaded")
        async with model.lock:
            model.state, model.reason, model.is_evicted = "UNLOADED", "unloaded", False
            self.metrics.swaps[name, "unloaded"].value += 1
            await self._keeper.retire(model.take_out(self._keeper))

    async def wait_for(self, name: str) -> None:
        """Return once a model that was unloaded for others is loaded again.

        Raises:
            UnavailableError: too many wait already, or it takes too long.
            EdgekitError: it cannot be loaded.
        """
        model = self._models[name]
        if model.waiting >= self._memory.max_waiting:
            raise UnavailableError(f"{name}: is being loaded, and too many calls wait already", _SWAP_RETRY_S)
        if model.loading is None or model.loading.done():
            model.loading = self._start(self.load(name))
        model.waiting += 1
        try:
            await asyncio.wait_for(asyncio.shield(model.loading), self._memory.load_wait_s)
        except asyncio.TimeoutError:
            wait_s = self._memory.load_wait_s
            raise UnavailableError(
                f"{name}: is not loaded after {wait_s:g} s; try again", _SWAP_RETRY_S
            ) from None
        finally:
            model.waiting -= 1

    async def close(self) -> None:
        """Stop serving all models; those that served until now served well."""
        self._keeper.confirm_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._room:
            for model in self._models.values():
                async with model.lock:
                    await self._keeper.retire(model.take_out(self._keeper))
        self._keeper.shutdown()

    def abandon(self) -> None:
        """Wait for nothing any more, where `close` takes too long."""
        self._keeper.abandon()

    async def _swap(self, name: str, model: Model, *, for_others: bool) -> None:
        options = self._options.get(name, ModelOptions())
        async with self._room:
            order = await self._choose_order(name, model, options, for_others=for_others)
            if order is None:
                model.state, model.is_evicted = "UNAVAILABLE", True
                model.reason = "the memory cap leaves no room; its next request loads it"
                return
            if options.rollout.kind != "swap" and await self._rollouts.begin(name, model, options):
                return
            if order == "resource":
                fresh = await self._reopen_or_open(name, model, options)
            else:
                fresh = await self._keeper.open(name, options)
        old = model.take_out(self._keeper)
        model.put_in(fresh)
        self._models[name] = model
        if old:
            self.metrics.swaps[name, "swapped"].value += 1
        await self._keeper.retire(old)
        self._keeper.confirm_later(fresh)

    async def _reopen_or_open(self, name: str, model: Model, options: ModelOptions) -> list[Served]:
        """Unload first; where the new version cannot be opened, what was there before serves again."""
        before = [served.loaded.path for served in model.versions.values()]
        await self._keeper.retire(model.take_out(self._keeper))
        try:
            return await self._keeper.open(name, options)
        except EdgekitError:
            model.put_in([await self._keeper.reopen(path, options) for path in before])
            raise

    async def _choose_order(
        self, name: str, model: Model, options: ModelOptions, *, for_others: bool
    ) -> SwapOrder | None:
        """Return the order of the swap, with room made for it; None where the model is to wait for a request.

        Raises:
            MemoryCapError: the cap leaves no room.
        """
        if not model.versions and self._memory.max_bytes is None:
            return "availability"
        packages = await self._keeper.on_thread(functools.partial(self._source.find, name))
        with contextlib.suppress(RequestError):  # opening says what is missing
            packages = options.policy.choose(name, packages)
        order: SwapOrder = "availability"
        if model.versions:
            order = choose_order(needed_bytes(packages), available_bytes(), options.swap)
        if self._memory.max_bytes is None:
            return order
        needed = await self._keeper.on_thread(functools.partial(estimate_bytes, packages))
        if order == "availability":
            try:
                await self._make_room(needed, for_others=for_others)
            except MemoryCapError as error:
                if not model.versions:
                    if for_others or error.retry_after_s is None:
                        raise
                    return None
            else:
                return order
        await self._make_room(needed, for_others=for_others, without=name)
        return "resource"

    async def _make_room(self, needed: int, *, for_others: bool, without: str = "") -> None:
        while victims := choose_victims(
            [
                self._describe(name, model, for_others)
                for name, model in self._models.items()
                if name != without
            ],
            needed,
            self._memory.max_bytes or 0,
        ):
            # Without its lock, which a load of it may hold that waits for this one to end.
            model = self._models[victims[0]]
            _logger.info("model '%s' is unloaded to make room for another", victims[0])
            self.metrics.swaps[victims[0], "evicted"].value += 1
            old = model.take_out(self._keeper)
            model.state, model.is_evicted = "UNAVAILABLE", True
            model.reason = "unloaded to make room for others; its next request loads it"
            await self._keeper.retire(old)

    def _describe(self, name: str, model: Model, for_others: bool) -> Resident:
        # At the start nothing goes for another: each model that fits is loaded, in their order.
        is_changing = model.lock.locked() or not for_others
        is_pinned = self._options.get(name, ModelOptions()).keep_loaded
        return Resident(name, tuple(model.versions.values()), model.loaded_s, is_pinned, is_changing)

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EdgekitError):
            _logger.error("a change of a model failed inside the service", exc_info=error)

    def _explain(self, name: str, version: str | None) -> EdgekitError:
        model = self._models.get(name)
        if model is None:
            known = ", ".join(sorted(self._models)[:20]) or "none"
            return RequestError(404, f"model '{name[:80]}' is unknown, there are: {known}")
        if model.versions:
            known = ", ".join(model.versions)
            return RequestError(
                404, f"model '{name}' has no version '{str(version)[:80]}', there are: {known}"
            )
        if model.is_evicted:
            return EvictedError(name, model.reason)
        if model.state == "LOADING":
            return RequestError(503, f"model '{name}' is being loaded", retry_after_s=_SWAP_RETRY_S)
        return RequestError(503, f"model '{name}' is not ready: {model.reason}")
