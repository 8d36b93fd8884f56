"""Enforces one memory cap for all models. It plans loads, and unloads other models to make room."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from edgekit_runtime.errors import PackageError, RequestError
from edgekit_runtime.package.archive import read_unverified_manifest
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.models.catalogue import ModelEntry
from edgekit_runtime.service.models.eviction import MemoryCapError, Resident, choose_evictions
from edgekit_runtime.service.models.lifecycle import Lifecycle
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy, choose_order
from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.options.model import ModelOptions, SwapOrder
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.service.serving.memory_estimate import count_sessions, model_bytes, needed_bytes
from edgekit_runtime.system.machine import available_bytes

_POLL_S: Final = 0.02  # while the calls of a model to be unloaded end

_logger = logging.getLogger(__name__)


def estimate_bytes(packages: Sequence[Servable], options: ModelOptions | None = None) -> int:
    """Estimate the memory of `packages` in bytes from their manifests.

    The number of sessions comes from the options. The number that `tune` found is ignored, because reading it
    would load the engine.
    """
    options = options or ModelOptions()
    total = 0
    for package in packages:
        with contextlib.suppress(PackageError):  # opening it says what is wrong
            manifest = read_unverified_manifest(package.path, check_artifacts=False).manifest
            total += model_bytes(manifest, package.path, options, count_sessions(manifest, options))
    return total


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A plan for loading one model.

    Attributes:
        order: The order of loading the new version and unloading the old one, see `SwapOrder`.
        needed_bytes: The memory that the new versions need. 0 if there is no cap.
        for_others: Whether other models may be unloaded to make room.
    """

    order: SwapOrder
    needed_bytes: int
    for_others: bool


Decision: TypeAlias = tuple[LoadPlan | None, str | None]
"""How to load a model, or None to wait for a request, and the model to unload first, if any."""


