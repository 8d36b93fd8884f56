"""Builds compressed candidates if no other candidate meets all limits.

Compressed forms use the ranges and kernels of the best static int8 form, or int8 weights with float
arithmetic. The weights are rounded with the second moments of the layer inputs, see `compressed_forms`. The
weights have 8 bits, or fewer if the limit on transport requires it. If a limit on latency, energy, memory or
size requires it, channels are pruned first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

import numpy as np
import onnx

from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.compress.pruning import MAX_MULTIPLE, PRUNED_SHARES, prune
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.packaging.assemble import transport_bytes
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.candidates import CandidateSet, narrow_ranges
from edgekit_toolkit.pipeline.compressed_forms import (
    COST_LIMITS,
    FAILURES,
    CompressionTask,
    FloatStart,
    FormCompressor,
    in_turns,
    rounding_s,
)
from edgekit_toolkit.pipeline.near_misses import DISTILLED_SHARE, improve_near_misses
from edgekit_toolkit.pipeline.prepare import Preparation, check_fixed_sizes
from edgekit_toolkit.pipeline.request import Progress, Request
from edgekit_toolkit.pipeline.run import JudgedCandidate
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form, compressed_floats
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.search_work import SearchWork
from edgekit_toolkit.quantize.sensitivity import Fidelity, softmax_axes
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.split import feeds_only

# Int8 kernels are fast for multiples of this number of channels. AVX-512 multiplies 16 at a time.
_CHANNELS_MULTIPLES: Final = {"x86_64": MAX_MULTIPLE}
_USUAL_MULTIPLE: Final = 8
# Samples for second moments, and the most bytes that their activations take while layers are rounded.
_SAMPLES: Final = 200
_LEAST_SAMPLES: Final = 2
_ACTIVATION_BYTES: Final = 1 << 30
_NOISE_SAMPLES: Final = 16
_PRUNING_ROUNDS: Final = 3  # a ranking and three repairs take about as much work as this many roundings


def compress(
    request: Request,
    prepared: Preparation,
    quantizer: Quantizer,
    candidate_set: CandidateSet,
    *,
    drafts: Sequence[JudgedCandidate],
    binding: frozenset[str],
    max_drop: float,
    measure_drops: Callable[[Sequence[Model]], Sequence[float]],
    signer: StatementSigner,
    progress: Progress,
) -> None:
    """Add compressed candidates to `candidate_set`, to meet the limits in `binding`.

    `drafts` are the forms without compression. Their packages are used to compute the transport size of
    compressed models. `binding` contains the limits that together exclude all forms without compression.
    `max_drop` and the results of `measure_drops` are in points, which are hundredths of the score.
    """
    if not isinstance(prepared.floats, OnnxModel):
        candidate_set.dropped.append("compressed forms: they are made of ONNX models, and this is a .tflite")
        return

    examples = {draft.form.kind: draft.package for draft in reversed(drafts)}

    def measure_transport(model: Model, kind: str) -> int:
        example = examples[kind]
        artifacts = {**example.artifacts, model.file_name: model.content}
        return transport_bytes(replace(example, artifacts=artifacts), signer)

    limit = request.budget.limits.get("transport", math.inf)
    task = CompressionTask(
        quantizer=quantizer,
        floats=prepared.floats.proto,
        open_quantizer=lambda model: open_quantizer(request, prepared, model),
        calibration=lambda: feeds_only(prepared.samples.calibration),
        dims=prepared.dims,
        arch=request.target.arch,
        needs_fewer_macs=not binding.isdisjoint(COST_LIMITS),
        max_transport_bytes=limit if "transport" in binding else math.inf,
        transport_bytes=measure_transport,
        max_drop=max_drop,
        measure_drops=measure_drops,
        work=SearchWork(prepared.floats, prepared.dims, request.search_s),
        progress=progress,
    )
    _add_all(candidate_set, task)


def open_quantizer(request: Request, prepared: Preparation, floats: Model) -> Quantizer:
    maker = find_support(request.backend).maker
    if maker.fixes_sizes and not floats.has_fixed_sizes:
        check_fixed_sizes(prepared)
    return maker.open_quantizer(
        floats, request.target, threads=request.threads, dims=prepared.dims, feeds=prepared.feeds
    )


def _add_all(candidate_set: CandidateSet, task: CompressionTask) -> None:
    starts = _find_starts(candidate_set, task)
    if not starts:
        candidate_set.dropped.append("compressed forms: the model has no int8 form to start from")
        return
    samples = _draw_samples(task)
    fidelity = Fidelity(
        OnnxModel(task.floats),
        samples[:_NOISE_SAMPLES],
        threads=task.quantizer.threads,
        softmax_axes=softmax_axes(task.floats),
        work=task.work,
    )
    compressors = [FormCompressor(candidate_set, task, samples, fidelity, start) for start in starts]
    if task.needs_fewer_macs:
        forms_s = len(PRUNED_SHARES) * compressors[0].most_s
        models = _prune(candidate_set, task, samples, fidelity, starts[0].bases, forms_s=forms_s)
        pruned = [FormCompressor(candidate_set, task, samples, fidelity, start) for start in models]
        # The whole model loses least, but keeps no other limit than that on transport.
        is_first = math.isfinite(task.max_transport_bytes)
        compressors = [*compressors, *pruned] if is_first else [*pruned, *compressors]
    for _ in in_turns(compressor.add_forms() for compressor in compressors):
        pass


def _find_starts(candidate_set: CandidateSet, task: CompressionTask) -> list[FloatStart]:
    """Return the float model for each form to compress.

    They are the static int8 form with all layers and, where there is none or where each byte counts, the
    form of int8 weights, whose graph is smaller.
    """
    static = _find_static(candidate_set)
    weights = next(
        (
            candidate.form
            for candidate in candidate_set.candidates
            if candidate.form.kind == forms.INT8_WEIGHTS and candidate.form.layers is None
        ),
        None,
    )
    starts = []
    if static is not None:
        floats = compressed_floats(task.floats, static)
        starts.append(FloatStart(floats=floats, bases={"int8": static}))
    if weights is not None and (static is None or math.isfinite(task.max_transport_bytes)):
        named = {"float arithmetic": weights}
        if static is not None and not static.factors:
            starts[0].bases.update(named)
        else:
            starts.append(FloatStart(floats=task.floats, bases=named))
    return starts


def _find_static(candidate_set: CandidateSet) -> Form | None:
    """Return the static int8 form with a scale for each channel that has the most kernels, the first such."""
    with_plans = (
        (len(candidate.form.plan.kernels), candidate.form)
        for candidate in candidate_set.candidates
        if candidate.form.plan is not None and candidate.form.plan.per_channel
    )
    return max(with_plans, key=lambda pair: pair[0], default=(0, None))[1]


def _prune(
    candidate_set: CandidateSet,
    task: CompressionTask,
    samples: Sequence[Feeds],
    fidelity: Fidelity,
    bases: Mapping[str, Form],
    *,
    forms_s: float,
) -> list[FloatStart]:
    """Return float models with fewer and fewer channels, each with the forms `bases` for its own ranges.

    `forms_s`: the most work that their compressed forms may need.
    """
    cost_s = _PRUNING_ROUNDS * rounding_s(task.floats, len(samples), task)
    if not task.work.take(cost_s):
        more_s = cost_s + forms_s / (1 - DISTILLED_SHARE)
        candidate_set.record_stop("pruned forms", task.work.spent_s, more_s, COST_LIMITS)
        return []
    try:
        sliced_models = prune(
            task.floats,
            samples,
            shares=PRUNED_SHARES,
            multiple=_CHANNELS_MULTIPLES.get(task.arch, _USUAL_MULTIPLE),
            threads=task.quantizer.threads,
            measure_noise=lambda model: fidelity.noise(OnnxModel(model)),
            progress=lambda done, total: task.progress("ranking channels", done, total),
        )
        all_macs = _count_macs(task.floats, task.dims)
        better, reasons = improve_near_misses([sliced.model for sliced in sliced_models], samples, task)
        candidate_set.dropped += reasons
        starts = []
        for sliced, distilled in zip(sliced_models, better, strict=True):
            model, note = (sliced.model, "") if distilled is None else (distilled, ", distilled")
            saved = 1 - _count_macs(sliced.model, task.dims) / all_macs
            quantizer = task.open_quantizer(OnnxModel(onnx.shape_inference.infer_shapes(model)))
            own = {name: _with_own_ranges(task, quantizer, form, fidelity) for name, form in bases.items()}
            starts.append(
                FloatStart(
                    name=f"{100 * saved:.0f} % of the work pruned{note}",
                    floats=model,
                    channels=sliced.channels,
                    is_distilled=distilled is not None,
                    bases=own,
                )
            )
    except FAILURES as error:
        candidate_set.dropped.append(f"pruned forms: {str(error).splitlines()[0]}")
        return []
    if not starts:
        candidate_set.dropped.append("pruned forms: no channels can go")
    return starts


def _with_own_ranges(task: CompressionTask, quantizer: Quantizer, form: Form, fidelity: Fidelity) -> Form:
    """Return a form with the ranges of another model's activations that cause the least noise."""
    plan = form.plan
    if plan is None:
        return form
    kernels = tuple(name for name in quantizer.kernels(elementwise=True) if name in plan.kernels)
    ranges = quantizer.ranges(kernels, task.calibration, lambda: task.work.count(inferences=1))
    whole = {name: item.whole() for name, item in ranges.items()}
    narrowed = narrow_ranges(quantizer, kernels, list(islice(task.calibration(), _NOISE_SAMPLES)), whole)
    candidates = [
        replace(form, factors={}, plan=replace(plan, kernels=frozenset(kernels), ranges=rival))
        for rival in (whole, *narrowed.values())
    ]
    return min(candidates, key=lambda candidate: _noise(quantizer, candidate, fidelity))


def _noise(quantizer: Quantizer, form: Form, fidelity: Fidelity) -> float:
    built = quantizer.build(form)
    return math.inf if built is None else fidelity.noise(built)


def _count_macs(model: onnx.ModelProto, dims: Mapping[str, int]) -> float:
    return max(sum(cost.macs for cost in OnnxModel(model).node_costs(dims)), 1)


def _draw_samples(task: CompressionTask) -> list[Feeds]:
    """Return samples for moments, as many as fit in memory with their activations."""
    try:
        estimate = OnnxModel(task.floats).estimate_memory(task.dims, blocked_layout=False)
        sample_bytes = 1 if estimate is None else estimate.activations_bytes
    except EdgekitError:
        sample_bytes = 1
    # Both runs keep the tensors between two layers, which are less than an engine holds at once.
    count = int(np.clip(_ACTIVATION_BYTES // max(2 * sample_bytes, 1), _LEAST_SAMPLES, _SAMPLES))
    return list(islice(task.calibration(), count))
