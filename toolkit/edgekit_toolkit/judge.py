"""Figures of candidates: score on held-out samples, latency here and on the target, memory, energy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from edgekit_runtime.errors import DataError, EdgekitError, ModelError
from edgekit_runtime.latency import Latency, LatencyLimits, measure_latency
from edgekit_toolkit.candidates import Candidate
from edgekit_toolkit.energy import NodeCost, model_cost
from edgekit_toolkit.feeds import Feeds
from edgekit_toolkit.measure import measure_engine_bytes
from edgekit_toolkit.memory import MemoryEstimate, estimate_peak_memory
from edgekit_toolkit.metrics import Metric, Outputs, find_metric
from edgekit_toolkit.node_costs import node_costs
from edgekit_toolkit.quantize.engine import run_session, session_for
from edgekit_toolkit.quantize.forms import DYNAMIC_INT8
from edgekit_toolkit.samples import Part
from edgekit_toolkit.shapes import dynamic_dims
from edgekit_toolkit.shards import Batching
from edgekit_toolkit.specs import tensor_specs
from edgekit_toolkit.targets import Target

# Samples in a batch where the model leaves it free; one for models whose activations are large anyway.
_BATCH = 16
_SMALL_INPUT_BYTES = 1 << 18
_LATENCY_LIMITS = LatencyLimits(warmup_rounds=1, min_rounds=5, max_rounds=60, time_limit_s=10.0)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores on the evaluation samples.

    Attributes:
        metric: that was used.
        baseline: mean score of the source model, 0..1.
        scores: mean score of each candidate, 0..1.
        samples: number of samples.
    """

    metric: Metric
    baseline: float
    scores: tuple[float, ...]
    samples: int

    def drop_points(self, position: int) -> float:
        """Points (hundredths) that a candidate scores below the source model; 0 where it is better."""
        return round(max(0.0, 100 * (self.baseline - self.scores[position])), 4)


def score_candidates(
    source: onnx.ModelProto,
    candidates: Sequence[Candidate],
    part: Part,
    metric_name: str,
    *,
    threads: int,
    progress: Callable[[int, int], None],
) -> Scores:
    """Return the scores of the source model and of the candidates.

    Args:
        source: the float model as the user gave it, which is also the reference of relative metrics.
        candidates: to judge.
        part: evaluation samples.
        metric_name: as for `metrics.find_metric`.
        threads: threads of the engine.
        progress: called with samples done and their number.

    Raises:
        DataError: the metric does not suit the model or the data.
        BackendError: a model does not run on a sample.
    """
    names = [spec.name for spec in tensor_specs(source)[1]]
    reference_session = session_for(source, threads=threads)
    sessions = [session_for(candidate.model, threads=threads) for candidate in candidates]
    metric: Metric | None = None
    totals = np.zeros(len(candidates) + 1)
    done = 0
    # Dynamic int8 takes its ranges from the whole batch: alone, a sample is computed as on the device.
    dynamic = any(candidate.form.kind == DYNAMIC_INT8 for candidate in candidates)
    batch = 1 if dynamic else _batch(next(part.stream(1))[0])
    stacked = Batching.of(tensor_specs(source)[0]).stacked
    for feeds, labels in part.stream(batch):
        reference: Outputs = dict(zip(names, run_session(reference_session, feeds, names), strict=True))
        metric = metric or find_metric(metric_name, reference, part.labelled)
        count = len(next(iter(feeds.values()))) if stacked else 1
        for position, session in enumerate([None, *sessions]):
            outputs = (
                reference
                if session is None
                else dict(zip(names, run_session(session, feeds, names), strict=True))
            )
            totals[position] += float(metric.score(outputs, reference, labels).mean()) * count
        done += count
        progress(min(done, part.count), part.count)
    if metric is None or not done:
        raise DataError("there are no evaluation samples")
    means = totals / done
    return Scores(metric, float(means[0]), tuple(float(mean) for mean in means[1:]), done)


def _batch(feeds: Feeds) -> int:
    return _BATCH if sum(array.nbytes for array in feeds.values()) <= _SMALL_INPUT_BYTES else 1


def measure_latencies(
    source: onnx.ModelProto, candidates: Sequence[Candidate], feeds: Feeds, *, threads: int
) -> tuple[Latency, tuple[Latency, ...]]:
    """Return the latency here of the source model and of each candidate, from interleaved runs."""
    models = {"source": source, **{str(number): one.model for number, one in enumerate(candidates)}}
    sessions = {name: session_for(model, threads=threads) for name, model in models.items()}
    calls = {name: partial(run_session, session, feeds) for name, session in sessions.items()}
    found = measure_latency(calls, _LATENCY_LIMITS)
    return found["source"], tuple(found[str(number)] for number in range(len(candidates)))


@dataclass(frozen=True, slots=True)
class Modelled:
    """Latency and energy on the target, modelled; None where the model's work cannot be counted."""

    latency_ms: float | None
    energy_mj: float | None
    reason: str


def model_on_target(model: onnx.ModelProto, target: Target, dims: Mapping[str, int]) -> Modelled:
    """Return what one inference would take on the target."""
    try:
        cost = model_cost(
            node_costs(model, _bound(model, dims), float_outputs=target.backend.default == "tensorrt"), target
        )
    except ModelError as error:
        return Modelled(None, None, str(error).splitlines()[0])
    return Modelled(cost.latency_s * 1e3, cost.energy_j * 1e3, "")


def cost_of_nodes(model: onnx.ModelProto, dims: Mapping[str, int]) -> list[NodeCost]:
    """Return the work of each kernel, or nothing where it cannot be counted."""
    try:
        return node_costs(model, _bound(model, dims))
    except ModelError:
        return []


def _bound(model: onnx.ModelProto, dims: Mapping[str, int]) -> dict[str, int]:
    return {name: dims.get(name, dims.get(name.replace(":", "_"), 1)) for name in dynamic_dims(model)}


def estimate_memory(model: onnx.ModelProto, target: Target, dims: Mapping[str, int]) -> MemoryEstimate | None:
    """Return the estimated peak memory with onnxruntime on the target, or None where it cannot be estimated.

    The engine's part is that of this machine.
    """
    try:
        return estimate_peak_memory(
            model, engine_bytes=measure_engine_bytes(), dims=dims, blocked_layout=target.arch == "x86_64"
        )
    except EdgekitError:
        return None