class MemoryCap:
    """Plans loads and swaps of models, and unloads other models if the cap requires it."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        models: Mapping[str, ModelEntry],
        options: Mapping[str, ModelOptions],
        memory: ModelMemory,
        metrics: ServiceMetrics,
    ) -> None:
        self._lifecycle, self._models, self._options = lifecycle, models, options
        self._memory, self._metrics = memory, metrics
        self._leaving = 0  # models that are being unloaded for others
        self._reserved: list[Resident] = []  # for models that are being loaded

    @contextlib.asynccontextmanager
    async def plan(
        self, model: ModelEntry, *, for_others: bool, patience_s: float
    ) -> AsyncIterator[LoadPlan | None]:
        """Yield a plan for loading a model, and reserve its memory within the `async with` block.

        The plan is None if `for_others` is False, and the model is not loaded and does not fit now. The first
        request then loads the model.

        Args:
            model: The model to load.
            for_others: Whether other models may be unloaded to make room.
            patience_s: The longest wait until busy models can be unloaded.

        Raises:
            MemoryCapError: The model can never fit, or there was no room within `patience_s`.
        """
        load_plan = await self._estimate(model, for_others=for_others)
        async with self._hold(model, lambda: self._decide(model, load_plan), patience_s) as plan:
            yield plan

    @contextlib.asynccontextmanager
    async def reserve(self, model: ModelEntry, plan: LoadPlan) -> AsyncIterator[None]:
        """Reserve memory for a model within the `async with` block.

        The old versions of the model must be unloaded already.

        Raises:
            MemoryCapError: There is no room under the cap.
        """
        async with self._hold(model, lambda: (plan, self._choose_victim(plan)), 0.0):
            yield

    async def _estimate(self, model: ModelEntry, *, for_others: bool) -> LoadPlan:
        """Return the plan for loading a model if the cap leaves room."""
        if not model.versions and self._memory.max_bytes is None:
            return LoadPlan("availability", 0, for_others)
        options = self._options.get(model.name, ModelOptions())
        packages: Sequence[Servable] = ()
        with contextlib.suppress(RequestError):  # opening says what is missing
            find = self._lifecycle.source.find
            packages = await self._lifecycle.on_thread(find, model.name, VersionPolicy.of(options))
        order: SwapOrder = "availability"
        if model.versions:
            needed = needed_bytes(package.path for package in packages)
            order = choose_order(needed, available_bytes(), options.swap)
        if self._memory.max_bytes is None:
            return LoadPlan(order, 0, for_others)
        needed = await self._lifecycle.on_thread(estimate_bytes, packages, options)
        return LoadPlan(order, needed, for_others)

    def _decide(self, model: ModelEntry, plan: LoadPlan) -> Decision:
        if plan.order == "availability":
            try:
                return plan, self._choose_victim(plan)
            except MemoryCapError as error:
                if not model.versions:
                    if plan.for_others or error.retry_after_s is None:
                        raise
                    return None, None
        instead = replace(plan, order="resource")
        return instead, self._choose_victim(instead, without=model.name)

    @contextlib.asynccontextmanager
    async def _hold(
        self, model: ModelEntry, decide: Callable[[], Decision], patience_s: float
    ) -> AsyncIterator[LoadPlan | None]:
        """Unload other models until there is room, and reserve the room within the `async with` block."""
        end_s = time.monotonic() + patience_s
        while True:
            try:
                plan, victim = decide()
            except MemoryCapError as error:  # noqa: PERF203  # each is a try of its own
                may_change = self._leaving or self._reserved or time.monotonic() < end_s
                if error.retry_after_s is None or not may_change:
                    raise
                await asyncio.sleep(_POLL_S)
            else:
                if victim is None:
                    break
                await self._evict(victim)
        needed_bytes = 0 if plan is None else plan.needed_bytes
        reserved = Resident(model.name, needed_bytes, 0.0, is_busy=True)
        self._reserved.append(reserved)
        try:
            yield plan
        finally:
            self._reserved.remove(reserved)

    def _choose_victim(self, plan: LoadPlan, *, without: str = "") -> str | None:
        """Return the model to unload next, or None if there is room.

        Args:
            plan: The plan for loading the new model.
            without: The name of a model that is unloaded in any case, for its own new version.
        """
        if self._memory.max_bytes is None:
            return None
        residents = self._list_residents(plan.for_others, without)
        victims = choose_evictions(residents, plan.needed_bytes, self._memory.max_bytes)
        return victims[0].name if victims else None

    async def _evict(self, name: str) -> None:
        # Without its lock: a load of it may hold the lock and wait until the present load ends.
        model = self._models[name]
        _logger.info("model '%s' is unloaded to make room for another", name)
        self._metrics.swaps[name, "evicted"] += 1
        old = model.withdraw()
        model.state, model.is_evicted = "UNAVAILABLE", True
        model.reason = "unloaded to make room for others; its next request loads it"
        self._leaving += 1
        try:
            await self._lifecycle.retire(old)
        finally:
            self._leaving -= 1

    def _list_residents(self, for_others: bool, without: str) -> list[Resident]:
        # A version whose call hangs still has its memory.
        leaving = [
            Resident(served.loaded.manifest.name, served.memory_bytes, 0.0, is_busy=True)
            for served in self._lifecycle.leaving
        ]
        # At the start no model is unloaded for another: those that fit are loaded, in their order.
        loaded = [
            self._describe(model, is_busy=not for_others)
            for model in self._models.values()
            if model.versions and model.name != without
        ]
        return [*loaded, *leaving, *self._reserved]

    def _describe(self, model: ModelEntry, *, is_busy: bool) -> Resident:
        versions = model.versions.values()
        return Resident(
            model.name,
            sum(served.memory_bytes for served in versions),
            max([model.loaded_s, *(served.metrics.last_s or 0.0 for served in versions)]),
            self._options.get(model.name, ModelOptions()).keep_loaded,
            is_busy or model.lock.locked() or not all(served.own_lane.is_idle for served in versions),
        )
