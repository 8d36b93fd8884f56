"""The main job: from a model file to a choice among measured candidates. Nothing is written here.

Each phase is a function of the ones before; this is the only place that knows their order.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import onnx

from edgekit_runtime.drift.class_outputs import class_output
from edgekit_runtime.errors import BackendError, DataError, ModelError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.judge import find_memory, measure_latencies, model_on_target
from edgekit_toolkit.evaluation.scoring import Contestant, Scores, score_candidates
from edgekit_toolkit.importers.model_file import SourceModel
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.measurement.host_load import LoadMeter
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.ort_options import disable_optimizers
from edgekit_toolkit.onnx_graph.specs import batch_dims, free_dims
from edgekit_toolkit.packaging.assemble import GOLDEN_SEED, Reference, golden_reference
from edgekit_toolkit.packaging.attachments import class_names
from edgekit_toolkit.packaging.drift_reference import drift_reference
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.passes.pipeline import PassResult, optimise
from edgekit_toolkit.passes.wrong_rewrites import find_wrong_rewrites
from edgekit_toolkit.pipeline.candidate_set import Found
from edgekit_toolkit.pipeline.candidates import find_candidates
from edgekit_toolkit.pipeline.drafts import draft_packages
from edgekit_toolkit.pipeline.free_sizes import Size, find_other_sizes, list_sizes, settle_sizes
from edgekit_toolkit.pipeline.state import Judged, Prepared, Request, Run
from edgekit_toolkit.pipeline.tensorrt_acceptance import Accepted, choose_accepted
from edgekit_toolkit.pipeline.warnings import find_warnings
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.scheme import LITERT, LITERT_AVX512, SCHEMES, Scheme
from edgekit_toolkit.samples.generated import Feeds, advise_on_integers
from edgekit_toolkit.samples.media.classes import check_class_count
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.split import (
    Ranges,
    Samples,
    choose_samples,
    feeds_only,
    first_feeds,
    read_ranges,
)
from edgekit_toolkit.selection.choice import Choice, Measured, pareto_front
from edgekit_toolkit.selection.confirmation import choose_confirmed, limits_in_force
from edgekit_toolkit.selection.float_ratio import find_float_ratio, find_slowdown

# Parity is checked a dozen times; one large image shows what two would.
_PARITY_FEEDS = 2
_LARGE_FEEDS_BYTES = 1 << 20
# Forms by the engine that the package is for. TensorRT takes none of the others (docs/reference/tensorrt.md).
_KINDS = {
    "ort": frozenset(forms.KINDS),
    "litert": frozenset(forms.KINDS),
    "tensorrt": frozenset({forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.INT8_WEIGHTS, forms.STATIC_INT8}),
}

Progress = Callable[[str, int | None, int | None], None]


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


def search(
    request: Request, signer: StatementSigner, progress: Progress, prepared: Prepared | None = None
) -> Run:
    """Import, optimise, make and judge candidates, and choose; nothing is written.

    Args:
        request: what the user asked for.
        signer: signs packages, whose size is part of the choice.
        progress: called with what is done now, how much of it is done and how much there is.
        prepared: of an earlier search for another engine of the same request; by default made anew.

    Raises:
        ModelError: the model cannot be used.
        DataError: the samples do not fit.
        BackendError: the engine fails on the source model.
    """
    phases = _Phases(progress)
    prepared = prepared or _prepare(request, phases)
    with phases.phase("convert"):
        quantizer = _quantizer(request, prepared)
    with phases.phase("search"):
        found = _find(request, prepared, quantizer, progress)
    judged = _judge(request, prepared, found, phases)
    has_data = not prepared.samples.evaluation.is_generated
    limits = limits_in_force(request.budget, has_data=has_data, strict=request.strict)
    with phases.phase("choose"):
        drafts = draft_packages(replace(request, budget=limits), prepared, found, judged, signer)
        models = {draft.measured.id: one.model for draft, one in zip(drafts, found.candidates, strict=True)}

        def choose(measured: Sequence[Measured]) -> Accepted:
            return choose_accepted(request.backend, limits, measured, models, prepared.feeds[0])

        confirmed = choose_confirmed(
            [draft.measured for draft in drafts], judged.scores, limits, choose,
            has_data=has_data, strict=request.strict,
        )  # fmt: skip
    accepted = confirmed.accepted
    return Run(
        request=request,
        prepared=prepared,
        quantizer=quantizer,
        found=found,
        judged=judged,
        drafts=tuple(
            replace(draft, measured=one) for draft, one in zip(drafts, confirmed.measured, strict=True)
        ),
        held=confirmed.held,
        front=pareto_front(confirmed.measured),
        choice=accepted.choice,
        tensorrt=accepted.check,
        seconds=phases.seconds,
        warnings=[
            *find_warnings(request, prepared, found, judged),
            *accepted.notes,
            *_slowdown(request, judged, accepted.choice, confirmed.measured),
        ],
    )


def _slowdown(request: Request, judged: Judged, choice: Choice, measured: Sequence[Measured]) -> list[str]:
    """A warning where the chosen candidate is slower here than the float model."""
    if choice.chosen is None:
        return []
    place = next(place for place, one in enumerate(measured) if one.id == choice.chosen)
    return find_slowdown(find_float_ratio(request, judged, place), request.target.name)


def _prepare(request: Request, phases: _Phases) -> Prepared:
    with phases.phase("import"):
        source = load_model(request.model)
        decoding = _decoding(request, source, phases.progress)
        sizes, ranges = _sizes(source, request, decoding)
        dims = {name: size.value for name, size in sizes.items()}
        samples = choose_samples(
            _fixed(source, request.batch),
            request.calibration,
            request.evaluation,
            dims,
            ranges,
            decoding=decoding,
        )
    feeds = _parity_feeds(samples)
    floats, steps, wrong = source.model, tuple[PassResult, ...](), None
    if isinstance(floats, OnnxModel):
        with phases.phase("optimise"):
            optimised = optimise(floats.proto, batch=request.batch, feeds=feeds)
            proto, steps = onnx.shape_inference.infer_shapes(optimised.model), optimised.steps
            wrong = find_wrong_rewrites(proto, feeds)
            floats = OnnxModel(disable_optimizers(proto, () if wrong is None else wrong.names))
    golden = _golden(source, floats, dims, ranges)
    with phases.phase("look at the samples"):
        classes = _stated_class_output(request, floats, samples)
        reference = drift_reference(floats, samples.calibration, says_classes=classes is not None)
    return Prepared(
        source=source,
        sizes=sizes,
        samples=samples,
        feeds=feeds,
        steps=steps,
        wrong_rewrites=wrong,
        floats=floats,
        ranges=ranges,
        golden=golden,
        reference=reference,
        class_output=classes,
    )


def _golden(source: SourceModel[Model], floats: Model, dims: Mapping[str, int], ranges: Ranges) -> Reference:
    """The golden inputs, before any search: they are generated, and a model may refuse them.

    Raises:
        ModelError: the model does not run on them, or makes other shapes than it states.
    """
    try:
        golden = golden_reference(floats, dims, ranges, GOLDEN_SEED)
    except BackendError as error:
        raise ModelError(
            f"{source.path}: the model does not run on the golden inputs, which are generated."
            f"{advise_on_integers(source.inputs, ranges)} Reason: {error}"
        ) from error
    try:
        for spec in floats.specs(list(golden.outputs))[1]:
            spec.check(golden.outputs[spec.name])
    except DataError as error:
        raise ModelError(
            f"{source.path}: an output is not what the model states: {error}; export it with the right shape,"
            " or a free one"
        ) from error
    return golden


def _stated_class_output(request: Request, floats: Model, samples: Samples) -> str | None:
    """Return the first output's name where something else than its shape says that it is class scores."""
    output = class_output(floats.specs()[1])
    if output is None:
        return None
    if request.metric == "auto":
        is_stated = samples.evaluation.labelled
    else:
        is_stated = request.metric in ("top1", "top5", "agreement")
    if not is_stated and request.labels is not None:
        is_stated = len(class_names(request.labels)) == output.shape[-1]
    return output.name if is_stated else None


