"""Keeping all models under one memory cap: what a model takes, and which others go for it."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from edgekit_runtime.errors import PackageError, RequestError
from edgekit_runtime.package.archive import read_unverified_manifest
from edgekit_runtime.service.models.entry import Model
from edgekit_runtime.service.models.eviction import MemoryCapError, Resident, choose_evictions
from edgekit_runtime.service.models.lifecycle import Keeper
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy, choose_order
from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.options.model import ModelOptions, SwapOrder
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.service.serving.memory_estimate import (
    count_processes,
    count_sessions,
    model_bytes,
    needed_bytes,
)
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.system.machine import available_bytes

_POLL_S: Final = 0.02  # for a model in the way whose calls end

_logger = logging.getLogger(__name__)


def estimate_bytes(packages: Iterable[Servable], options: ModelOptions | None = None) -> int:
    """Return about what the models of `packages` take once they are loaded; see `model_bytes`.

    What `tune` found counts only once they are: asking for it would load the engine.
    """
    options = options or ModelOptions()
    total = 0
    for package in packages:
        with contextlib.suppress(PackageError):  # opening it says what is wrong
            manifest = read_unverified_manifest(package.path, check_artifacts=False).manifest
            sessions = count_sessions(manifest, options.instances) * count_processes(options)
            total += model_bytes(manifest, package.path, options.governor, sessions)
    return total


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model is to be loaded.

    Attributes:
        order: of a swap.
        needed_bytes: by what is to be loaded; 0 where no cap asks for it.
        for_others: whether others may be unloaded for it.
    """

    order: SwapOrder
    needed_bytes: int
    for_others: bool


Decision: TypeAlias = tuple[LoadPlan | None, str | None]
"""How to load, and what has to go before, if anything; None: it is to wait for a request."""


