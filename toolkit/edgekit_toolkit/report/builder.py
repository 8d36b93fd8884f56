"""Builds the report document of a run (`report/report.schema.json`)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from edgekit_runtime import __version__
from edgekit_runtime.sessions.latency import Latency
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.measurement.arithmetic import measures_here, score_label
from edgekit_toolkit.measurement.peak_memory import PeakMemory
from edgekit_toolkit.openings.emulated_processor import PROCESSOR
from edgekit_toolkit.packaging.recipe import tool_versions
from edgekit_toolkit.pipeline.publish import PublishedFiles, host_facts, now
from edgekit_toolkit.pipeline.run import EngineResult, FurtherVariant, JudgedCandidate, Run
from edgekit_toolkit.pipeline.sample_answers import SampleAnswers
from edgekit_toolkit.report.compression_steps import describe_compression
from edgekit_toolkit.report.document import SCHEMA_ID
from edgekit_toolkit.report.layer_table import describe_layers, stored
from edgekit_toolkit.selection.budget import UNITS
from edgekit_toolkit.selection.confirmation import HeldDrop
from edgekit_toolkit.tasks.proposal import TaskDecision


def describe(
    run: Run, command: str, published: PublishedFiles | None, samples: Sequence[SampleAnswers] = ()
) -> dict[str, Any]:
    """Return the report document of a run, see `report.schema.json`.

    `published` is None if no candidate was chosen. `samples` is empty without a task.
    """
    return {
        "schema": SCHEMA_ID,
        "edgekit": __version__,
        "created": now(),
        "command": command,
        "name": run.request.name,
        "version": run.request.version,
        "target": _target(run),
        "source": _source(run),
        "warnings": list(run.warnings),
        "set_aside": list(run.candidate_set.set_aside),
        "tournament": [_engine_result(result, _drop_limit(run)) for result in run.tournament],
        "variants": [_variant(carried) for carried in run.variants],
        "data": _data(run),
        "steps": [
            {name: value for name, value in asdict(step).items() if name != "form"}
            for step in run.prepared.steps
        ],
        "sizes": _sizes(run),
        "candidates": [_candidate(run, candidate) for candidate in run.candidates],
        "budget": _budget(run),
        "accuracy": describe_accuracy(run, run.subject),
        "outcome": _outcome(run),
        "proof": _proof(run),
        "task": _task(run.prepared.task),
        "samples": [_sample(sample) for sample in samples],
        "compression": describe_compression(run, run.subject),
        "layers": describe_layers(run, run.subject),
        "package": None if published is None else _package(published),
        "recipe": None if published is None else published.recipe,
        "evidence": None if published is None else published.evidence,
        "provenance": _provenance(run),
    }


def _task(task: TaskDecision) -> dict[str, Any]:
    name, options = (None, {}) if task.choice is None else (task.choice.name, dict(task.choice.options))
    return {"name": name, "options": options, "text": task.describe()}


def _sample(sample: SampleAnswers) -> dict[str, Any]:
    width, height = sample.size or (None, None)
    return {
        "name": sample.name,
        "width": width,
        "height": height,
        "float": sample.floats,
        "package": sample.package,
    }


def _proof(run: Run) -> dict[str, str] | None:
    """Return which release of the engine opened and self-tested the package; None if there is no package."""
    proof = None if run.acceptance is None else run.acceptance.proof
    if proof is None:
        return None
    return {name: getattr(proof, name) for name in ("engine", "device_engine", "note")}


def _sizes(run: Run) -> list[dict[str, Any]]:
    """Sizes of the free dimensions for which latency, memory and energy hold."""
    return [
        {"name": name, "size": size.value, "from": size.origin} for name, size in run.prepared.sizes.items()
    ]


def _target(run: Run) -> dict[str, Any]:
    target = run.request.target
    return {
        "name": target.name,
        "title": target.title,
        "backend": run.request.backend,
        "form": target.quantization.form,
        "power_mode": None if len(target.power.modes) == 1 else target.power.default_mode,
        "cost_source": run.subject.modelled.source,
    }


def _variant(carried: FurtherVariant) -> dict[str, Any]:
    return {
        "name": carried.name,
        "backend": carried.run.request.backend,
        "label": carried.candidate.label,
        "figures": _figures(carried.run, carried.candidate, carried.candidate.stated_drop),
        "drop": _drop(carried.candidate.stated_drop, _drop_limit(carried.run)),
    }


def _engine_result(result: EngineResult, limit: float | None) -> dict[str, Any]:
    candidate = result.candidate
    stated_drop = None if candidate is None else candidate.stated_drop
    return {
        "backend": result.backend,
        "label": None if candidate is None else candidate.label,
        "size_bytes": None if candidate is None else candidate.measured.figures["size"],
        "drop_points": None if stated_drop is None else stated_drop.drop.points,
        "drop": _drop(stated_drop, limit),
        "latency_ms": result.latency_ms,
        "threads": result.threads,
        "reason": result.reason,
        "kept": result.is_packaged,
    }


def _drop_limit(run: Run) -> float | None:
    return run.request.budget.limits.get("drop")


def _drop(stated_drop: HeldDrop | None, limit: float | None) -> dict[str, Any] | None:
    """Return the interval of a drop, the samples behind it, and whether it settles the limit."""
    if stated_drop is None:
        return None
    interval = stated_drop.interval
    return {
        "interval": [round(interval.low, 4), round(interval.high, 4)],
        "confidence": interval.confidence,
        "samples": stated_drop.drop.samples,
        "held_back": stated_drop.held_back,
        "resolved": limit is None or interval.high <= limit or stated_drop.state(limit) == "over",
    }


def _outcome(run: Run) -> dict[str, Any]:
    return {
        "kind": "refused" if run.choice.chosen is None else "packaged",
        "chosen": run.choice.chosen,
        "reason": run.choice.reason,
        "binding": list(run.choice.binding),
        "closest": run.choice.closest,
        "needed": run.choice.needed,
        "latency_to_float": _latency_to_float(run),
        "slower_than": run.slower_than,
    }


def _latency_to_float(run: Run) -> dict[str, Any] | None:
    if run.chosen is None:
        return None
    ratio = run.float_ratio(run.chosen)
    return {
        "modelled": _figure(ratio.modelled, run.chosen.modelled.latency_label, run.request.target.name),
        "uncertainty": ratio.uncertainty,
        "measured": _figure(ratio.here, "measured", "host"),
        "measured_to_source": _figure(ratio.here_to_source, "measured", "host"),
    }


def _package(published: PublishedFiles) -> dict[str, Any]:
    return {
        "file": published.package,
        "bytes": published.size_bytes,
        "sha256": published.sha256,
        "key_id": published.key_id,
    }


def _provenance(run: Run) -> dict[str, Any]:
    return {
        "tools": tool_versions(
            *(standing.request.backend for standing in (run, *(variant.run for variant in run.variants)))
        ),
        "host": host_facts(),
        "load": asdict(run.load),
        "seconds": {name: round(seconds, 3) for name, seconds in run.seconds.items()},
        "recipe_sha256": None if run.packaged is None else run.packaged.recipe.sha256,
    }


def _source(run: Run) -> dict[str, Any]:
    source = run.prepared.source
    return {
        "file": source.path.name,
        "sha256": source.sha256,
        "bytes": source.size_bytes,
        **source.model.size._asdict(),
        "inputs": [_tensor(spec) for spec in source.inputs],
        "outputs": [_tensor(spec) for spec in source.outputs],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _data(run: Run) -> dict[str, Any]:
    calibration, evaluation = run.prepared.samples.calibration, run.prepared.samples.evaluation
    scores = run.scores
    return {
        "calibration": {
            "kind": calibration.kind,
            "samples": calibration.count,
            "sha256": calibration.sha256,
            "noise_samples": run.candidate_set.noise_samples,
        },
        "evaluation": {
            "kind": evaluation.kind,
            "samples": scores.samples,
            "sha256": evaluation.sha256,
            "held_back": 0 if scores.confirmation is None else scores.confirmation.samples,
            "metric": scores.metric.name,
            "title": _metric_title(run),
            "baseline": scores.choosing.baseline if run.prepared.has_data else None,
            "field_samples": evaluation.field_count,
        },
    }


def _metric_title(run: Run) -> str:
    title = run.scores.metric.title
    return title if run.prepared.has_data else f"{title}, on generated inputs"


def describe_accuracy(run: Run, candidate: JudgedCandidate) -> dict[str, Any]:
    """Return the `accuracy` of the report, with the score, the drop and the limit.

    Without samples, `state` is `not checked` and the figures are None.
    """
    stated_drop, most = candidate.held, _drop_limit(run)
    common = {"metric": run.scores.metric.name, "title": _metric_title(run), "limit": most}
    if stated_drop is None:
        nothing = dict.fromkeys(("score", "baseline", "drop_points", "drop", "samples_needed"))
        return {"state": "not checked", **common, **nothing}
    score = (candidate.confirmation if stated_drop.held_back else None) or candidate.score
    state = "not checked" if most is None else stated_drop.state(most)
    return {
        "state": state,
        **common,
        "score": score.value,
        "baseline": score.baseline,
        "drop_points": stated_drop.drop.points,
        "drop": _drop(stated_drop, most),
        "samples_needed": stated_drop.samples_needed(most)
        if most is not None and state == "not resolved"
        else None,
    }


def _figure(value: float | None, label: str, on: str) -> dict[str, Any]:
    is_known = value is not None and math.isfinite(value)
    return {"value": value if is_known else None, "label": label, "on": on}


def _figures(run: Run, candidate: JudgedCandidate, stated_drop: HeldDrop | None) -> dict[str, Any]:
    """Figures of one candidate with their labels; without data it has no drop."""
    target = run.request.target
    here = measures_here(target)
    label, latency = score_label(candidate.model), candidate.latency
    measured = "not measured" if latency is None else "measured"
    scored_on = PROCESSOR if candidate.model.needs_feature else "host"
    costs = candidate.measured.figures
    return {
        "size": _figure(costs["size"], "measured", "host"),
        **({"transport": _figure(costs["transport"], "measured", "host")} if "transport" in costs else {}),
        "latency": _figure(
            costs["latency"],
            measured if here or latency is None else candidate.modelled.latency_label,
            "host" if here else target.name,
        ),
        "host_latency": _figure(None if latency is None else latency.median_s * 1e3, measured, "host"),
        "memory": _memory(run, candidate),
        "energy": _figure(
            costs["energy"], measured if latency is None else candidate.modelled.energy_label, target.name
        ),
        "score": _figure(None if stated_drop is None else candidate.score.value, label, scored_on),
        "drop": _figure(None if stated_drop is None else stated_drop.drop.points, label, scored_on),
    }


def _memory(run: Run, candidate: JudgedCandidate) -> dict[str, Any]:
    value = candidate.measured.figures["memory"]
    if isinstance(candidate.memory, PeakMemory):
        return _figure(value, "measured", "host")
    return _figure(value, "estimated", run.request.target.name)


def _candidate(run: Run, candidate: JudgedCandidate) -> dict[str, Any]:
    violations = run.limits.violations(candidate.measured.figures)
    return {
        "id": candidate.id,
        "label": candidate.label,
        "chosen": candidate.id == run.choice.chosen,
        "pareto": candidate.id in run.front,
        "meets": not violations,
        "figures": _figures(run, candidate, candidate.held),
        "drop": _drop(candidate.held, _drop_limit(run)),
        "violations": list(violations),
        "precision": dict(Counter(layer.precision for layer in stored(run, candidate).values())),
    }


def _budget(run: Run) -> list[dict[str, Any]]:
    subject = run.subject
    figures = _figures(run, subject, subject.held)
    costs = (run.whole or subject).measured.figures
    for name in {"size", "transport"} & costs.keys():
        figures[name]["value"] = costs[name]
    violations = run.limits.violations(costs)
    states = {"drop": describe_accuracy(run, subject)["state"]}
    high = {} if subject.held is None else {"drop": round(subject.held.interval.high, 4)}
    return [
        {
            "limit": name,
            "max": most,
            "unit": UNITS[name][0],
            "value": figures[name]["value"],
            "high": high.get(name),
            "label": figures[name]["label"],
            "state": "over" if name in violations else states.get(name, "ok"),
        }
        for name, most in run.request.budget.limits.items()
    ]


def evidence_figures(run: Run, chosen: JudgedCandidate) -> dict[str, Any]:
    """Return the figures for the evidence file, which vary from run to run."""
    variants = {variant.name: _varying(variant.run, variant.candidate) for variant in run.variants}
    here = run.memory_here
    tensorrt = None if run.acceptance is None else run.acceptance.tensorrt
    return {
        "target": run.request.target.name,
        "sizes": _sizes(run),
        **_varying(run, chosen),
        "accuracy": describe_accuracy(run, chosen),
        "memory_here": None
        if here is None or here.peak is None
        else {
            "peak_bytes": here.peak.total_bytes,
            "engine_bytes": here.peak.engine_bytes,
            "label": "measured",
        },
        "memory_in_service": None
        if here is None or here.service_bytes is None
        else {"peak_bytes": here.service_bytes, "label": "estimated"},
        "tensorrt_check": None
        if tensorrt is None
        else {
            "version": tensorrt.version,
            "accepted": tensorrt.accepted,
            "built_on": "a machine without a GPU",
        },
        "load": asdict(run.load),
        "seconds": dict(run.seconds),
        **({"variants": variants} if variants else {}),
    }


def _latency_here(run: Run, latency: Latency) -> dict[str, Any]:
    low, high = latency.quartiles_s
    return {
        "median_ms": latency.median_s * 1e3,
        "quartiles_ms": [low * 1e3, high * 1e3],
        "ratio_to_source": latency.ratio_to(run.source_latency),
        "rounds": len(latency.seconds),
        "threads": run.request.threads,
        "label": "measured",
    }


def _varying(run: Run, candidate: JudgedCandidate) -> dict[str, Any]:
    """Return the figures of one candidate that vary from run to run."""
    latency, modelled = candidate.latency, candidate.modelled
    figures = _figures(run, candidate, candidate.held)
    here = None if latency is None else _latency_here(run, latency)
    return {
        "score": figures["score"],
        "latency_held_against_limits": figures["latency"],
        "latency_here": here or {"label": "not measured"},
        "latency_on_target_ms": _figure(modelled.latency_ms, modelled.latency_label, run.request.target.name),
        "energy_on_target_mj": _figure(modelled.energy_mj, modelled.energy_label, run.request.target.name),
        "cost_source": modelled.source,
        "memory": figures["memory"],
    }
