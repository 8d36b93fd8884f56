"""Drafts of the candidates: recipe, package and costs of each. Nothing is written."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from edgekit_host.transport.package_encoder import coded_size
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE, RUN_MEMORY_FIGURE
from edgekit_runtime.sessions.latency import Latency
from edgekit_runtime.system.engines import find_engine
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.evaluation.judge import find_memory, model_on_target
from edgekit_toolkit.evaluation.scoring import Scores
from edgekit_toolkit.measurement.arithmetic import measures_here, score_label
from edgekit_toolkit.measurement.peak_memory import PeakMemory
from edgekit_toolkit.packaging.assemble import GOLDEN_SEED, assemble, package_file
from edgekit_toolkit.packaging.recipe import Recipe, tool_versions
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.candidates import Candidate
from edgekit_toolkit.pipeline.prepare import Preparation
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.run import JudgedCandidate
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import CandidateFigures


def draft_packages(
    request: Request,
    prepared: Preparation,
    candidates: Sequence[Candidate],
    scores: Scores,
    signer: StatementSigner,
    *,
    latencies: Sequence[Latency],
    processor_ratios: Sequence[float],
) -> list[JudgedCandidate]:
    """Return the candidates with their costs, recipes and packages, in order.

    Args:
        request: limits in its budget are those in force.
        prepared: model and samples behind the candidates.
        candidates: the float model first.
        scores: scores of the candidates, in order.
        signer: signs packages, whose size counts.
        latencies: latencies of the candidates here, in order.
        processor_ratios: processor time of each here, over that of the source model.

    Raises:
        BackendError: a model does not run on the golden inputs.
        DataError: the ranges of the inputs do not suit the model.
    """
    target, dims = request.target, prepared.dims
    here = measures_here(target)
    on_target = model_on_target(
        [candidate.model for candidate in candidates], target, dims, prepared.feeds[0]
    )
    drafted = []
    rows = zip(candidates, latencies, processor_ratios, on_target, strict=True)
    for index, (candidate, latency, ratio, modelled) in enumerate(rows):
        score = scores.choosing.of(index)
        confirmation = None if scores.confirmation is None else scores.confirmation.of(index)
        memory = find_memory(candidate.model, target, dims, prepared.feeds[0])
        figures = {
            **_figures(candidate, prepared, memory),
            "score": _score(candidate, prepared, scores, index),
        }
        recipe = _recipe(request, prepared, candidate, figures)
        package = assemble(recipe, prepared.golden, candidate.model)
        costs = {
            **size_figures(package_file(package, signer), request.budget),
            "latency": _known(latency.median_s * 1e3 if here else modelled.latency_ms),
            "memory": math.inf if isinstance(memory, str) else float(memory.total_bytes),
            "energy": _known(modelled.energy_mj),
            "drop": score.drop.points,
        }
        measured = CandidateFigures(
            f"C{index}",
            candidate.label,
            costs,
            latency_uncertainty=1.0 if here else modelled.uncertainty,
            host_ratio=ratio,
        )
        drafted.append(
            JudgedCandidate(
                candidate.label,
                candidate.form,
                candidate.model,
                candidate.snr_db,
                score=score,
                confirmation=confirmation,
                latency=latency,
                modelled=modelled,
                memory=memory,
                recipe=recipe,
                package=package,
                measured=measured,
            )
        )
    return drafted


def size_figures(package: bytes, limits: Budget) -> dict[str, float]:
    """Return the size of a package file and, where that is limited, the bytes that travel to a device."""
    figures = {"size": float(len(package))}
    return {**figures, "transport": float(coded_size(package))} if "transport" in limits.limits else figures


def _known(cost: float | None) -> float:
    """Return a cost; an unknown one is infinite, so that no limit on it is kept."""
    return math.inf if cost is None else cost


def _recipe(request: Request, prepared: Preparation, candidate: Candidate, figures: dict[str, Any]) -> Recipe:
    return Recipe(
        name=request.name,
        version=request.version,
        target=request.target.name,
        backend=request.backend,
        source_sha256=prepared.source.sha256,
        batch=request.batch,
        dims=prepared.dims,
        fixed=request.fixed,
        written_out=prepared.written_out,
        steps=tuple((step.name, step.form) for step in prepared.steps if step.applied),
        form=candidate.form,
        model_sha256=hashlib.sha256(candidate.model.content).hexdigest(),
        golden_seed=GOLDEN_SEED,
        golden_ranges=prepared.ranges,
        golden_rows=tuple(prepared.golden.rows),
        budget=request.budget.limits,
        figures=figures,
        labels=request.labels,
        preprocessing=request.preprocessing,
        tools=tool_versions(request.backend),
        disabled_optimizers=() if prepared.wrong_rewrites is None else prepared.wrong_rewrites.names,
    )


def _figures(
    candidate: Candidate, prepared: Preparation, memory: MemoryEstimate | PeakMemory | str
) -> dict[str, Any]:
    """Return the manifest's figures beside the score: those that do not vary from run to run."""
    return {
        "model_bytes": len(candidate.model.content),
        # Without the engine's part: that is measured on the host and varies from run to run.
        "memory_estimate": None
        if not isinstance(memory, MemoryEstimate)
        else {
            "bytes_above_engine": memory.model_bytes,
            RUN_MEMORY_FIGURE: round(memory.run_bytes_per_input_byte, 3),
            "label": "estimated",
        },
        INTEGER_DIVISION_FIGURE: candidate.model.divides_by_inputs(),
        **({} if prepared.reference is None else {"reference": prepared.reference}),
        **({} if prepared.class_output is None else {"class_output": prepared.class_output}),
    }


def _score(candidate: Candidate, prepared: Preparation, scores: Scores, index: int) -> dict[str, Any]:
    """Return the score on the held-back samples, if there are any; without data it has no drop."""
    evaluation, stated = prepared.samples.evaluation, scores.stated.of(index)
    interval = stated.drop.interval()
    drop = {
        "drop_points": stated.drop.points,
        "drop_interval_points": [round(interval.low, 4), round(interval.high, 4)],
        "confidence": interval.confidence,
        "held_back": scores.confirmation is not None,
    }
    return {
        "metric": scores.metric.name,
        "value": round(stated.value, 6),
        "source_value": round(stated.baseline, 6),
        "samples": stated.drop.samples,
        "samples_kind": evaluation.kind,
        "samples_sha256": evaluation.sha256,
        "label": score_label(candidate.model),
        "on": "host",
        "engine": find_engine(candidate.model.engine).title,
        **({} if evaluation.is_generated else drop),
    }