class Room:
    """Says in which order a model is swapped, and unloads others for it where the memory cap asks for it."""

    def __init__(
        self,
        keeper: Keeper,
        models: Mapping[str, Model],
        options: Mapping[str, ModelOptions],
        memory: ModelMemory,
        metrics: ServiceMetrics,
    ) -> None:
        """Look after the memory of `models`.

        Args:
            keeper: frees what is unloaded.
            models: by name, as they change.
            options: by name, for the models that have some of their own.
            memory: the cap.
            metrics: where what is unloaded is counted.
        """
        self._keeper, self._models, self._options = keeper, models, options
        self._memory, self._metrics = memory, metrics
        self._going = 0  # models that are being unloaded for others
        self._promised: list[Resident] = []  # models that are being loaded

    @contextlib.asynccontextmanager
    async def plan(
        self, name: str, model: Model, *, for_others: bool, patience_s: float
    ) -> AsyncIterator[LoadPlan | None]:
        """Say how to load a model, with room made for it that no other is given during the block.

        It is None where the model is to wait for a request.

        Args:
            name: of the model.
            model: what serves now.
            for_others: whether others may be unloaded for it.
            patience_s: how long calls of others that stand in its way are waited for.

        Raises:
            MemoryCapError: the cap leaves no room.
        """
        wanted = await self._want(name, model, for_others=for_others)
        async with self._hold(name, lambda: self._decide(name, model, wanted), patience_s) as plan:
            yield plan

    @contextlib.asynccontextmanager
    async def make(self, name: str, plan: LoadPlan) -> AsyncIterator[None]:
        """Make room that no other is given during the block, once what makes way itself is unloaded.

        Args:
            name: of the model.
            plan: of what is to be loaded.

        Raises:
            MemoryCapError: the cap leaves no room.
        """
        async with self._hold(name, lambda: (plan, self._choose_victim(plan)), 0.0):
            yield

    async def _want(self, name: str, model: Model, *, for_others: bool) -> LoadPlan:
        """Return how to load a model if the cap leaves room."""
        if not model.versions and self._memory.max_bytes is None:
            return LoadPlan("availability", 0, for_others)
        options = self._options.get(name, ModelOptions())
        find = functools.partial(self._keeper.source.find, name, VersionPolicy.of(options))
        packages: Sequence[Servable] = ()
        with contextlib.suppress(RequestError):  # opening says what is missing
            packages = await self._keeper.on_thread(find)
        order: SwapOrder = "availability"
        if model.versions:
            needed = needed_bytes(package.path for package in packages)
            order = choose_order(needed, available_bytes(), options.swap)
        if self._memory.max_bytes is None:
            return LoadPlan(order, 0, for_others)
        needed = await self._keeper.on_thread(functools.partial(estimate_bytes, packages, options))
        return LoadPlan(order, needed, for_others)

    def _decide(self, name: str, model: Model, wanted: LoadPlan) -> Decision:
        if wanted.order == "availability":
            try:
                return wanted, self._choose_victim(wanted)
            except MemoryCapError as error:
                if not model.versions:
                    if wanted.for_others or error.retry_after_s is None:
                        raise
                    return None, None
        instead = replace(wanted, order="resource")
        return instead, self._choose_victim(instead, without=name)

    @contextlib.asynccontextmanager
    async def _hold(
        self, name: str, decide: Callable[[], Decision], patience_s: float
    ) -> AsyncIterator[LoadPlan | None]:
        """Unload others until there is room, and keep it; who needs none of that room does not wait."""
        end_s = time.monotonic() + patience_s
        while True:
            try:
                plan, victim = decide()
            except MemoryCapError as error:  # noqa: PERF203  # each is a try of its own
                may_change = self._going or self._promised or time.monotonic() < end_s
                if error.retry_after_s is None or not may_change:
                    raise
                await asyncio.sleep(_POLL_S)
            else:
                if victim is None:
                    break
                await self._unload(self._take_out(victim))
        needed_bytes = 0 if plan is None else plan.needed_bytes
        promise = Resident(name, needed_bytes, 0.0, is_busy=True)
        self._promised.append(promise)
        try:
            yield plan
        finally:
            self._promised.remove(promise)

    def _choose_victim(self, plan: LoadPlan, *, without: str = "") -> str | None:
        """Return the model to unload next, or None where there is room.

        Args:
            plan: of what is to be loaded.
            without: name of a model that does not count, since it makes way itself.
        """
        if self._memory.max_bytes is None:
            return None
        residents = self._list_residents(plan.for_others, without)
        victims = choose_evictions(residents, plan.needed_bytes, self._memory.max_bytes)
        return victims[0].name if victims else None

    def _take_out(self, name: str) -> list[Served]:
        # Without its lock, which a load of it may hold that waits for this one to end.
        model = self._models[name]
        _logger.info("model '%s' is unloaded to make room for another", name)
        self._metrics.swaps[name, "evicted"].value += 1
        old = model.take_out(self._keeper)
        model.state, model.is_evicted = "UNAVAILABLE", True
        model.reason = "unloaded to make room for others; its next request loads it"
        return old

    async def _unload(self, old: list[Served]) -> None:
        self._going += 1
        try:
            await self._keeper.retire(old)
        finally:
            self._going -= 1

    def _list_residents(self, for_others: bool, without: str) -> list[Resident]:
        # What hangs was given up, and still has its memory.
        leaving = [
            Resident(served.loaded.manifest.name, served.memory_bytes, 0.0, is_busy=True)
            for served in self._keeper.leaving
        ]
        # At the start nothing goes for another: each model that fits is loaded, in their order.
        loaded = [
            self._describe(name, model, is_busy=not for_others)
            for name, model in self._models.items()
            if model.versions and name != without
        ]
        return [*loaded, *leaving, *self._promised]

    def _describe(self, name: str, model: Model, *, is_busy: bool) -> Resident:
        versions = model.versions.values()
        return Resident(
            name,
            sum(served.memory_bytes for served in versions),
            max([model.loaded_s, *(served.metrics.last_s or 0.0 for served in versions)]),
            self._options.get(name, ModelOptions()).keep_loaded,
            is_busy or model.lock.locked() or not all(served.own_lane.is_idle for served in versions),
        )
