"""Makes drafts. A draft is a candidate with a recipe, a package and costs, but without a latency.

No files are written.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from edgekit_host.transport.package_encoder import coded_size
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE, RUN_MEMORY_FIGURE
from edgekit_runtime.system.engines import find_engine
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.evaluation.judge import NOT_MODELLED, find_memory
from edgekit_toolkit.evaluation.scoring import Scores
from edgekit_toolkit.measurement.arithmetic import score_label
from edgekit_toolkit.measurement.peak_memory import PeakMemory
from edgekit_toolkit.openings.emulated_processor import PROCESSOR
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
) -> list[JudgedCandidate]:
    """Assemble a recipe and a package for each candidate. Ids, latencies and energies are set later.

    The budget of the request must contain the limits from `limits_in_force`.

    Raises:
        BackendError: A model does not run on the golden inputs.
        DataError: The ranges of the inputs do not suit the model.
    """
    drafts = []
    for index, candidate in enumerate(candidates):
        score = scores.choosing.of(index)
        memory = find_memory(candidate.model, request.target, prepared.dims, prepared.feeds[0])
        figures = {
            **_figures(candidate, prepared, memory),
            "score": _score(candidate, prepared, scores, index),
        }
        recipe = _recipe(request, prepared, candidate, figures)
        package = assemble(recipe, prepared.golden, candidate.model)
        costs = {
            **size_figures(package_file(package, signer), request.budget),
            "latency": math.inf,
            "memory": math.inf if isinstance(memory, str) else float(memory.total_bytes),
            "energy": math.inf,
            "drop": score.drop.points,
        }
        drafts.append(
            JudgedCandidate(
                candidate.label,
                candidate.form,
                candidate.model,
                candidate.snr_db,
                score=score,
                confirmation=None if scores.confirmation is None else scores.confirmation.of(index),
                latency=None,
                modelled=NOT_MODELLED,
                memory=memory,
                recipe=recipe,
                package=package,
                measured=CandidateFigures("", candidate.label, costs),
            )
        )
    return drafts


def size_figures(package: bytes, limits: Budget) -> dict[str, float]:
    """Return the `size` of a package in bytes, and the `transport` size if it is limited in `limits`."""
    figures = {"size": float(len(package))}
    return {**figures, "transport": float(coded_size(package))} if "transport" in limits.limits else figures


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
        states=request.states,
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
        task=None if prepared.task.choice is None else prepared.task.choice.to_json(),
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
        **({"needs_feature": need} if (need := candidate.model.needs_feature) else {}),
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
        "on": PROCESSOR if candidate.model.needs_feature else "host",
        "engine": find_engine(candidate.model.engine).title,
        **({} if evaluation.is_generated else drop),
    }
