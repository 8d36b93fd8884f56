"""The report document of a run (`report/report.schema.json`)."""

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from edgekit_runtime import __version__
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.measurement.arithmetic import score_label
from edgekit_toolkit.measurement.peak_memory import PeakMemory
from edgekit_toolkit.packaging.recipe import tool_versions
from edgekit_toolkit.pipeline.publish import Published, host_facts, now
from edgekit_toolkit.pipeline.state import Carried, Run, Standing, measures_here
from edgekit_toolkit.report import SCHEMA_ID
from edgekit_toolkit.report.layer_table import describe_layers, stored
from edgekit_toolkit.selection.budget import UNITS
from edgekit_toolkit.selection.confirmation import HeldDrop
from edgekit_toolkit.selection.float_ratio import find_float_ratio


def describe(run: Run, command: str, published: Published | None) -> dict[str, Any]:
    """Return the report document.

    Args:
        run: what was found.
        command: that made it.
        published: files written, or None after a refusal.
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
        "set_aside": list(run.found.set_aside),
        "tournament": [_standing(standing) for standing in run.tournament],
        "variants": [_variant(carried) for carried in run.variants],
        "data": _data(run),
        "steps": [_step(step) for step in run.prepared.steps],
        "sizes": _sizes(run),
        "candidates": [_candidate(run, place) for place in range(len(run.drafts))],
        "budget": _budget(run),
        "accuracy": describe_accuracy(run, _subject(run)),
        "outcome": _outcome(run),
        "layers": describe_layers(run, _subject(run)),
        "package": None if published is None else _package(published),
        "recipe": None if published is None else published.recipe,
        "evidence": None if published is None else published.evidence,
        "provenance": _provenance(run),
    }


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
    }


def _variant(carried: Carried) -> dict[str, Any]:
    return {
        "name": carried.name,
        "backend": carried.run.request.backend,
        "label": carried.run.drafts[carried.place].measured.label,
        "figures": figures(carried.run, carried.place, carried.run.stated_drop(carried.place)),
        "drop": _drop(carried.run.stated_drop(carried.place)),
    }


def _standing(standing: Standing) -> dict[str, Any]:
    held = standing.drop
    return {
        "backend": standing.backend,
        "label": standing.label,
        "size_bytes": standing.size_bytes,
        "drop_points": None if held is None else held.drop.points,
        "drop": _drop(held),
        "latency_ms": standing.latency_ms,
        "reason": standing.reason,
        "kept": standing.kept,
    }


def _drop(held: HeldDrop | None) -> dict[str, Any] | None:
    """Interval of a drop, and the samples that it is from."""
    if held is None:
        return None
    interval = held.interval
    return {
        "interval": [round(interval.low, 4), round(interval.high, 4)],
        "confidence": interval.confidence,
        "samples": held.drop.samples,
        "held_back": held.held_back,
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
    }


def _latency_to_float(run: Run) -> dict[str, Any] | None:
    if run.choice.chosen is None:
        return None
    ratio = find_float_ratio(run.request, run.judged, run.position(run.choice.chosen))
    return {
        "modelled": _figure(ratio.modelled, "modelled", run.request.target.name),
        "uncertainty": ratio.uncertainty,
        "measured": _figure(ratio.here, "measured", "host"),
        "measured_to_source": _figure(ratio.here_to_source, "measured", "host"),
    }


def _package(published: Published) -> dict[str, Any]:
    return {
        "file": published.package,
        "bytes": published.size_bytes,
        "sha256": published.sha256,
        "key_id": published.key_id,
    }


def _provenance(run: Run) -> dict[str, Any]:
    chosen = run.choice.chosen
    return {
        "tools": tool_versions(*(one.request.backend for one in _runs(run))),
        "host": host_facts(),
        "load": asdict(run.judged.load),
        "seconds": {name: round(seconds, 3) for name, seconds in run.seconds.items()},
        "recipe_sha256": None if chosen is None else run.packaged(chosen).recipe.sha256,
    }


def _runs(run: Run) -> list[Run]:
    """The run, and those of other engines that it carries variants of."""
    return [run, *(carried.run for carried in run.variants)]


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
    scores = run.judged.scores
    return {
        "calibration": {
            "kind": calibration.kind,
            "samples": calibration.count,
            "sha256": calibration.sha256,
            "noise_samples": run.found.noise_samples,
        },
        "evaluation": {
            "kind": evaluation.kind,
            "samples": scores.samples,
            "sha256": evaluation.sha256,
            "held_back": 0 if scores.confirmation is None else scores.confirmation.samples,
            "metric": scores.metric.name,
            "title": _metric_title(run),
            "baseline": None if run.held is None else scores.choosing.baseline,
        },
    }


def _metric_title(run: Run) -> str:
    title = run.judged.scores.metric.title
    return f"{title}, on generated inputs" if run.held is None else title


def describe_accuracy(run: Run, place: int) -> dict[str, Any]:
    """Return what the samples show of a candidate's drop: the headline of the report.

    Args:
        run: what was found.
        place: of the candidate.
    """
    scores, held, most = run.judged.scores, run.held, run.request.budget.limits.get("drop")
    told = {"metric": scores.metric.name, "title": _metric_title(run), "limit": most}
    if held is None:
        nothing = dict.fromkeys(("score", "baseline", "drop_points", "drop", "samples_needed"))
        return {"state": "not checked", **told, **nothing}
    one = held[place]
    scored = scores.stated if one.held_back else scores.choosing
    state = "not checked" if most is None else one.state(most)
    return {
        "state": state,
        **told,
        "score": scored.scores[place],
        "baseline": scored.baseline,
        "drop_points": one.drop.points,
        "drop": _drop(one),
        "samples_needed": one.samples_needed(most) if most is not None and state == "not resolved" else None,
    }


def _step(step: Any) -> dict[str, Any]:
    names = (
        "name",
        "applied",
        "reason",
        "max_error",
        "bytes_before",
        "bytes_after",
        "nodes_before",
        "nodes_after",
    )
    return {name: getattr(step, name) for name in names}


def _figure(value: float | None, label: str, on: str) -> dict[str, Any]:
    known = value is not None and math.isfinite(value)
    return {"value": value if known else None, "label": label, "on": on}


def figures(run: Run, place: int, held: HeldDrop | None) -> dict[str, Any]:
    """Figures of one candidate with their labels.

    Args:
        run: that it is of.
        place: of the candidate.
        held: its drop, or None without data.
    """
    target = run.request.target
    here = measures_here(target)
    score = score_label(run.found.candidates[place].model)
    host_ms = run.judged.latencies[place].median_s * 1e3
    costs = run.drafts[place].measured.figures
    return {
        "size": _figure(costs["size"], "measured", "host"),
        "latency": _figure(
            costs["latency"], "measured" if here else "modelled", "host" if here else target.name
        ),
        "host_latency": _figure(host_ms, "measured", "host"),
        "memory": _figure(costs["memory"], *_memory_label(run, place)),
        "energy": _figure(costs["energy"], "modelled", target.name),
        "score": _figure(None if held is None else run.judged.scores.choosing.scores[place], score, "host"),
        "drop": _figure(None if held is None else held.drop.points, score, "host"),
    }


def _memory_label(run: Run, place: int) -> tuple[str, str]:
    if isinstance(run.judged.memory[place], PeakMemory):
        return "measured", "host"
    return "estimated", run.request.target.name


def _candidate(run: Run, place: int) -> dict[str, Any]:
    measured = run.drafts[place].measured
    violations = run.limits.violations(measured.figures)
    held = None if run.held is None else run.held[place]
    return {
        "id": measured.id,
        "label": measured.label,
        "chosen": measured.id == run.choice.chosen,
        "pareto": measured.id in run.front,
        "meets": not violations,
        "figures": figures(run, place, held),
        "drop": _drop(held),
        "violations": list(violations),
        "precision": dict(Counter(layer.precision for layer in stored(run, place).values())),
    }


def _subject(run: Run) -> int:
    """The candidate that the budget lines and layers speak of: the chosen one, or the closest."""
    return run.position(run.choice.chosen or run.choice.closest or run.drafts[0].measured.id)


def _budget(run: Run) -> list[dict[str, Any]]:
    place = _subject(run)
    found = figures(run, place, None if run.held is None else run.held[place])
    costs = (run.whole or run.drafts[place]).measured.figures
    found["size"]["value"] = costs["size"]
    violations = run.limits.violations(costs)
    states = {"drop": describe_accuracy(run, place)["state"]}
    return [
        {
            "limit": name,
            "max": most,
            "unit": UNITS[name][0],
            "value": found[name]["value"],
            "label": found[name]["label"],
            "state": "over" if name in violations else states.get(name, "ok"),
        }
        for name, most in run.request.budget.limits.items()
    ]


def evidence_figures(run: Run, place: int) -> dict[str, Any]:
    """Figures that vary from run to run, for the evidence file."""
    variants = {one.name: _varying(one.run, one.place) for one in run.variants}
    return {
        "target": run.request.target.name,
        "sizes": _sizes(run),
        **_varying(run, place),
        "accuracy": describe_accuracy(run, place),
        "memory_here": None
        if run.peak is None
        else {
            "peak_bytes": run.peak.total_bytes,
            "engine_bytes": run.peak.engine_bytes,
            "label": "measured",
        },
        "memory_in_service": None
        if run.service_bytes is None
        else {"peak_bytes": run.service_bytes, "label": "estimated"},
        "tensorrt_check": None
        if run.tensorrt is None
        else {
            "version": run.tensorrt.version,
            "accepted": run.tensorrt.accepted,
            "built_on": "a machine without a GPU",
        },
        "load": asdict(run.judged.load),
        "seconds": dict(run.seconds),
        **({"variants": variants} if variants else {}),
    }


def _varying(run: Run, place: int) -> dict[str, Any]:
    """What varies of one candidate."""
    low, high = run.judged.latencies[place].quartiles_s
    modelled = run.judged.modelled[place]
    shown = figures(run, place, None if run.held is None else run.held[place])
    return {
        "score": shown["score"],
        "latency_held_against_limits": shown["latency"],
        "latency_here": {
            "median_ms": run.judged.latencies[place].median_s * 1e3,
            "quartiles_ms": [low * 1e3, high * 1e3],
            "ratio_to_source": run.judged.latencies[place].ratio_to(run.judged.source_latency),
            "rounds": len(run.judged.latencies[place].seconds),
            "threads": run.request.threads,
            "label": "measured",
        },
        "latency_on_target_ms": _figure(modelled.latency_ms, "modelled", run.request.target.name),
        "energy_on_target_mj": _figure(modelled.energy_mj, "modelled", run.request.target.name),
        "memory": _figure(run.drafts[place].measured.figures["memory"], *_memory_label(run, place)),
    }
