"""The main job: from a model file to a choice among measured candidates. Nothing is written here.

Each phase is a function of the ones before; this is the only place that knows their order. A run of
`models/tiny/mnist5k_dscnn.onnx` for `rpi5` with `size=60kB,drop=1%`, whose figures are an example:

    prepare   the source in float32 (C0), 21 nodes; 300 samples calibrate, 1000 evaluate
    search    C1 float16 weights, C2 int8 weights, C3 dynamic int8, C4 int8 in all layers with the ranges of
              least error, C6 to C11 the same with 1 to 6 layers in float, C12 and C13 mixed weights
    judge     on half of the evaluation samples each scores 0.998, so no drop exceeds the limit
    measure   C2 takes 0.10 ms (predicted) and 30 kB as a signed package; C0 has 79 kB and breaks its limit
    compress  nothing: a plain form keeps every limit
    choose    12 of 13 within the limits are alike in time within the 1.4 x of the prediction, 4 of these
              within 15 % of the fastest here, and C2 is the smallest of the 4: the held-back half confirms it
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.evaluation.host_memory import measure_memory_here
from edgekit_toolkit.evaluation.scoring import Scores
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.packaging.assemble import PackageDraft, transport_bytes
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.acceptance import check_accepted, choose_accepted
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet, find_candidates
from edgekit_toolkit.pipeline.compressed_candidates import CompressionTask, add_compressed
from edgekit_toolkit.pipeline.judging import judge, measure_drops
from edgekit_toolkit.pipeline.prepare import Preparation, check_fixed_sizes, prepare
from edgekit_toolkit.pipeline.request import Phases, Progress, Request
from edgekit_toolkit.pipeline.run import JudgedCandidate, Run
from edgekit_toolkit.pipeline.warnings import find_warnings
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.samples.split import feeds_only
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import CandidateFigures, find_slowdown, pareto_front
from edgekit_toolkit.selection.confirmation import (
    Acceptance,
    AcceptedChoice,
    choose_confirmed,
    limits_in_force,
)


def search(
    request: Request, signer: StatementSigner, progress: Progress, prepared: Preparation | None = None
) -> Run:
    """Import, optimise, make and judge candidates, and choose; nothing is written.

    Args:
        request: the user's request.
        signer: signs packages, whose size is part of the choice.
        progress: where the phases are shown.
        prepared: model and samples from an earlier search for another engine of the same request. Default:
            made here.

    Raises:
        ModelError: the model cannot be used.
        DataError: the samples do not fit.
        BackendError: the engine fails on the source model.
        BudgetError: no form of the model can keep the limit on size.
    """
    phases, support = Phases(progress), find_support(request.backend)
    prepared = prepared or prepare(request, phases)
    with phases.phase("convert"):
        if support.maker.fixes_sizes and not prepared.floats.has_fixed_sizes:
            check_fixed_sizes(prepared)
        quantizer = _open_quantizer(request, prepared, prepared.floats)
    with phases.phase("search"):
        candidate_set = find_candidates(
            quantizer,
            lambda: feeds_only(prepared.samples.calibration),
            per_channel=request.target.quantization.per_channel,
            kinds=support.kinds,
            max_bytes=request.budget.limits.get("size", math.inf),
            limit_s=request.search_s,
            dims=prepared.dims,
            progress=progress,
            like=request.like,
            group=prepared.samples.calibration.group,
        )
    limits = limits_in_force(request.budget, has_data=prepared.has_data, strict=request.strict)
    judged = judge(request, limits, prepared, candidate_set, signer, phases)
    if request.like is None and request.search_s > 0 and (binding := _find_binding(judged.drafted, limits)):
        with phases.phase("compress"):
            _compress(
                request,
                prepared,
                quantizer,
                candidate_set,
                example=judged.drafted[-1].package,
                binding=binding,
                max_drop=limits.limits.get("drop", math.inf),
                signer=signer,
                progress=progress,
            )
        if len(candidate_set.candidates) > len(judged.drafted):
            judged = judge(request, limits, prepared, candidate_set, signer, phases)
    with phases.phase("choose"):
        candidates, accepted = _choose(
            request, limits, prepared, judged.drafted, scores=judged.scores, signer=signer, progress=progress
        )
    run = Run(
        request=request,
        prepared=prepared,
        quantizer=quantizer,
        found=candidate_set,
        candidates=candidates,
        scores=judged.scores,
        source_latency=judged.source_latency,
        load=judged.load,
        front=pareto_front([candidate.measured for candidate in candidates]),
        choice=accepted.choice,
        acceptance=accepted.acceptance,
        seconds=phases.seconds,
        warnings=[],
    )
    slowdown = [] if run.chosen is None else find_slowdown(run.float_ratio(run.chosen), request.target.name)
    return replace(run, warnings=[*find_warnings(run), *accepted.notes, *slowdown])


def _open_quantizer(request: Request, prepared: Preparation, floats: Model) -> Quantizer:
    maker = find_support(request.backend).maker
    return maker.open_quantizer(
        floats, request.target, threads=request.threads, dims=prepared.dims, feeds=prepared.feeds
    )


def _find_binding(drafted: Sequence[JudgedCandidate], limits: Budget) -> frozenset[str]:
    """Return the limits that keep out every candidate; none if one keeps them all.

    Samples that are held back do not count: they must not decide what is searched.
    """
    violations = [limits.violations(candidate.measured.figures) for candidate in drafted]
    return frozenset[str]() if () in violations else frozenset().union(*violations)


def _compress(
    request: Request,
    prepared: Preparation,
    quantizer: Quantizer,
    candidate_set: CandidateSet,
    *,
    example: PackageDraft,
    binding: frozenset[str],
    max_drop: float,
    signer: StatementSigner,
    progress: Progress,
) -> None:
    """Add compressed candidates for the limits that bind.

    `example`: a package whose model is replaced to see how many bytes travel.
    """
    if not isinstance(prepared.floats, OnnxModel):
        candidate_set.dropped.append("compressed forms: they are made of ONNX models, and this is a .tflite")
        return

    def measure_transport(candidate: Candidate) -> int:
        artifacts = {**example.artifacts, candidate.model.file_name: candidate.model.content}
        return transport_bytes(replace(example, artifacts=artifacts), signer)

    limit = request.budget.limits.get("transport", math.inf)
    task = CompressionTask(
        quantizer=quantizer,
        floats=prepared.floats.proto,
        limit_s=request.search_s,
        max_drop=max_drop,
        measure_drops=lambda models: measure_drops(request, prepared, models, progress),
        open_quantizer=lambda model: _open_quantizer(request, prepared, model),
        calibration=lambda: feeds_only(prepared.samples.calibration),
        dims=prepared.dims,
        arch=request.target.arch,
        needs_fewer_macs=not binding.isdisjoint({"latency", "energy", "memory", "size"}),
        max_transport_bytes=limit if "transport" in binding else math.inf,
        transport_bytes=measure_transport,
        progress=progress,
    )
    add_compressed(candidate_set, task)


def _choose(
    request: Request,
    limits: Budget,
    prepared: Preparation,
    drafted: Sequence[JudgedCandidate],
    *,
    scores: Scores,
    signer: StatementSigner,
    progress: Progress,
) -> tuple[tuple[JudgedCandidate, ...], AcceptedChoice]:
    """Return the choice, and the candidates with the drop of each that was compared with the limit."""
    by_id = {candidate.id: candidate for candidate in drafted}
    on_gpu = find_support(request.backend).on_gpu

    @functools.cache
    def check(candidate_id: str) -> Acceptance:
        candidate = by_id[candidate_id]
        return check_accepted(
            request.backend,
            candidate.model,
            candidate.package,
            prepared.feeds[0],
            signer,
            show=lambda text: progress(text, None, None),
        )

    def choose(measured: Sequence[CandidateFigures]) -> AcceptedChoice:
        if request.like is not None and len(drafted) > 1:  # the float model is there for comparison
            measured = [candidate for candidate in measured if candidate.id != drafted[0].id]
            # Weights near to the earlier ones make a smaller delta; the other candidate is for when they
            # break a limit.
            near = choose_accepted(limits, measured[:1], check, on_gpu=on_gpu)
            if near.choice.chosen is not None:
                reason = f"{measured[0].label}: within every limit; its delta is small"
                return replace(near, choice=replace(near.choice, reason=reason))
        return choose_accepted(limits, measured, check, on_gpu=on_gpu)

    confirmed = choose_confirmed(
        [candidate.measured for candidate in drafted],
        scores,
        limits,
        choose,
        has_data=prepared.has_data,
        strict=request.strict,
    )
    stated_drops = confirmed.held or [None] * len(drafted)
    candidates = (
        replace(candidate, measured=measured, held=drop)
        for candidate, measured, drop in zip(drafted, confirmed.measured, stated_drops, strict=True)
    )
    return tuple(candidates), confirmed.accepted


def with_measured_memory(run: Run, chosen: JudgedCandidate) -> Run:
    """Return the run with the measured memory of the chosen candidate here, beside the modelled memory."""
    memory = measure_memory_here(
        chosen.model,
        chosen.memory,
        run.prepared.feeds[0],
        target=run.request.target,
        limit_bytes=run.request.budget.limits.get("memory", math.inf),
    )
    return replace(run, memory_here=memory, warnings=[*run.warnings, *memory.notes])
