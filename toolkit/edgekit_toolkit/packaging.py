"""The main job: from a model file to a signed package, its recipe, evidence and report.

Each phase is a function of the ones before; nothing is written before the choice is made, and every file is
written whole or not at all.
"""

import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import onnx

from edgekit_runtime.latency import Latency
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.budget import Budget
from edgekit_toolkit.candidates import Candidate, Found, find_candidates
from edgekit_toolkit.data import open_data
from edgekit_toolkit.feeds import DEFAULT_RANGE, Feeds, batch_dims, bind_dims
from edgekit_toolkit.importers.onnx import SourceModel, load_onnx
from edgekit_toolkit.judge import (
    Modelled,
    Scores,
    estimate_memory,
    measure_latencies,
    model_on_target,
    score_candidates,
)
from edgekit_toolkit.memory import MemoryEstimate
from edgekit_toolkit.pack import Assembled, assemble, golden_reference, package_bytes
from edgekit_toolkit.passes.pipeline import Optimised, optimise
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.scheme import SCHEMES, Scheme
from edgekit_toolkit.recipe import Recipe
from edgekit_toolkit.samples import Samples, choose_samples, feeds_only
from edgekit_toolkit.search import Choice, Measured, choose, pareto_front
from edgekit_toolkit.sign import StatementSigner
from edgekit_toolkit.specs import tensor_specs
from edgekit_toolkit.targets import Target
from edgekit_toolkit.tensorrt_check import ShapeRange, TensorRtCheck, check_tensorrt

# Parity is checked a dozen times; one large image shows what two would.
_PARITY_FEEDS = 2
_LARGE_FEEDS_BYTES = 1 << 20
_GOLDEN_SEED = 0
# Forms by the engine that the package is for. TensorRT takes none of the others (docs/tensorrt.md).
_KINDS = {
    "ort": frozenset(forms.KINDS),
    "tensorrt": frozenset({forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.INT8_WEIGHTS, forms.STATIC_INT8}),
}

Progress = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for.

    Attributes:
        model: path of the source model.
        target: to package for.
        budget: limits.
        name, version: of the package.
        calibration, evaluation: paths of samples, or None.
        metric: as for `metrics.find_metric`.
        batch: fixed batch, or None to leave it as it is.
        dims: sizes of free dimensions for measuring.
        labels: one class name a line, or None.
        preprocessing: description of the preprocessing, or None.
        threads: of the engine while judging and measuring.
        search_s: seconds for the mixed-precision search.
    """

    model: Path
    target: Target
    budget: Budget
    name: str
    version: str
    calibration: Path | None = None
    evaluation: Path | None = None
    metric: str = "auto"
    batch: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    labels: str | None = None
    preprocessing: Mapping[str, Any] | None = None
    threads: int = 2
    search_s: float = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that one run found out; package, evidence and report are made from it.

    Tuples hold one entry a candidate, in one order.
    """

    request: Request
    source: SourceModel
    dims: Mapping[str, int]
    samples: Samples
    optimised: Optimised
    floats: onnx.ModelProto
    found: Found
    scores: Scores
    source_latency: Latency
    latencies: tuple[Latency, ...]
    modelled: tuple[Modelled, ...]
    memory: tuple[MemoryEstimate | None, ...]
    recipes: tuple[Recipe, ...]
    packages: tuple[Assembled, ...]
    measured: tuple[Measured, ...]
    front: frozenset[str]
    choice: Choice
    tensorrt: TensorRtCheck | None
    seconds: Mapping[str, float]
    warnings: Sequence[str]

    def position(self, candidate_id: str) -> int:
        """Place of a candidate in the tuples."""
        return next(place for place, one in enumerate(self.measured) if one.id == candidate_id)


def measures_here(target: Target) -> bool:
    """Whether latency on this machine stands for the target: the generic target of this architecture."""
    return target.name == "x86-64" and platform.machine() == "x86_64"


