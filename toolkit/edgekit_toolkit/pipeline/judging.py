"""Judges the candidates of a search: scores on samples, latencies here, and the package that each becomes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgekit_runtime.sessions.latency import Latency
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.evaluation.judge import measure_latencies, measure_processor_ratios
from edgekit_toolkit.evaluation.scoring import Scores, score_candidates
from edgekit_toolkit.measurement.host_load import HostLoad, LoadMeter
from edgekit_toolkit.models.model import Model, Runner
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.candidates import CandidateSet
from edgekit_toolkit.pipeline.drafts import draft_packages
from edgekit_toolkit.pipeline.prepare import Preparation
from edgekit_toolkit.pipeline.request import Phases, Progress, Request
from edgekit_toolkit.pipeline.run import JudgedCandidate
from edgekit_toolkit.quantize.forms import DYNAMIC_INT8
from edgekit_toolkit.selection.budget import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSet:
    """Candidates with their figures."""

    scores: Scores
    drafted: Sequence[JudgedCandidate]
    source_latency: Latency
    load: HostLoad


def judge(
    request: Request,
    limits: Budget,
    prepared: Preparation,
    candidate_set: CandidateSet,
    signer: StatementSigner,
    phases: Phases,
) -> JudgedSet:
    """Return scores, costs and packages of the candidates; removes those that cannot be chosen."""
    names = [spec.name for spec in prepared.source.outputs]
    with phases.phase("judge"):
        reference = prepared.source.model.open(names, threads=request.threads)
        scores, runs = _score(request, prepared, candidate_set, names, phases.progress)
    with phases.phase("measure"):
        meter = LoadMeter()
        latencies = measure_latencies([reference, *runs], prepared.feeds[0])
        load = meter.finish(latencies[0])
        runs = [reference, *runs]
        if request.threads != 1:
            models = [prepared.source.model, *(candidate.model for candidate in candidate_set.candidates)]
            runs = [model.open(names, threads=1) for model in models]
        _, *ratios = measure_processor_ratios(runs, prepared.feeds[0])
        drafted = draft_packages(
            replace(request, budget=limits),
            prepared,
            candidate_set.candidates,
            scores,
            signer,
            latencies=latencies[1:],
            processor_ratios=ratios,
        )
    return JudgedSet(scores=scores, drafted=drafted, source_latency=latencies[0], load=load)


def _score(
    request: Request,
    prepared: Preparation,
    candidate_set: CandidateSet,
    names: Sequence[str],
    progress: Progress,
) -> tuple[Scores, list[Runner]]:
    """Return scores and sessions of the candidates; removes those that cannot be chosen."""
    runs = [candidate.model.open(names, threads=request.threads) for candidate in candidate_set.candidates]
    # Dynamic int8 takes its ranges from the whole batch, so samples run alone, as on the device. A converted
    # .tflite has a fixed batch.
    takes_batch_range = any(candidate.form.kind == DYNAMIC_INT8 for candidate in candidate_set.candidates)
    runs_alone = takes_batch_range or find_support(request.backend).maker.fixes_sizes
    scores = _score_runs(request, prepared, runs, progress, alone=runs_alone)
    candidate_set.leave_out(scores.spoiled)
    runs = [run for index, run in enumerate(runs) if index not in scores.spoiled]
    scores = scores.without(scores.spoiled)
    if not prepared.samples.evaluation.is_generated:
        return scores, runs
    # Generated inputs say nothing of accuracy, but a form that computes nonsense on them must not be chosen
    # because it is the smallest or fastest.
    most = request.budget.limits.get("drop", math.inf)
    unlike = {
        index: f"{drop.points:.2f} points less {scores.metric.title} on generated inputs"
        for index, drop in enumerate(scores.choosing.drops)
        if index and drop.points > most
    }
    candidate_set.set_apart(unlike)
    return scores.without(unlike), [run for index, run in enumerate(runs) if index not in unlike]


def _score_runs(
    request: Request, prepared: Preparation, runs: Sequence[Runner], progress: Progress, *, alone: bool
) -> Scores:
    source = prepared.source
    names = [spec.name for spec in source.outputs]
    return score_candidates(
        source.model.open(names, threads=request.threads, rewrites=False),
        runs,
        prepared.samples.evaluation,
        request.metric,
        inputs=source.inputs,
        outputs=source.outputs,
        alone=alone,
        progress=lambda done, total: progress("judging on held-out samples", done, total),
    )


def measure_drops(
    request: Request, prepared: Preparation, models: Sequence[Model], progress: Progress
) -> list[float]:
    """Return the drop of each float model in points, on the samples that choose."""
    names = [spec.name for spec in prepared.source.outputs]
    runs = [model.open(names, threads=request.threads) for model in models]
    scores = _score_runs(request, prepared, runs, progress, alone=False)
    return [drop.points for drop in scores.choosing.drops]
