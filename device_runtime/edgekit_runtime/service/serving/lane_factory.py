"""Builds the lanes of a loaded version: the scheduler, then the cache, drift statistics and sequences."""

from asyncio import AbstractEventLoop
from typing import TYPE_CHECKING

from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.observability.server_timing import RunTimes, TimedMetrics
from edgekit_runtime.service.oip.codec import Codec
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.options.config import ServiceConfig
from edgekit_runtime.service.options.model import GovernorOptions, ModelOptions
from edgekit_runtime.service.scheduling.call import DrainingLane, Lane
from edgekit_runtime.service.scheduling.drift_lane import DriftLane, make_drift
from edgekit_runtime.service.scheduling.fair_pool import Pool
from edgekit_runtime.service.scheduling.response_cache import CacheLane, ResponseCache
from edgekit_runtime.service.scheduling.run_memory import InputLimit, allowed_run_bytes, estimate_run_memory
from edgekit_runtime.service.scheduling.scheduler import Scheduler
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.service.serving.memory_estimate import sequence_bytes
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.sessions.instances import LoadedSetting

if TYPE_CHECKING:
    from edgekit_runtime.service.governor.profile import GovernedModel


class LaneFactory:
    """Builds the lanes of a loaded version.

    Attributes:
        times: The durations of the call that is being answered, or None if responses do not state them.
    """

    def __init__(self, loop: AbstractEventLoop, pool: Pool, regions: Regions, config: ServiceConfig) -> None:
        """Create the response cache of all models. `pool` is the thread pool of all models."""
        self._loop, self._pool, self._regions, self._config = loop, pool, regions, config
        self._cache = ResponseCache(config.cache)
        self.times = RunTimes() if config.http.server_timing else None
        self._max_run_bytes = allowed_run_bytes(config.inference.max_run_bytes, config.memory.max_bytes)

    def make(self, loaded: Loaded) -> Served:
        """Return `loaded` with its lanes. Call this on the event loop."""
        manifest, remote = loaded.manifest, loaded.remote
        options = self._config.models.get(manifest.name) or ModelOptions()
        metrics = self._make_metrics(manifest.name, manifest.version) if remote is None else remote.metrics
        codec = self._make_codec(loaded)
        if remote is not None:  # the rest is in its processes
            return Served(
                loaded=loaded, codec=codec, metrics=metrics, own_lane=remote, stack=remote, lane=remote
            )
        own_lane: DrainingLane
        governed = None
        if options.governor is not None:
            governed = self._make_governed(loaded, options.governor, metrics)
            own_lane = governed.lane
        else:
            own_lane = self._schedule(loaded, loaded.settings[0], metrics)
        stack: Lane = own_lane
        cache = None
        if options.cache:
            most = loaded.scheduling.max_waiting
            stack = cache = CacheLane(self._cache, stack, self._loop, metrics=metrics, max_waiting=most)
        drift = (
            make_drift(manifest, loaded.inputs, loaded.outputs, self._config.drift) if options.drift else None
        )
        stack = stack if drift is None else DriftLane(drift, stack, budget_s=self._config.drift.budget_s)
        sequences = None
        if manifest.states:
            from edgekit_runtime.service.scheduling.sequence_lane import SequenceLane, SequenceLimits

            limits = SequenceLimits(
                max_sequences=options.max_sequences,
                max_bytes=sequence_bytes(manifest, options),
                idle_s=options.sequence_idle_s,
                max_waiting=loaded.scheduling.max_waiting,
            )
            stack = sequences = SequenceLane(stack, manifest.states, manifest.inputs, limits, metrics=metrics)
        return Served(
            loaded=loaded,
            codec=codec,
            metrics=metrics,
            own_lane=own_lane,
            stack=stack,
            lane=stack,
            drift=drift,
            cache=cache,
            governed=governed,
            sequences=sequences,
        )

    def _make_metrics(self, name: str, version: str) -> LaneMetrics:
        return LaneMetrics(name, version) if self.times is None else TimedMetrics(name, version, self.times)

    def _make_codec(self, loaded: Loaded) -> Codec:
        manifest = loaded.manifest
        check_inputs = None
        if any(isinstance(size, str) for spec in loaded.inputs for size in spec.shape):
            memory = estimate_run_memory(manifest, loaded.variant)
            check_inputs = InputLimit(memory, loaded.inputs, self._allowed_run_bytes(loaded)).check
        return Codec(
            manifest.name,
            manifest.version,
            inputs=loaded.inputs,
            outputs=loaded.outputs,
            regions=self._regions,
            max_json_bytes=self._config.inference.max_json_bytes,
            max_json_response_bytes=self._config.inference.max_json_response_bytes,
            check_inputs=check_inputs,
            answerer=loaded.answerer,
            # The self-test has shown that the engine takes these so.
            may_be_empty=[tensor.name for tensor in manifest.golden.inputs if 0 in tensor.shape],
            states=manifest.states,
        )

    def _allowed_run_bytes(self, loaded: Loaded) -> int:
        return self._max_run_bytes // max(1, len(loaded.instances))

    def _make_governed(
        self, loaded: Loaded, options: GovernorOptions, metrics: LaneMetrics
    ) -> "GovernedModel":
        # Most services have no governor, which takes a megabyte and 15 ms of the start.
        from edgekit_runtime.power.governor.settings import ModelSetting
        from edgekit_runtime.service.governor.lane import GovernedLane
        from edgekit_runtime.service.governor.profile import GovernedModel, make_profile

        lanes = {
            (setting.variant, setting.threads): self._schedule(loaded, setting, metrics)
            for setting in loaded.settings
        }
        first = loaded.settings[0]
        batch = min(options.batches[0], loaded.scheduling.max_batch)
        lane = GovernedLane(lanes, ModelSetting(first.variant, batch, first.threads), metrics)
        profile = make_profile(loaded.settings, options, loaded.scheduling)
        return GovernedModel(lane, metrics, profile)

    def _schedule(self, loaded: Loaded, setting: LoadedSetting, metrics: LaneMetrics) -> Scheduler:
        memory = estimate_run_memory(loaded.manifest, loaded.variant)
        most_bytes = memory.most_input_bytes(self._allowed_run_bytes(loaded))
        lane = Scheduler(
            setting.instances,
            loaded.scheduling,
            pool=self._pool,
            loop=self._loop,
            metrics=metrics,
            memory=memory,
            max_batch_bytes=max(most_bytes, loaded.scheduling.max_batch * memory.usual_bytes),
        )
        for run in setting.warm_runs:
            lane.learn(run.shapes, run.seconds)
        return lane
