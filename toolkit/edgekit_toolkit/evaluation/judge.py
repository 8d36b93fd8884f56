"""Measures and models the latency, memory and energy of candidates, on this machine and on the target."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from edgekit_runtime.errors import EdgekitError, ModelError
from edgekit_runtime.sessions.latency import Latency, LatencyLimits, measure_latency
from edgekit_runtime.system.engines import parse_engine
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.costs.target_model import NodeCost, model_cost
from edgekit_toolkit.measurement.brevity import shorten_limits
from edgekit_toolkit.measurement.device_profile import SOURCE, is_current, predict_latencies
from edgekit_toolkit.measurement.peak_memory import PeakMemory, measure_engine_bytes, measure_model_memory
from edgekit_toolkit.models.model import Model, Runner
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.spec import Target

LATENCY_LIMITS: Final = LatencyLimits(
    warmup_rounds=1, min_rounds=5, max_rounds=60, time_limit_s=5.0, batch_s=0.002
)
# In processor time, because a round under load takes little more of it than a round at rest.
PROCESSOR_LIMITS: Final = LatencyLimits(
    warmup_rounds=1, min_rounds=7, max_rounds=100, time_limit_s=10.0, precision=0, batch_s=0.002
)


def measure_latencies(runs: Sequence[Runner], feeds: Feeds) -> list[Latency]:
    """Return the latency of each model on this machine. The models run in turns."""
    calls = {str(number): partial(run, feeds) for number, run in enumerate(runs)}
    latency = measure_latency(calls, shorten_limits(LATENCY_LIMITS))
    return [latency[number] for number in calls]


def measure_processor_ratios(runs: Sequence[Runner], feeds: Feeds) -> list[float]:
    """Return the processor time of each model here, divided by that of the first model.

    The models run in turns. A ratio compares lower quartiles, which other processes affect least. The models
    must use one thread, because only the processor time of this thread is measured.
    """
    # The clock of this thread, because the ticks of the process's clock are too long under `ulimit -t`.
    calls = {str(number): partial(run, feeds) for number, run in enumerate(runs)}
    latency = measure_latency(calls, shorten_limits(PROCESSOR_LIMITS), clock=time.thread_time)
    first_s, _ = latency["0"].quartiles_s
    return [latency[number].quartiles_s[0] / first_s for number in calls]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCosts:
    """The modelled latency and energy on the target.

    Attributes:
        latency_ms, energy_mj: The latency and energy of one inference, or None if the work of the model
            cannot be counted.
        uncertainty: The factor by which the ratio of two modelled latencies may be wrong.
        source: The data from which the figures are modelled, as text for the user.
        latency_label: `calibrated` if the latency is predicted from measurements on a real device of this
            kind, otherwise `modelled`.
        energy_label: `calibrated` if the power of that device was also measured, otherwise `modelled`.
    """

    latency_ms: float | None
    energy_mj: float | None
    uncertainty: float
    source: str
    latency_label: Literal["calibrated", "modelled"] = "modelled"
    energy_label: Literal["calibrated", "modelled"] = "modelled"


NOT_MODELLED: Final = TargetCosts(latency_ms=None, energy_mj=None, uncertainty=1.0, source="not measured")


def model_on_target(
    models: Sequence[Model], target: Target, dims: Mapping[str, int], feeds: Feeds
) -> list[TargetCosts]:
    """Return the modelled latency and energy of one inference of each model on the target.

    If the target has times from a device with the engine of the models, the latency is predicted from these
    times. Otherwise, it is from a roofline model.
    """
    times = target.device_times
    if (
        times is None
        or parse_engine(times.engine).name != target.backend.default
        or any(model.engine != target.backend.default for model in models)
        or not is_current(times)
    ):
        return [_model_by_coefficients(model, target, dims) for model in models]
    try:
        latencies, fitted = predict_latencies([(model, feeds) for model in models], times)
    except ModelError:  # their work cannot be counted
        return [_model_by_coefficients(model, target, dims) for model in models]
    active = target.power.mode(target.power.default_mode).active
    source = target.source(next(iter(times.seconds.values())).source)
    return [
        TargetCosts(
            latency_ms=latency_s * 1e3,
            energy_mj=active.value * latency_s * 1e3,
            uncertainty=fitted.uncertainty,
            source=f"{source.title}, {source.date}",
            latency_label="calibrated" if times.is_real else "modelled",
            energy_label="calibrated" if times.is_real and active.source == SOURCE else "modelled",
        )
        for latency_s in latencies
    ]


def _model_by_coefficients(model: Model, target: Target, dims: Mapping[str, int]) -> TargetCosts:
    ratio_uncertainty, coefficients = target.costs.form_uncertainty, f"coefficients of {target.name}"
    try:
        work = model.node_costs(dims, float_outputs=target.backend.on_gpu)
    except ModelError:
        return TargetCosts(
            latency_ms=None, energy_mj=None, uncertainty=ratio_uncertainty, source=coefficients
        )
    cost = model_cost(work, target)
    return TargetCosts(
        latency_ms=cost.latency_s * 1e3,
        energy_mj=cost.energy_j * 1e3,
        uncertainty=ratio_uncertainty,
        source=coefficients,
    )


def cost_of_nodes(model: Model, dims: Mapping[str, int]) -> list[NodeCost]:
    """Return the work of each kernel, or an empty list if it cannot be counted."""
    try:
        return model.node_costs(dims)
    except ModelError:
        return []


def find_memory(
    model: Model, target: Target, dims: Mapping[str, int], feeds: Feeds
) -> MemoryEstimate | PeakMemory | str:
    """Return the peak memory of a process that runs the model, or the reason why it is unknown.

    If `Model.estimate_memory` returns an estimate, only the memory of the engine is measured. If it returns
    None (another engine than onnxruntime, or control flow), all of the memory is measured.
    """
    try:
        estimate = model.estimate_memory(dims, blocked_layout=target.arch == "x86_64")
        if estimate is None:
            return measure_model_memory(model, feeds)
        return replace(estimate, engine_bytes=measure_engine_bytes())
    except EdgekitError as error:
        return f"peak memory is not known: {str(error).splitlines()[0]}"
