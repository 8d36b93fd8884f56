"""Starts trials of new versions beside the version in use, and applies their verdicts."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

from edgekit_runtime.errors import EdgekitError, UnavailableError
from edgekit_runtime.package.version_order import sort_key
from edgekit_runtime.service.models.catalogue import ModelEntry
from edgekit_runtime.service.models.lifecycle import Lifecycle
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.serving.served_version import Served, Trial

if TYPE_CHECKING:
    from edgekit_runtime.service.rollout.gates import Promote, Rollback

Report: TypeAlias = 'Callable[[ModelEntry, Trial, "Promote | Rollback"], None]'
Start: TypeAlias = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]

_logger = logging.getLogger(__name__)


class RolloutController:
    """Starts trials and applies their verdicts.

    Attributes:
        report: A function that is called with each verdict. By default it applies the verdict. In a worker
            process it sends the verdict to the service.
    """

    def __init__(self, lifecycle: Lifecycle, metrics: ServiceMetrics, start: Start) -> None:
        self._lifecycle, self._metrics, self._start = lifecycle, metrics, start
        self.report: Report = self._report

    async def begin(self, model: ModelEntry, options: ModelOptions) -> bool:
        """Start a trial of the newest version. The caller holds the lock of `model`.

        Returns:
            True if a trial is running, or if the newest version was rejected and `model.failed` states the
            reason. False if no version is in use or no newer version exists.

        Raises:
            EdgekitError: The new version cannot be opened now, or its outputs cannot be compared. The version
                in use keeps serving.
        """
        policy = VersionPolicy.of(options)
        newest = (await self._lifecycle.on_thread(self._lifecycle.source.find, model.name, policy))[0]
        if model.trial is not None:
            if model.trial.candidate.version == newest.version:
                return True
            # Not waited for: this holds a reservation, and no other model waits for the calls of this one.
            self._start(self._lifecycle.retire([model.end_trial(model.trial)]))
        if model.default is None and not await self._bring_back(model, newest, options):
            return False
        current = model.default
        if current is None or sort_key(newest.version) <= sort_key(current.version):
            return False
        fresh = (await self._lifecycle.open(model.name, options, current.loaded))[0]
        if fresh.version == current.version:  # its source fell back
            model.failed[newest.version] = (
                "not opened: it failed, which the log says, or was rolled back meanwhile"
            )
            await self._lifecycle.retire([fresh])
        else:
            await self._try(model, (current, fresh), options)
        return True

    async def _bring_back(self, model: ModelEntry, newest: Servable, options: ModelOptions) -> bool:
        """After a restart, serve the version that was confirmed before the newest version was installed."""
        proven = await self._lifecycle.on_thread(self._lifecycle.source.find_proven, model.name)
        if proven is None or proven.version == newest.version:
            return False
        try:
            model.publish([await self._lifecycle.open_again(proven, options)])
        except UnavailableError:  # it may be opened later, and without it the new one would have no trial
            raise
        except EdgekitError as error:
            _logger.warning(
                "%s %s cannot be opened beside the new version: %s", model.name, proven.version, error
            )
            return False
        return True

    async def _try(self, model: ModelEntry, pair: tuple[Served, Served], options: ModelOptions) -> None:
        from edgekit_runtime.service.rollout.trial import begin_trial

        current, fresh = pair
        candidate = fresh
        if options.rollout == "shadow" and fresh.loaded.remote is None:
            # On a thread: a call that arrives while it runs does not wait for it.
            candidate = self._remake(fresh, short_s=0.0)
        settle = functools.partial(self.report, model)
        try:
            model.trial = begin_trial(current, candidate, options, settle)
        except EdgekitError:
            await self._lifecycle.retire([fresh])
            raise
        model.versions[candidate.version] = candidate
        self._metrics.swaps[model.name, "tried"] += 1
        _logger.info("%s %s: %s", model.name, candidate.version, model.trial.describe())
        if model.trial.is_guessing:
            _logger.warning(
                "%s %s: how its answers are compared is a guess; say what its output is by --metric or"
                " --labels of `edgekit package`, or set %s.comparison in [models.%s]",
                model.name,
                candidate.version,
                options.rollout,
                model.name,
            )

    def _report(self, model: ModelEntry, trial: Trial, verdict: "Promote | Rollback") -> None:
        self._start(self._settle(model, trial, verdict))

    async def _settle(self, model: ModelEntry, trial: Trial, verdict: "Promote | Rollback") -> None:
        from edgekit_runtime.service.rollout.gates import Promote

        async with model.lock:
            if model.trial is not trial:  # something else was loaded or unloaded meanwhile
                return
            if isinstance(verdict, Promote):
                if trial.runner.take_over():
                    await self.promote(model, trial)
            else:
                await self._roll_back(model, trial, verdict)

    async def promote(self, model: ModelEntry, trial: Trial) -> None:
        """Replace the version in use with the candidate. The caller holds the lock of `model`."""
        _logger.info("%s %s takes over from %s", model.name, trial.candidate.version, trial.current.version)
        fresh = trial.candidate
        if trial.options.rollout == "shadow" and fresh.loaded.remote is None:
            # As it was loaded: on the loop where it is short enough.
            trial.end()
            await self._lifecycle.drain(fresh)
            fresh = self._remake(fresh, short_s=trial.current.loaded.scheduling.short_s)
        old = model.withdraw()
        model.publish([fresh])
        self._metrics.swaps[model.name, "promoted"] += 1
        self._lifecycle.confirmations.confirm(model.name, fresh.version)
        await self._lifecycle.retire([served for served in old if served is not trial.candidate])

    def _remake(self, served: Served, short_s: float) -> Served:
        limits = dataclasses.replace(served.loaded.scheduling, short_s=short_s)
        return self._lifecycle.make_served(dataclasses.replace(served.loaded, scheduling=limits))

    async def _roll_back(self, model: ModelEntry, trial: Trial, verdict: "Rollback") -> None:
        version, reason = trial.candidate.version, f"{verdict.gate}: {verdict.reason}"
        _logger.warning("%s %s is rolled back: %s", model.name, version, reason)
        candidate = model.end_trial(trial)
        model.failed[version] = f"rolled back: {reason}"
        self._metrics.swaps[model.name, "rolled_back"] += 1
        try:
            await self._lifecycle.on_thread(self._lifecycle.source.reject, model.name, version, reason)
        except EdgekitError as error:
            _logger.warning(
                "%s %s is rolled back, but this cannot be recorded: %s", model.name, version, error
            )
        await self._lifecycle.retire([candidate])