class _Phases:
    """Times phases and shows them."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress(name, None, None)
        begin = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin


def search(request: Request, signer: StatementSigner, progress: Progress) -> Run:
    """Import, optimise, make and judge candidates, and choose; nothing is written.

    Raises:
        ModelError: the model cannot be used.
        DataError: the samples do not fit.
        BackendError: the engine fails on the source model.
    """
    phases = _Phases(progress)
    with phases.phase("import"):
        source = load_onnx(request.model)
        dims = _settled_dims(source, request)
        samples = choose_samples(_fixed(source, request.batch), request.calibration, request.evaluation, dims)
    with phases.phase("optimise"):
        feeds = _first(samples, _PARITY_FEEDS)
        if sum(array.nbytes for array in feeds[0].values()) > _LARGE_FEEDS_BYTES:
            feeds = feeds[:1]
        optimised = optimise(source.model, batch=request.batch, feeds=feeds)
        floats = onnx.shape_inference.infer_shapes(optimised.model)
    backend = request.target.backend.default
    with phases.phase("search"):
        found = find_candidates(
            floats,
            lambda: feeds_only(samples.calibration),
            scheme=_scheme(request.target),
            per_channel=request.target.quantization.per_channel,
            kinds=_KINDS.get(backend, _KINDS["ort"]),
            threads=request.threads,
            time_limit_s=request.search_s,
            progress=progress,
        )
    with phases.phase("judge"):
        scores = score_candidates(
            source.model, found.candidates, samples.evaluation, request.metric, threads=request.threads,
            progress=lambda done, total: progress("judging on held-out samples", done, total),
        )  # fmt: skip
    with phases.phase("measure"):
        source_latency, latencies = measure_latencies(
            source.model, found.candidates, feeds[0], threads=request.threads
        )
        modelled = tuple(model_on_target(one.model, request.target, dims) for one in found.candidates)
        memory = tuple(estimate_memory(one.model, request.target, dims) for one in found.candidates)
    with phases.phase("choose"):
        ranges = _input_ranges(source, samples)
        recipes = tuple(
            _recipe(
                request,
                source,
                dims,
                ranges,
                optimised,
                one,
                _figures(one, scores, place, samples, memory[place]),
            )
            for place, one in enumerate(found.candidates)
        )
        reference = golden_reference(floats, dims, ranges, _GOLDEN_SEED)
        packages = tuple(
            assemble(recipe, reference, one.model)
            for recipe, one in zip(recipes, found.candidates, strict=True)
        )
        sizes = tuple(package_bytes(package, signer) for package in packages)
        measured = tuple(
            Measured(f"C{place}", one.label, _costs(
                request.target, sizes[place], latencies[place], modelled[place], memory[place],
                scores.drop_points(place),
            ))
            for place, one in enumerate(found.candidates)
        )  # fmt: skip
        models = {item.id: one.model for item, one in zip(measured, found.candidates, strict=True)}
        choice, tensorrt, refusals = _choose_accepted(request, measured, models, feeds[0])
    return Run(
        request=request,
        source=source,
        dims=dims,
        samples=samples,
        optimised=optimised,
        floats=floats,
        found=found,
        scores=scores,
        source_latency=source_latency,
        latencies=latencies,
        modelled=modelled,
        memory=memory,
        recipes=recipes,
        packages=packages,
        measured=measured,
        front=pareto_front(measured),
        choice=choice,
        tensorrt=tensorrt,
        seconds=phases.seconds,
        warnings=[*_warnings(request, samples, found), *refusals],
    )


def _choose_accepted(
    request: Request, measured: Sequence[Measured], models: Mapping[str, onnx.ModelProto], feeds: Feeds
) -> tuple[Choice, TensorRtCheck | None, list[str]]:
    """Choose; for TensorRT, choose again without the candidates that its parser or builder refuses."""
    left = list(measured)
    refused: list[str] = []
    while True:
        choice = choose(left, request.budget)
        if request.target.backend.default != "tensorrt":
            return choice, None, []
        if choice.chosen is None:
            return _with_refusals(choice, refused), None, refused
        check = check_tensorrt(models[choice.chosen], dims=_shape_ranges(models[choice.chosen], feeds))
        if check.version is None:  # not installed, crashed or out of time: no answer is not a refusal
            note = f"not checked with TensorRT's parser and builder: {check.errors[0]}"
            return choice, None, [*refused, note]
        if check.accepted:
            return choice, check, refused
        refused.append(f"TensorRT refuses {choice.chosen}: {check.errors[0]}")
        left = [one for one in left if one.id != choice.chosen]
        if not left:
            reason = "TensorRT refuses every candidate that keeps the limits"
            choice = Choice(None, (), choice.chosen, reason, "a model that its parser accepts")
            return _with_refusals(choice, refused), None, refused


def _with_refusals(choice: Choice, refused: Sequence[str]) -> Choice:
    """The refusal, with what TensorRT refused before: the limits alone would not explain it."""
    return replace(choice, reason="; ".join([choice.reason, *refused])) if refused else choice


def _shape_ranges(model: onnx.ModelProto, feeds: Feeds) -> dict[str, ShapeRange]:
    """Shapes of the inputs with free sizes beside the batch, which TensorRT must be told."""
    inputs, _ = tensor_specs(model)
    return {
        spec.name: ShapeRange.fixed(feeds[spec.name].shape)
        for spec in inputs
        if any(isinstance(size, str) for size in spec.shape[1:])
    }


def _scheme(target: Target) -> Scheme:
    """The quantized form that the target's engine runs."""
    form = target.quantization.form
    return SCHEMES["asymmetric-7bit" if form == "asymmetric" and target.quantization.reduce_range else form]


