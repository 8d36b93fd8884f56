"""Loads, swaps and unloads the models that are served.

This module runs on the event loop. `Lifecycle` runs everything that waits for the disk or for engines.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, get_args

from edgekit_runtime.errors import EdgekitError, RequestError, UnavailableError
from edgekit_runtime.service.models.catalogue import SWAP_RETRY_S, Catalogue, ModelEntry, Status
from edgekit_runtime.service.models.eviction import MemoryCapError
from edgekit_runtime.service.models.lifecycle import Lifecycle, MakeServed
from edgekit_runtime.service.models.memory_cap import LoadPlan, MemoryCap
from edgekit_runtime.service.models.rollout_controller import RolloutController
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.options.model import ModelOptions, Rollout
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.service.serving.loader import Loaded, OpenRemote, map_exceptions, trim_after_start
from edgekit_runtime.service.serving.remote import IsolatedVersion
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.system.tasks import Tasks

NEXT_AFTER_S: Final = 5.0  # at the start. Most models take less

_logger = logging.getLogger(__name__)


class Registry:
    """Loads, swaps and unloads the served models.

    Attributes:
        models: The catalogue in which requests look up models.
        metrics: Counts changes by outcome: `swapped`, `failed`, `tried` (a trial started), `promoted`,
            `rolled_back`, `evicted`, `unloaded` and `hung` (a call exceeded `drain_timeout_s`).
        rollouts: Starts trials of new versions and applies their verdicts.
    """

    def __init__(
        self,
        source: Source,
        make_served: MakeServed,
        options: Mapping[str, ModelOptions],
        *,
        open_remote: OpenRemote | None = None,
        memory: ModelMemory | None = None,
        metrics: ServiceMetrics | None = None,
        drain_timeout_s: float = 30.0,
        tries_in_child: bool = False,
    ) -> None:
        """Create a registry without models.

        Args:
            source: The source of the packages.
            make_served: Builds the lanes of a loaded version. It is called on the event loop.
            options: The options by model name, for models that do not use the defaults.
            open_remote: Opens models in worker processes. None loads all models in this process.
            memory: The memory cap of all models together. The default is no cap.
            metrics: The metrics that count the changes.
            drain_timeout_s: The longest wait for the calls of a version before it is unloaded.
            tries_in_child: Whether packages are first opened in a child process, see `load_tested`.
        """
        self._source = source
        self.metrics = metrics or ServiceMetrics()
        self._lifecycle = Lifecycle(
            source,
            make_served,
            open_remote,
            self.metrics,
            drain_timeout_s=drain_timeout_s,
            tries_in_child=tries_in_child,
        )
        self._options = options
        self._memory = memory or ModelMemory()
        self.models = Catalogue()
        self._tasks = Tasks()
        self._memory_cap = MemoryCap(
            self._lifecycle, self.models.by_name, options, self._memory, self.metrics
        )
        self.rollouts = RolloutController(self._lifecycle, self.metrics, self._start)

    def find_remote(self, name: str, version: str | None) -> IsolatedVersion | None:
        """Return a version that runs in worker processes.

        Args:
            name: The name of the model.
            version: The version, or None for the version that serves requests without a version.

        Returns:
            The version, or None if it is unknown, not ready, or runs in this process.
        """
        try:
            return self.models.find(name, version).loaded.remote
        except EdgekitError:
            return None

    def report_crash(self, name: str, version: str, reason: str, *, is_loop: bool) -> None:
        """Postpone the confirmation of a version that crashed.

        If `is_loop` is True, the version crashes repeatedly, and another version replaces it.
        """
        self._lifecycle.confirmations.postpone(name, version)
        if is_loop:
            self._start(self.give_up(name, version, f"crash: {reason}"))

    async def give_up(self, name: str, version: str, reason: str) -> None:
        """Reject a version that keeps failing, and serve another version if there is one.

        Errors are logged.
        """
        try:
            if await self._lifecycle.on_thread(self._source.reject, name, version, reason):
                await self.load(name)
        except EdgekitError as error:
            _logger.error("%s %s keeps failing, and nothing replaces it: %s", name, version, error)  # noqa: TRY400  # says all

    async def index(self) -> list[Status]:
        """Return the status of all installed and loaded models.

        If listing fails, return only the loaded models.
        """
        names: Sequence[str] = ()
        try:
            names = await self._lifecycle.list_names()
        except EdgekitError as error:
            _logger.warning("the installed models cannot be listed: %s", error)
        return self.models.describe(names)

    async def load_all(self) -> None:
        """Load all installed models in sequence, to limit the peak memory.

        If a model takes longer than `NEXT_AFTER_S`, the next load starts in parallel. Models that fail are
        logged.

        Raises:
            EdgekitError: The models cannot be listed, or all packages are damaged.
        """
        names = await self._lifecycle.list_names()
        for name in names:
            self.models.by_name.setdefault(name, ModelEntry(name)).state = "LOADING"
        self.models.is_listed = True
        loads = []
        for name in names:
            loads.append(self._start(self._load_at_start(name)))
            await asyncio.wait(loads[-1:], timeout=NEXT_AFTER_S)
        await asyncio.gather(*loads)
        if not self.models.served():
            await self._lifecycle.list_names()  # raises where a source has found that no package is whole
        await self._lifecycle.on_thread(trim_after_start)

    async def load(
        self,
        name: str,
        *,
        for_others: bool = True,
        patience_s: float = 0.0,
        rollout: str | None = None,
    ) -> None:
        """Load the versions of a model that its version policy chooses, and unload its other versions.

        Args:
            name: The name of the model.
            for_others: Whether other models may be unloaded to make room. If False and there is no room, the
                first request loads the model.
            patience_s: The longest wait until busy models can be unloaded.
            rollout: `swap`, `canary` or `shadow`. The default is the rollout requested at installation, or
                else the rollout in the options of the model.

        Raises:
            EdgekitError: The versions cannot be loaded. The versions in use keep serving.
        """
        model = await self._find_or_add(name)
        async with model.lock:
            before = (model.state, model.reason)
            model.state, model.reason = "LOADING", "loading"
            try:
                with map_exceptions(f"model '{name}'"):
                    if rollout is None:  # such as after a restart
                        rollout = await self._lifecycle.on_thread(self._source.find_trial, name)
                    options = self._choose_options(name, rollout)
                    await self._swap(model, options, for_others=for_others, patience_s=patience_s)
            except EdgekitError as error:
                self.metrics.swaps[name, "failed"] += 1
                model.reason = f"the last load failed: {error}" if model.versions else str(error)
                model.is_evicted = not model.versions and _may_come_later(error, model)
                model.state = "READY" if model.versions else "UNAVAILABLE"
                raise
            except BaseException:
                model.state, model.reason = before
                raise
            if not model.is_evicted:
                model.state, model.reason = "READY", ""

    async def unload(self, name: str) -> None:
        """Stop serving a model after its calls are answered.

        Raises:
            RequestError: The model is not loaded.
        """
        model = self.models.by_name.get(name)
        if model is None or not (model.versions or model.is_evicted):
            raise RequestError(404, f"model '{name}' is not loaded")
        async with model.lock:
            model.state, model.reason, model.is_evicted = "UNLOADED", "unloaded", False
            self.metrics.swaps[name, "unloaded"] += 1
            await self._lifecycle.retire(model.withdraw())

    async def settle_trial(self, name: str, version: str, *, is_promoted: bool) -> None:
        """Promote the version on trial, or unload it. If `version` is not on trial, do nothing."""
        model = self.models.by_name[name]
        async with model.lock:
            trial = model.trial
            if trial is None or trial.candidate.version != version:
                return
            if is_promoted:
                await self.rollouts.promote(model, trial)
            else:
                await self._lifecycle.retire([model.end_trial(trial)])

    async def wait_for(self, name: str) -> None:
        """Load a model that was unloaded to make room for others, and wait until it is loaded.

        Raises:
            UnavailableError: Too many calls already wait for loads, or the load takes too long.
        """
        model = self.models.by_name[name]
        if model.default is not None:
            return  # loaded meanwhile; to load it again would unload it first
        if model.waiting >= self._memory.max_waiting:
            raise UnavailableError(f"{name}: is being loaded, and too many calls wait already", SWAP_RETRY_S)
        if model.loading is None or model.loading.done():
            model.loading = self._start(self.load(name, patience_s=self._memory.load_wait_s))
        model.waiting += 1
        try:
            await asyncio.wait_for(asyncio.shield(model.loading), self._memory.load_wait_s)
        except asyncio.TimeoutError:
            wait_s = self._memory.load_wait_s
            raise UnavailableError(
                f"{name}: is not loaded after {wait_s:g} s; try again", SWAP_RETRY_S
            ) from None
        finally:
            model.waiting -= 1

    async def close(self) -> None:
        """Confirm all pending versions that have not crashed, and stop serving."""
        self._lifecycle.confirmations.confirm_all()
        await self._tasks.cancel()
        for model in self.models.by_name.values():
            async with model.lock:
                if model.trial is not None:  # a planned stop is no evidence against it
                    version = model.trial.candidate.version
                    await self._lifecycle.on_thread(self._source.undo_start, model.name, version)
                await self._lifecycle.retire(model.withdraw())
        await self._lifecycle.shutdown()

    def abandon(self) -> None:
        """Stop without waiting. This is called if `close` takes too long."""
        self._lifecycle.abandon()

    async def _load_at_start(self, name: str) -> None:
        try:
            await self.load(name, for_others=False)
        except EdgekitError as error:
            _logger.error("model '%s' is not served: %s", name, error)  # noqa: TRY400  # says all

    async def _find_or_add(self, name: str) -> ModelEntry:
        model = self.models.by_name.get(name)
        if model is None:  # added only if installed: clients could send invented names without end
            if name not in await self._lifecycle.list_names():
                # Its error may say why not.
                await self._lifecycle.on_thread(self._source.find, name, VersionPolicy())
                raise RequestError(404, f"model '{name[:80]}' is not installed")
            model = self.models.by_name.setdefault(name, ModelEntry(name))
        return model

    def _choose_options(self, name: str, rollout: str | None) -> ModelOptions:
        options = self._options.get(name, ModelOptions())
        if rollout is None:
            return options
        if rollout not in get_args(Rollout):
            choices = ", ".join(get_args(Rollout))
            raise RequestError(400, f"rollout is {rollout[:40]!r}, expected one of {choices}")
        try:
            return dataclasses.replace(options, rollout=rollout)  # type: ignore[arg-type]  # checked
        except ValueError as cause:
            raise RequestError(400, f"model '{name}': {cause}") from cause

    async def _swap(
        self, model: ModelEntry, options: ModelOptions, *, for_others: bool, patience_s: float
    ) -> None:
        is_swap = bool(model.versions)
        async with self._memory_cap.plan(model, for_others=for_others, patience_s=patience_s) as plan:
            if plan is None:
                model.state, model.is_evicted = "UNAVAILABLE", True
                model.reason = "the memory cap leaves no room; its next request loads it"
                return
            if options.rollout != "swap" and await self.rollouts.begin(model, options):
                return
            fresh = [] if plan.order == "resource" else await self._lifecycle.open(model.name, options)
        if plan.order == "resource":
            fresh = await self._unload_and_open(model, options, plan)
        old = model.withdraw()
        model.publish(fresh)
        if is_swap:
            self.metrics.swaps[model.name, "swapped"] += 1
        await self._lifecycle.retire(old)
        self._lifecycle.confirmations.schedule(fresh)

    async def _unload_and_open(
        self, model: ModelEntry, options: ModelOptions, plan: LoadPlan
    ) -> list[Served]:
        """Unload the old version, then open the new version. If that fails, open the old version again."""
        # Not within a reservation: no other model waits for the calls of this one.
        before = model.withdraw()
        await self._lifecycle.retire(before)
        try:
            async with self._memory_cap.reserve(model, plan):
                return await self._lifecycle.open(model.name, options)
        except Exception:
            await self._bring_back(model, [served.loaded for served in before], options)
            raise

    async def _bring_back(self, model: ModelEntry, before: Sequence[Loaded], options: ModelOptions) -> None:
        size_bytes = sum(loaded.memory_bytes for loaded in before)
        try:
            async with self._memory_cap.reserve(model, LoadPlan("resource", size_bytes, for_others=True)):
                back = await self._open_again(before, options)
        except MemoryCapError as error:
            _logger.warning("the version before is loaded at its next request: %s", error)
            model.is_evicted = True
            return
        if back:
            model.publish(back)
            self._lifecycle.confirmations.schedule(back)

    async def _open_again(self, before: Sequence[Loaded], options: ModelOptions) -> list[Served]:
        back = []
        for loaded in before:
            manifest = loaded.manifest
            package = Servable(manifest.name, manifest.version, loaded.path, manifest.sha256)
            try:
                back.append(await self._lifecycle.open_again(package, options))
            except EdgekitError as error:  # each is a try of its own
                _logger.error("the version before cannot be opened again: %s", error)  # noqa: TRY400  # says all
        return back

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return self._tasks.start(work, _log_failure)


def _log_failure(error: BaseException) -> None:
    if not isinstance(error, EdgekitError):
        _logger.error("a change of a model failed inside the service", exc_info=error)


def _may_come_later(error: EdgekitError, model: ModelEntry) -> bool:
    """Return whether the next request for a model that failed to load should try again."""
    fits_never = isinstance(error, MemoryCapError) and error.retry_after_s is None
    return isinstance(error, UnavailableError) and (model.is_evicted or not fits_never)
