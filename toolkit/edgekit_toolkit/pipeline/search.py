"""The main search, from a model file to the choice of a measured candidate. No files are written.

Each phase uses the results of the phases before it. This module defines their order. As an example, this is a
run of `models/tiny/mnist5k_dscnn.onnx` for `rpi5` with the budget `size=60kB,drop=1%`:

    prepare   The float32 model C0 has 21 nodes. There are 300 calibration and 1000 evaluation samples.
    search    C1 has float16 weights, C2 has int8 weights, and C3 has dynamic int8 arithmetic. Most of the
              others have static int8 arithmetic, some with layers in float.
    judge     All candidates score 0.998 on half of the evaluation samples, so no drop exceeds the limit.
    measure   C2 takes 0.10 ms (predicted) and 30 kB as a signed package. C0 takes 79 kB and exceeds 60 kB.
    compress  Nothing is compressed, because candidates without compression meet all limits.
    choose    All candidates except C0 meet the limits. Their latencies are equal within the error of the
              prediction. C2 is the smallest of those within 15 % of the fastest on this machine. The other
              half of the evaluation samples confirms C2.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.evaluation.host_memory import measure_memory_here
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.acceptance import check_accepted, choose_accepted
from edgekit_toolkit.pipeline.candidates import CandidateSet, StoppedSearch, find_candidates
from edgekit_toolkit.pipeline.compressed_candidates import compress, open_quantizer
from edgekit_toolkit.pipeline.judging import JudgedSet, Judging
from edgekit_toolkit.pipeline.prepare import Preparation, prepare
from edgekit_toolkit.pipeline.request import Phases, Progress, Request
from edgekit_toolkit.pipeline.run import JudgedCandidate, Run
from edgekit_toolkit.pipeline.warnings import find_warnings
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.samples.split import feeds_only
from edgekit_toolkit.selection.choice import CandidateFigures, Choice, find_slowdown, pareto_front
from edgekit_toolkit.selection.confirmation import (
    Acceptance,
    AcceptedChoice,
    choose_confirmed,
)


def search(
    request: Request, signer: StatementSigner, progress: Progress, prepared: Preparation | None = None
) -> Run:
    """Import and optimise the model, build and judge candidates, and choose one. No files are written.

    Args:
        request: The request of the user.
        signer: Signs the package of each candidate, so that its size includes the signature.
        progress: Called with the current step, the number of finished parts and the total number of parts, or
            None if they are unknown.
        prepared: The model and samples from the search for another engine of the same request, or None.

    Raises:
        ModelError: The model cannot be used.
        DataError: The samples do not fit the model.
        BackendError: The engine fails on the source model.
        BudgetError: No form of the model can meet the limit on the size.
    """
    phases = Phases(progress)
    prepared = prepared or prepare(request, phases)
    with phases.phase("convert"):
        quantizer = open_quantizer(request, prepared, prepared.floats)
    with phases.phase("search"):
        candidate_set = _find_candidates(request, prepared, quantizer, progress)
    judged = _judge(request, prepared, quantizer, candidate_set, signer=signer, phases=phases)
    with phases.phase("choose"):
        candidates, accepted = _choose(request, prepared, judged, signer=signer, progress=progress)
    run = Run(
        request=request,
        prepared=prepared,
        quantizer=quantizer,
        candidate_set=candidate_set,
        candidates=candidates,
        scores=judged.scores,
        source_latency=judged.source_latency,
        load=judged.load,
        front=pareto_front([candidate.measured for candidate in candidates]),
        choice=_with_hint(accepted.choice, request, prepared, candidate_set.stops),
        acceptance=accepted.acceptance,
        seconds=phases.seconds,
        warnings=[],
    )
    slowdown = [] if run.chosen is None else find_slowdown(run.float_ratio(run.chosen), request.target.name)
    return replace(run, warnings=[*find_warnings(run), *accepted.notes, *slowdown])


def _find_candidates(
    request: Request, prepared: Preparation, quantizer: Quantizer, progress: Progress
) -> CandidateSet:
    may_prune = request.like is None and request.search_s > 0
    return find_candidates(
        quantizer,
        lambda: feeds_only(prepared.samples.calibration),
        per_channel=request.target.quantization.per_channel,
        kinds=find_support(request.backend).kinds,
        max_bytes=request.budget.limits.get("size", math.inf),
        limit_s=request.search_s,
        dims=prepared.dims,
        progress=progress,
        like=request.like,
        group=prepared.samples.calibration.group,
        prunable=prepared.floats if may_prune and isinstance(prepared.floats, OnnxModel) else None,
    )


def _judge(
    request: Request,
    prepared: Preparation,
    quantizer: Quantizer,
    candidate_set: CandidateSet,
    *,
    signer: StatementSigner,
    phases: Phases,
) -> JudgedSet:
    """Return the candidates with their figures; compressed ones are added where a limit binds."""
    judging = Judging(request, prepared, candidate_set, signer, phases, quantizer=quantizer)
    judging.judge_added()
    if request.like is not None or request.search_s == 0:
        return judging.measure()
    is_timed = not {"latency", "energy"}.isdisjoint(judging.limits.limits)
    judged = judging.measure() if is_timed else None
    if binding := _find_binding(judging, judged):
        with phases.phase("compress"):
            compress(
                request,
                prepared,
                quantizer,
                candidate_set,
                drafts=judging.drafts,
                binding=binding,
                max_drop=judging.limits.limits.get("drop", math.inf),
                measure_drops=judging.measure_drops,
                signer=signer,
                progress=phases.progress,
            )
        if len(candidate_set.candidates) > len(judging.drafts):
            judging.judge_added()
            judged = None
    return judged or judging.measure()


def _with_hint(
    choice: Choice, request: Request, prepared: Preparation, stops: Sequence[StoppedSearch]
) -> Choice:
    """Return a refusal with hints on options for further or smaller packages.

    `stops`: what the limit of the search left out.
    """
    if choice.chosen is not None or request.like is not None:
        return choice
    helpful = [stop.needed_s for stop in stops if not stop.limits.isdisjoint(choice.binding)]
    hints = [request.option_for(max(helpful))] if helpful else []
    if "transport" in choice.binding:
        if not isinstance(prepared.floats, OnnxModel):
            hints.append("the model as ONNX: weights of a .tflite cannot be coded in fewer bits")
        elif request.search_s == 0:
            hints.append("--search-seconds over 0, so that weights of fewer bits are tried")
        elif prepared.samples.calibration.is_generated:
            hints.append("samples (--calibration), with which weights of few bits lose less")
    return replace(choice, needed=", or ".join([str(choice.needed), *hints]))


def _find_binding(judging: Judging, judged: JudgedSet | None) -> frozenset[str]:
    """Return the limits that together exclude every candidate; empty if a candidate meets all limits.

    A candidate is ignored if another candidate breaks only some of its limits.

    Samples that are held back do not count: they must not decide what is searched.

    `judged`: None if no limit is on what a clock measures.
    """
    candidates = judging.drafts if judged is None else judged.candidates
    violations = [
        frozenset(judging.limits.violations(candidate.measured.figures)) for candidate in candidates
    ]
    return frozenset[str]().union(
        *(broken for broken in violations if not any(fewer < broken for fewer in violations))
    )


def _choose(
    request: Request,
    prepared: Preparation,
    judged: JudgedSet,
    *,
    signer: StatementSigner,
    progress: Progress,
) -> tuple[tuple[JudgedCandidate, ...], AcceptedChoice]:
    """Return the choice, and the candidates with the drop of each that was compared with the limit."""
    drafted, limits = judged.candidates, judged.limits
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
        judged.scores,
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
    """Measure the memory of `chosen` on this machine, and add the result and warnings to a copy of `run`."""
    memory = measure_memory_here(
        chosen.model,
        chosen.memory,
        run.prepared.feeds[0],
        target=run.request.target,
        limit_bytes=run.request.budget.limits.get("memory", math.inf),
    )
    return replace(run, memory_here=memory, warnings=[*run.warnings, *memory.notes])