def _quantizer(request: Request, prepared: Prepared) -> Quantizer[Any]:
    """The forms of the model for the engine that the package is for.

    Raises:
        ModelError: the model cannot be converted to the engine's format.
        EngineMissingError: it takes LiteRT, which is not installed here.
    """
    floats = prepared.floats
    if isinstance(floats, OnnxModel) and request.backend != "litert":
        return OnnxQuantizer(floats.proto, _scheme(request), threads=request.threads)
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
    from edgekit_toolkit.tflite.check import convert_checked

    content = floats.content
    if isinstance(floats, OnnxModel):
        _check_fixed_sizes(prepared)
        content = convert_checked(floats.proto, prepared.dims, prepared.feeds).model
    scheme = LITERT_AVX512 if "avx512" in request.target.cpu.isa else LITERT
    return LiteRtQuantizer(content, threads=request.threads, scheme=scheme)


def _check_fixed_sizes(prepared: Prepared) -> None:
    """Refuse samples of other sizes than a `.tflite` of these sizes would take."""
    inputs, dims = prepared.source.inputs, prepared.dims
    other = find_other_sizes(inputs, dims, prepared.feeds)
    if other:
        wanted = list_sizes({name: dims[name] for name in other})
        raise ModelError(
            f"{prepared.source.path}: for LiteRT sizes are fixed, here to {wanted}, and a sample has"
            f" {list_sizes(other)}; give samples of one size, without --dim, or take --backend ort"
        )


def _find(request: Request, prepared: Prepared, quantizer: Quantizer[Any], progress: Progress) -> Found:
    return find_candidates(
        quantizer,
        lambda: feeds_only(prepared.samples.calibration),
        per_channel=request.target.quantization.per_channel,
        kinds=_KINDS[request.backend],
        time_limit_s=request.search_s,
        progress=progress,
    )