def _settled_dims(source: SourceModel, request: Request) -> dict[str, int]:
    """Sizes of all free dimensions: as given, as in the user's samples, or found by trial."""
    given = dict(request.dims)
    path = request.calibration or request.evaluation
    if path is not None:
        feeds, _ = next(open_data(path, source.inputs).stream(1))
        for spec in source.inputs:
            for axis, size in enumerate(spec.shape):
                if isinstance(size, str):
                    given.setdefault(size, feeds[spec.name].shape[axis])
    if request.batch is not None:
        given.update(dict.fromkeys(batch_dims(source.inputs), request.batch))
    return bind_dims(source.model, given)


def _fixed(source: SourceModel, batch: int | None) -> tuple[TensorSpec, ...]:
    """Inputs with the batch that the package will have."""
    if batch is None:
        return source.inputs
    free = batch_dims(source.inputs)
    return tuple(
        replace(spec, shape=tuple(batch if size in free else size for size in spec.shape))
        for spec in source.inputs
    )


def _first(samples: Samples, count: int) -> list[Feeds]:
    return list(islice(feeds_only(samples.calibration), count))


def _input_ranges(source: SourceModel, samples: Samples) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each float32 input over the first calibration samples."""
    found: dict[str, tuple[float, float]] = {}
    for feeds in islice(feeds_only(samples.calibration), 16):
        for spec in source.inputs:
            value = feeds[spec.name]
            if value.dtype.kind == "f" and value.size:
                low, high = found.get(spec.name, (float("inf"), float("-inf")))
                found[spec.name] = (min(low, float(value.min())), max(high, float(value.max())))
    return {name: pair if pair[0] < pair[1] else DEFAULT_RANGE for name, pair in found.items()}


def _recipe(
    request: Request,
    source: SourceModel,
    dims: Mapping[str, int],
    ranges: Mapping[str, tuple[float, float]],
    optimised: Optimised,
    candidate: Candidate,
    figures: Mapping[str, Any],
) -> Recipe:
    return Recipe(
        name=request.name,
        version=request.version,
        target=request.target.name,
        backend=request.target.backend.default,
        source_sha256=source.sha256,
        batch=request.batch,
        dims=dims,
        steps=tuple((step.name, step.form) for step in optimised.steps if step.applied),
        form=candidate.form,
        model_sha256=hashlib.sha256(candidate.model.SerializeToString(deterministic=True)).hexdigest(),
        golden_seed=_GOLDEN_SEED,
        golden_ranges=ranges,
        budget=request.budget.limits,
        figures=figures,
        labels=request.labels,
        preprocessing=request.preprocessing,
    )


def _figures(
    candidate: Candidate, scores: Scores, place: int, samples: Samples, memory: MemoryEstimate | None
) -> dict[str, Any]:
    """Figures of the manifest: those that do not vary from run to run."""
    return {
        "model_bytes": candidate.model.ByteSize(),
        "score": {
            "metric": scores.metric.name,
            "value": round(scores.scores[place], 6),
            "source_value": round(scores.baseline, 6),
            "samples": scores.samples,
            "samples_kind": samples.evaluation.kind,
            "samples_sha256": samples.evaluation.sha256,
            "label": "measured",
            "on": "host",
            "engine": "onnxruntime",
        },
        # Without the engine's part: that is measured on the host and varies from run to run.
        "memory_estimate": None
        if memory is None
        else {"bytes_above_engine": memory.model_bytes, "label": "estimated"},
    }


def _costs(
    target: Target,
    size: int,
    latency: Latency,
    modelled: Modelled,
    memory: MemoryEstimate | None,
    drop: float,
) -> dict[str, float]:
    """Costs in the units of the budget; one that is not known is infinite, so that no limit on it is kept."""
    here = measures_here(target)
    latency_ms = latency.median_s * 1e3 if here else modelled.latency_ms
    return {
        "size": float(size),
        "latency": math.inf if latency_ms is None else latency_ms,
        "memory": math.inf if memory is None else float(memory.total_bytes),
        "energy": math.inf if modelled.energy_mj is None else modelled.energy_mj,
        "drop": drop,
    }


def _warnings(request: Request, samples: Samples, found: Found) -> list[str]:
    notes = list(samples.warnings)
    notes.extend(f"left out: {text}" for text in found.dropped)
    backend = request.target.backend.default
    if backend not in _KINDS:
        notes.append(
            f"{request.target.name} prefers {backend}; this package is for onnxruntime, its fallback"
        )
    if backend == "tensorrt":
        notes.append(
            "scores are judged with onnxruntime on this machine; TensorRT builds its engine on the device and"
            " may round differently"
        )
        notes.append(
            "memory is estimated for the onnxruntime fallback; TensorRT's CUDA context is not modelled"
        )
    return notes


def first_feeds(run: Run) -> Feeds:
    """The first calibration sample, for measuring."""
    return _first(run.samples, 1)[0]
