"""Figures of candidates: score on held-out samples, latency here and on the target, memory, energy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from edgekit_runtime.errors import DataError, EdgekitError, ModelError
from edgekit_runtime.latency import Latency, LatencyLimits, measure_latency
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.artifacts import Model, peak_memory_of, work_of
from edgekit_toolkit.energy import NodeCost, model_cost
from edgekit_toolkit.feeds import Feeds
from edgekit_toolkit.measure import PeakMemory, measure_engine_bytes
from edgekit_toolkit.memory import MemoryEstimate, estimate_peak_memory
from edgekit_toolkit.metrics import Metric, Outputs, find_metric
from edgekit_toolkit.nesting import is_control_flow
from edgekit_toolkit.quantize.quantizer import Runner
from edgekit_toolkit.samples import Part
from edgekit_toolkit.shards import Batching
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
        spoiled: place of each candidate whose outputs are NaN or infinite where those of the source model are
            finite, with which and on how many samples. No score makes up for that: it is not to be used.
    """

    metric: Metric
    baseline: float
    scores: tuple[float, ...]
    samples: int
    spoiled: Mapping[int, str] = field(default_factory=dict)

    def drop_points(self, position: int) -> float:
        """Points (hundredths) that a candidate scores below the source model; 0 where it is better."""
        return round(max(0.0, 100 * (self.baseline - self.scores[position])), 4)

    def without_spoiled(self) -> "Scores":
        """Return the scores of the candidates that can be used."""
        kept = tuple(score for place, score in enumerate(self.scores) if place not in self.spoiled)
        return replace(self, scores=kept, spoiled={})


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model as it is judged, whatever its engine.

    Attributes:
        run: makes one inference.
        alone: whether it takes one sample at a time: its batch is fixed, or its ranges come from the batch.
    """

    run: Runner
    alone: bool


def score_candidates(
    source: Runner,
    candidates: Sequence[Contestant],
    part: Part,
    metric_name: str,
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    progress: Callable[[int, int], None],
) -> Scores:
    """Return the scores of the source model and of the candidates.

    Args:
        source: the float model as the user gave it, which is also the reference of relative metrics.
        candidates: to judge; they take and give what the source does, in its order.
        part: evaluation samples.
        metric_name: as for `metrics.find_metric`.
        inputs: what the source takes.
        outputs: what it gives.
        progress: called with samples done and their number.

    Raises:
        DataError: the metric does not suit the model or the data.
        BackendError: a model does not run on a sample.
    """
    names = [spec.name for spec in outputs]
    metric: Metric | None = None
    totals = np.zeros(len(candidates) + 1)
    spoiled: dict[int, dict[str, int]] = {}
    done = 0
    alone = any(candidate.alone for candidate in candidates)
    batch = 1 if alone else _batch(next(part.stream(1))[0])
    stacked = Batching.of(inputs).stacked
    for feeds, labels in part.stream(batch):
        reference: Outputs = dict(zip(names, source(feeds), strict=True))
        metric = metric or find_metric(metric_name, reference, part.labelled)
        count = len(next(iter(feeds.values()))) if stacked else 1
        for position, candidate in enumerate([None, *candidates]):
            found = reference if candidate is None else dict(zip(names, candidate.run(feeds), strict=True))
            for name, rows in _spoiled_rows(found, reference, count).items():
                counts = spoiled.setdefault(position - 1, {})
                counts[name] = counts.get(name, 0) + rows
            scores = metric.score(found, reference, labels)
            if not scores.size:
                given = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
                raise DataError(
                    f"the model's outputs have no rows to score, for inputs of {given}; give samples of the"
                    " sizes that it is used with (--eval)"
                )
            totals[position] += float(scores.mean()) * count
        done += count
        progress(min(done, part.count), part.count)
    if metric is None or not done:
        raise DataError("there are no evaluation samples")
    means = totals / done
    reasons = {place: _reason(counts, done) for place, counts in spoiled.items()}
    return Scores(metric, float(means[0]), tuple(float(mean) for mean in means[1:]), done, reasons)


def _spoiled_rows(found: Outputs, reference: Outputs, count: int) -> dict[str, int]:
    """Samples of `count` on which an output is NaN or infinite and the reference is finite, by output."""
    rows = {}
    for name, want in reference.items():
        got = found[name]
        if got.dtype.kind != "f" or np.isfinite(got).all():
            continue
        # An output of another shape (a list of detections) has no value to hold each one against.
        allowed = ~np.isfinite(want) if got.shape == want.shape else not np.isfinite(want).all()
        strange = ~np.isfinite(got) & ~np.asarray(allowed)
        if strange.any():
            alike = got.ndim > 0 and len(got) == count
            rows[name] = int(strange.reshape(count, -1).any(axis=1).sum()) if alike else count
    return rows


def _reason(counts: Mapping[str, int], samples: int) -> str:
    name, most = max(counts.items(), key=lambda item: item[1])
    return (
        f"output '{name}' is NaN or infinite on {most} of {samples} evaluation samples, where the source"
        " model's is finite"
    )


def _batch(feeds: Feeds) -> int:
    return _BATCH if sum(array.nbytes for array in feeds.values()) <= _SMALL_INPUT_BYTES else 1


def measure_latencies(
    source: Runner, candidates: Sequence[Runner], feeds: Feeds
) -> tuple[Latency, tuple[Latency, ...]]:
    """Return the latency here of the source model and of each candidate, from interleaved runs."""
    calls = {str(number): partial(run, feeds) for number, run in enumerate([source, *candidates])}
    found = measure_latency(calls, _LATENCY_LIMITS)
    return found["0"], tuple(found[str(number)] for number in range(1, len(calls)))


@dataclass(frozen=True, slots=True)
class Modelled:
    """Latency and energy on the target, modelled; None where the model's work cannot be counted."""

    latency_ms: float | None
    energy_mj: float | None
    reason: str


def model_on_target(model: Model, target: Target, dims: Mapping[str, int]) -> Modelled:
    """Return what one inference would take on the target."""
    try:
        work = work_of(model, dims, float_outputs=target.backend.default == "tensorrt")
    except ModelError as error:
        return Modelled(None, None, str(error).splitlines()[0])
    cost = model_cost(work, target)
    return Modelled(cost.latency_s * 1e3, cost.energy_j * 1e3, "")


def cost_of_nodes(model: Model, dims: Mapping[str, int]) -> list[NodeCost]:
    """Return the work of each kernel, or nothing where it cannot be counted."""
    try:
        return work_of(model, dims)
    except ModelError:
        return []


def find_memory(
    model: Model, target: Target, dims: Mapping[str, int], feeds: Feeds
) -> MemoryEstimate | PeakMemory | str:
    """Return the peak memory of a process that runs the model, or why it cannot be told.

    For onnxruntime it is estimated for the target, with the engine's part of this machine. It is measured
    here for LiteRT, whose memory depends little on the processor, and for control flow, which the estimate
    does not look into.
    """
    try:
        if isinstance(model, bytes) or any(map(is_control_flow, model.graph.node)):
            return peak_memory_of(model, feeds)
        return estimate_peak_memory(
            model, engine_bytes=measure_engine_bytes(), dims=dims, blocked_layout=target.arch == "x86_64"
        )
    except EdgekitError as error:
        return f"peak memory is not known: {str(error).splitlines()[0]}"
