"""Keeping all models under one memory cap: what a model takes, and which others go for it."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgekit_runtime.archive import read_unverified_manifest
from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.service.eviction import MemoryCapError, Resident, choose_evictions
from edgekit_runtime.service.governor_options import GovernorOptions
from edgekit_runtime.service.keeping import Keeper
from edgekit_runtime.service.loading import ModelOptions
from edgekit_runtime.service.memory import available_bytes, model_bytes, needed_bytes
from edgekit_runtime.service.metrics import ServiceMetrics
from edgekit_runtime.service.model import Model
from edgekit_runtime.service.versions import Installed, SwapOrder, choose_order

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What all models may take together.

    Attributes:
        max_bytes: of all models that are loaded, by what their packages say; None for no cap.
        load_wait_s: how long a request waits for a model that was unloaded for others, until it gets a 503.
        max_waiting: requests that wait so at once; further ones get a 503.

    Raises:
        ValueError: a value is out of range.
    """

    max_bytes: int | None = None
    load_wait_s: float = 10.0
    max_waiting: int = 128

    def __post_init__(self) -> None:
        if (
            (self.max_bytes is not None and self.max_bytes < 1)
            or self.load_wait_s < 0
            or self.max_waiting < 0
        ):
            raise ValueError(
                f"expected max_bytes over 0, load_wait_s and max_waiting of 0 or more, got {self}"
            )


def estimate_bytes(packages: Iterable[Installed], governor: GovernorOptions | None = None) -> int:
    """Return about what the models of `packages` take once they are loaded; see `model_bytes`."""
    total = 0
    for package in packages:
        with contextlib.suppress(EdgekitError):  # opening it says what is wrong
            manifest = read_unverified_manifest(package.path).manifest
            total += model_bytes(manifest, package.path, governor)
    return total


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is to be loaded.

    Attributes:
        order: of a swap.
        needed_bytes: by what is to be loaded; 0 where no cap asks for it.
        for_others: whether others may be unloaded for it.
    """

    order: SwapOrder
    needed_bytes: int
    for_others: bool


class Room:
    """Says in which order a model is swapped, and unloads others for it where the memory cap asks for it.

    Attributes:
        lock: held while room is made and used, so that no two models are given the same.
    """

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
        self.lock = asyncio.Lock()

    async def plan(self, name: str, model: Model, *, for_others: bool) -> Plan | None:
        """Return how to load a model, with room made for it; None where it is to wait for a request.

        Args:
            name: of the model.
            model: what serves now.
            for_others: whether others may be unloaded for it.

        Raises:
            MemoryCapError: the cap leaves no room.
        """
        if not model.versions and self._memory.max_bytes is None:
            return Plan("availability", 0, for_others)
        options = self._options.get(name, ModelOptions())
        packages = await self._keeper.on_thread(functools.partial(self._keeper.source.find, name))
        with contextlib.suppress(RequestError):  # opening says what is missing
            packages = options.policy.choose(name, packages)
        order: SwapOrder = "availability"
        if model.versions:
            order = choose_order(needed_bytes(packages), available_bytes(), options.swap)
        if self._memory.max_bytes is None:
            return Plan(order, 0, for_others)
        needed = await self._keeper.on_thread(functools.partial(estimate_bytes, packages, options.governor))
        if order == "availability":
            beside = Plan(order, needed, for_others)
            try:
                await self.make(beside)
            except MemoryCapError as error:
                if not model.versions:
                    if for_others or error.retry_after_s is None:
                        raise
                    return None
            else:
                return beside
        instead = Plan("resource", needed, for_others)
        await self.make(instead, without=name)
        return instead

    async def make(self, plan: Plan, *, without: str = "") -> None:
        """Unload others until there is room.

        Args:
            plan: of what is to be loaded.
            without: name of a model that does not count, since it makes way itself.

        Raises:
            MemoryCapError: the cap leaves no room.
        """
        cap_bytes = self._memory.max_bytes
        if cap_bytes is None:
            return
        while victims := choose_evictions(
            self._list_residents(plan.for_others, without), plan.needed_bytes, cap_bytes
        ):
            # Without its lock, which a load of it may hold that waits for this one to end.
            name = victims[0].name
            model = self._models[name]
            _logger.info("model '%s' is unloaded to make room for another", name)
            self._metrics.swaps[name, "evicted"].value += 1
            old = model.take_out(self._keeper)
            model.state, model.is_evicted = "UNAVAILABLE", True
            model.reason = "unloaded to make room for others; its next request loads it"
            await self._keeper.retire(old)

    def _list_residents(self, for_others: bool, without: str) -> list[Resident]:
        # What hangs was given up, and still has its memory.
        leaving = [
            Resident(served.loaded.manifest.name, served.loaded.memory_bytes, 0.0, is_busy=True)
            for served in self._keeper.leaving
        ]
        # At the start nothing goes for another: each model that fits is loaded, in their order.
        loaded = [
            self._describe(name, model, is_busy=not for_others)
            for name, model in self._models.items()
            if model.versions
        ]
        return [resident for resident in (*loaded, *leaving) if resident.name != without]

    def _describe(self, name: str, model: Model, *, is_busy: bool) -> Resident:
        versions = model.versions.values()
        return Resident(
            name,
            sum(served.loaded.memory_bytes for served in versions),
            max([model.loaded_s, *(served.metrics.last_s or 0.0 for served in versions)]),
            self._options.get(name, ModelOptions()).keep_loaded,
            is_busy or model.lock.locked() or any(served.metrics.waiting for served in versions),
        )
