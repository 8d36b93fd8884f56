"""What each candidate would become: a recipe, a package, and its costs. Nothing is written."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE, RUN_MEMORY_FIGURE
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.evaluation.scoring import Scores
from edgekit_toolkit.measurement.arithmetic import score_label
from edgekit_toolkit.packaging.assemble import GOLDEN_SEED, assemble, package_bytes
from edgekit_toolkit.packaging.recipe import Recipe, tool_versions
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.candidate_set import Candidate, Found
from edgekit_toolkit.pipeline.state import Draft, Judged, Prepared, Request, measures_here
from edgekit_toolkit.selection.choice import Measured
from edgekit_toolkit.selection.float_ratio import ratio_uncertainty


def draft_packages(
    request: Request,
    prepared: Prepared,
    found: Found,
    judged: Judged,
    signer: StatementSigner,
) -> tuple[Draft, ...]:
    """Return one draft a candidate, in order.

    Raises:
        BackendError: a model does not run on the golden inputs.
        DataError: the ranges of the inputs do not suit the model.
    """
    recipes = [
        _recipe(request, prepared, candidate, _figures(candidate, prepared, judged, place))
        for place, candidate in enumerate(found.candidates)
    ]
    uncertainty = 1.0 if measures_here(request.target) else request.target.costs.form_uncertainty
    drafts = []
    for place, (recipe, candidate) in enumerate(zip(recipes, found.candidates, strict=True)):
        package = assemble(recipe, prepared.golden, candidate.model)
        latency = judged.latencies[place]
        measured = Measured(
            f"C{place}",
            candidate.label,
            _costs(request, judged, place, package_bytes(package, signer)),
            latency_uncertainty=uncertainty,
            host_ratio=latency.ratio_to(judged.source_latency),
            host_uncertainty=ratio_uncertainty(latency, judged.source_latency),
        )
        drafts.append(Draft(recipe, package, measured))
    return tuple(drafts)


def _recipe(
    request: Request,
    prepared: Prepared,
    candidate: Candidate,
    figures: Mapping[str, Any],
) -> Recipe:
    return Recipe(
        name=request.name,
        version=request.version,
        target=request.target.name,
        backend=request.backend,
        source_sha256=prepared.source.sha256,
        batch=request.batch,
        dims=prepared.dims,
        steps=tuple((step.name, step.form) for step in prepared.steps if step.applied),
        form=candidate.form,
        model_sha256=hashlib.sha256(candidate.model.content).hexdigest(),
        golden_seed=GOLDEN_SEED,
        golden_ranges=prepared.ranges,
        budget=request.budget.limits,
        figures=figures,
        labels=request.labels,
        preprocessing=request.preprocessing,
        tools=tool_versions(request.backend),
        disabled_optimizers=() if prepared.wrong_rewrites is None else prepared.wrong_rewrites.names,
    )


def _figures(candidate: Candidate, prepared: Prepared, judged: Judged, place: int) -> dict[str, Any]:
    """Figures of the manifest: those that do not vary from run to run."""
    memory = judged.memory[place]
    return {
        "model_bytes": len(candidate.model.content),
        "score": _score(candidate, prepared, judged.scores, place),
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


def _score(candidate: Candidate, prepared: Prepared, scores: Scores, place: int) -> dict[str, Any]:
    """The score on samples that chose nothing, where there are any, and without data no drop."""
    evaluation, stated = prepared.samples.evaluation, scores.stated
    interval = stated.drops[place].interval()
    drop = {
        "drop_points": stated.drops[place].points,
        "drop_interval_points": [round(interval.low, 4), round(interval.high, 4)],
        "confidence": interval.confidence,
        "held_back": scores.confirmation is not None,
    }
    return {
        "metric": scores.metric.name,
        "value": round(stated.scores[place], 6),
        "source_value": round(stated.baseline, 6),
        "samples": stated.samples,
        "samples_kind": evaluation.kind,
        "samples_sha256": evaluation.sha256,
        "label": score_label(candidate.model),
        "on": "host",
        "engine": {"ort": "onnxruntime", "litert": "LiteRT"}[candidate.model.engine],
        **({} if evaluation.is_generated else drop),
    }


def _costs(request: Request, judged: Judged, place: int, size_bytes: int) -> dict[str, float]:
    """Costs in the units of the budget; one that is not known is infinite, so that no limit on it is kept."""
    modelled, memory = judged.modelled[place], judged.memory[place]
    here = measures_here(request.target)
    latency_ms = judged.latencies[place].median_s * 1e3 if here else modelled.latency_ms
    return {
        "size": float(size_bytes),
        "latency": math.inf if latency_ms is None else latency_ms,
        "memory": math.inf if memory is None else float(memory.total_bytes),
        "energy": math.inf if modelled.energy_mj is None else modelled.energy_mj,
        "drop": judged.scores.choosing.drops[place].points,
    }