def _judge(request: Request, prepared: Prepared, found: Found, phases: _Phases) -> Judged:
    source, target, dims = prepared.source, request.target, prepared.dims
    names = [spec.name for spec in source.outputs]
    with phases.phase("judge"):
        reference = source.model.open(names, threads=request.threads)
        runs = [one.model.open(names, threads=request.threads) for one in found.candidates]
        scores = score_candidates(
            source.model.open(names, threads=request.threads, rewrites=False),
            [
                # Dynamic int8 takes its ranges from the whole batch: alone, as on the device. A .tflite that
                # was converted has a fixed batch.
                Contestant(run, one.form.kind == forms.DYNAMIC_INT8 or request.backend == "litert")
                for run, one in zip(runs, found.candidates, strict=True)
            ],
            prepared.samples.evaluation, request.metric, inputs=source.inputs, outputs=source.outputs,
            progress=lambda done, total: phases.progress("judging on held-out samples", done, total),
        )  # fmt: skip
        found.leave_out(scores.spoiled)
        runs = [run for place, run in enumerate(runs) if place not in scores.spoiled]
        scores = scores.without(scores.spoiled)
        if prepared.samples.evaluation.is_generated:
            unlike = _unlike(scores, request.budget.limits.get("drop", math.inf))
            found.set_apart(unlike)
            runs = [run for place, run in enumerate(runs) if place not in unlike]
            scores = scores.without(unlike)
    models = [one.model for one in found.candidates]
    with phases.phase("measure"):
        meter = LoadMeter()
        source_latency, latencies = measure_latencies(reference, runs, prepared.feeds[0])
        load = meter.finish(source_latency)
        modelled = tuple(model_on_target(model, target, dims) for model in models)
        memory = [find_memory(model, target, dims, prepared.feeds[0]) for model in models]
    return Judged(
        scores=scores,
        source_latency=source_latency,
        latencies=latencies,
        load=load,
        modelled=modelled,
        memory=tuple(None if isinstance(one, str) else one for one in memory),
        problems=tuple(dict.fromkeys(one for one in memory if isinstance(one, str))),
    )


def _unlike(scores: Scores, limit_points: float) -> dict[int, str]:
    """Return the candidates that generated inputs show to be other models than the float one, and how far.

    It says nothing of accuracy, but keeps a form that computes nonsense from being the smallest or fastest.
    """
    return {
        place: f"{drop.points:.2f} points less {scores.metric.title} on generated inputs"
        for place, drop in enumerate(scores.choosing.drops)
        if place and drop.points > limit_points
    }


def _scheme(request: Request) -> Scheme:
    """The quantized form that the engine runs: TensorRT's own, or that of onnxruntime on this processor."""
    stated = request.target.quantization
    if request.backend == "tensorrt":
        return SCHEMES[stated.form]
    return SCHEMES["asymmetric-7bit" if stated.reduce_range else "asymmetric"]


def _decoding(request: Request, source: SourceModel[Model], progress: Progress) -> Decoding:
    """How the request's photographs or recordings become samples.

    Raises:
        DataError: they lie in folders that are not the model's classes.
    """
    classes = () if request.labels is None else class_names(request.labels)
    if request.labels_from_folders:
        check_class_count(classes, source.outputs)
    return Decoding(
        request.preprocessing, classes, progress=lambda done, total: progress("reading files", done, total)
    )


def _sizes(
    source: SourceModel[Model], request: Request, decoding: Decoding
) -> tuple[dict[str, Size], Ranges]:
    """Sizes of all free dimensions, and the ranges of the inputs' values."""
    given = dict(request.dims)
    path = request.calibration or request.evaluation
    if path is None:
        codes = source.model.input_code_ranges()
        ranges: Ranges = {name: (held.low, held.high) for name, held in codes.items()}
        first = None
    else:
        first, ranges = read_ranges(path, source.inputs, decoding)
    if not source.model.has_fixed_sizes:
        if request.batch is not None:
            given.update(dict.fromkeys(batch_dims(source.inputs), request.batch))
    elif request.batch is not None or set(request.dims) - set(free_dims(source.inputs)):
        raise ModelError(
            f"{source.path}: --batch and --dim cannot change the sizes of a .tflite; give the ONNX model, or"
            " export the file with the sizes that you want"
        )
    return settle_sizes(source.model, source.inputs, given, first, ranges), ranges


def _fixed(source: SourceModel[Model], batch: int | None) -> tuple[TensorSpec, ...]:
    """Inputs with the batch that the package will have."""
    if batch is None:
        return source.inputs
    free = batch_dims(source.inputs)
    return tuple(
        replace(spec, shape=tuple(batch if size in free else size for size in spec.shape))
        for spec in source.inputs
    )


def _parity_feeds(samples: Samples) -> Sequence[Feeds]:
    feeds = first_feeds(samples.calibration, _PARITY_FEEDS)
    large = sum(array.nbytes for array in feeds[0].values()) > _LARGE_FEEDS_BYTES
    return feeds[:1] if large else feeds
