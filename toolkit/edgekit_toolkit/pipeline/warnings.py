"""Warnings about a run of `edgekit package`."""

import platform
from collections.abc import Iterator

from edgekit_runtime.offload.measurement.machine_facts import describe_engine
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_runtime.system.engines import find_engine, parse_engine
from edgekit_runtime.system.install_hint import install_command
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.evaluation.field_notes import describe_field
from edgekit_toolkit.evaluation.metrics import Metric
from edgekit_toolkit.importers.onnx import older_set_notes
from edgekit_toolkit.importers.sizes import list_sizes
from edgekit_toolkit.measurement.arithmetic import instruction_set, measures_here
from edgekit_toolkit.measurement.device_profile import is_current
from edgekit_toolkit.measurement.peak_memory import PeakMemory
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.traversal import time_major_nodes
from edgekit_toolkit.packaging.golden_branches import find_untested
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.run import Run
from edgekit_toolkit.samples.media.classes import numbering_note
from edgekit_toolkit.samples.range_trap import find_codes_trap, find_range_trap
from edgekit_toolkit.samples.split import feeds_only
from edgekit_toolkit.tasks.labels import find_label_problems


def find_warnings(run: Run) -> list[str]:
    """Return the warnings as sentences. Warnings about samples come first, and about figures last."""
    request, prepared = run.request, run.prepared
    samples = prepared.samples
    notes = list(samples.warnings)
    notes.extend(describe_field(samples.evaluation, run.scores))
    notes.extend(find_range_trap(feeds_only(samples.calibration), feeds_only(samples.evaluation)))
    if samples.evaluation.sha256 is not None:  # generated samples take the range of the codes
        codes = prepared.source.model.input_code_ranges()
        notes.extend(find_codes_trap(codes, feeds_only(samples.evaluation)))
    if request.labels_from_folders:
        notes.append(numbering_note(request.class_names))
    notes.extend(find_label_problems(request.class_names, prepared.task, prepared.source.outputs))
    if isinstance(run.scores.metric, Metric) and run.scores.metric.note is not None:
        notes.append(run.scores.metric.note)
    if run.scores.unjudged:
        notes.append(
            f"{run.scores.unjudged} evaluation samples are not judged, since nothing is detected in them"
        )
    if not samples.evaluation.is_generated and not samples.evaluation.in_front:
        notes.extend(_find_single_steps(prepared.source.model))
    notes.extend(older_set_notes(prepared.source))
    if prepared.written_out:
        notes.append(
            f"onnxruntime fails on operator {', '.join(prepared.written_out)} in this model; it is written"
            " out in simpler ones, which compute the same as ONNX's reference on the samples"
        )
    if prepared.wrong_rewrites is not None:
        notes.append(str(prepared.wrong_rewrites))
    notes.extend(run.candidate_set.wrong_rewrites)
    notes.extend(f"left out: {text}" for text in _list_left_out(run))
    notes.extend(_find_other_engine(request))
    notes.extend(_find_untested(run))
    notes.extend(find_support(request.backend).notes)
    if (profile_problem := _find_profile_problem(request)) is not None:
        notes.append(profile_problem)
    if run.load.is_heavy:
        notes.append(
            f"latency on this machine is in doubt: while it was measured, {run.load}; repeat on a quiet"
            " machine before you rely on figures measured here"
        )
    if other := prepared.other_sizes(prepared.feeds[:1]):
        stated_sizes = list_sizes({name: prepared.dims[name] for name in other})
        notes.append(
            f"what is modelled or estimated is for {stated_sizes}; latency and memory measured on this"
            f" machine are those of the first sample, which has {list_sizes(other)}"
        )
    problems = dict.fromkeys(
        candidate.memory for candidate in run.candidates if isinstance(candidate.memory, str)
    )
    return [*notes, *_arithmetic_warnings(run), *_memory_warnings(run), *problems]


def _find_other_engine(request: Request) -> Iterator[str]:
    """Yield a warning if the package is for another engine than the one that the target prefers."""
    preferred = request.target.backend.default
    extra = find_engine(preferred).installation.host_extra
    if extra and request.backend == request.target.backend.fallback:
        title, packaged = find_engine(preferred).title, find_engine(request.backend).title
        yield (
            f"{request.target.name} prefers {title}; this package is for {packaged},"
            f" its fallback. A package for {title} needs it here as well: {install_command(extra)}"
        )
    elif preferred != request.backend:
        yield (
            f"figures modelled for {request.target.name} are those of {preferred}, the engine that it"
            f" prefers; {request.backend} may be faster or slower"
        )


def _list_left_out(run: Run) -> list[str]:
    """Return the forms that are no candidates, and why."""
    stops = dict.fromkeys(stop.subject for stop in run.candidate_set.stops)
    option = run.request.option_for(run.candidate_set.needed_s)
    return [
        *run.candidate_set.dropped,
        *(f"{subject}: limit of the search; try {option}" for subject in stops),
    ]


def _find_single_steps(model: Model) -> Iterator[str]:
    """Yield a warning for each recurrence over the axis that counts the samples."""
    names = {spec.name: spec for spec in model.specs()[0] if spec.shape and isinstance(spec.shape[0], str)}
    for node in time_major_nodes(model.proto) if isinstance(model, OnnxModel) else ():
        if node.input[0] in names:
            name, shape = node.input[0], ", ".join(map(str, names[node.input[0]].shape))
            yield (
                f"the first axis of '{name}' [{shape}] is time for {node.op_type}, and each sample is"
                f" a single step of it: give sequences as [N, {shape}], with an axis for N samples in front"
            )


def _find_untested(run: Run) -> list[str]:
    """Return warnings about branches of `If` that no golden row of the package takes."""
    first, candidate = run.prepared.golden.feeds, run.chosen or run.candidates[0]
    rows = candidate.package.manifest.golden.rows
    seeds = () if rows is None else rows.seeds
    return find_untested(run.prepared.floats, first, seeds)


def _find_profile_problem(request: Request) -> str | None:
    """Return why a profile is not used or may not hold, or None."""
    if (times := request.target.device_times) is None:
        return None
    name, engine = request.target.name, parse_engine(times.engine).name
    if engine != request.backend:
        return (
            f"the profile of {name} is of {times.engine}; the latency of this package, for"
            f" {request.backend}, is modelled from coefficients and does not compare with it"
        )
    if not is_current(times):
        return (
            f"the profile of {name} is of other networks than those of this release, so latency is modelled"
            " from its coefficients; measure it again: edgekit profile --on"
        )
    if times.engine != (here := describe_engine(engine)):
        return (
            f"latency is predicted from times of {times.engine} on the device, and this machine has {here},"
            " whose kernels may differ"
        )
    return None


def _arithmetic_warnings(run: Run) -> list[str]:
    """Return warnings about int8 figures from a machine whose 8-bit products differ from the target's."""
    notes, target = [], run.request.target.name
    names = dict.fromkeys(name for candidate in run.candidates for name in candidate.model.saturating_nodes())
    if names:
        notes.append(
            f"scores are estimated, not measured: the 8-bit products of {', '.join([*names][:3])} saturate on"
            f" this machine ({instruction_set()}) and not on {target}; package on a machine with"
            " VNNI, or give the float model"
        )
    in_codes = any(candidate.model.computes_in_codes() for candidate in run.candidates)
    if in_codes and find_support(run.request.backend).slows_exact_products and saturates():
        notes.append(
            f"int8 times of this machine ({instruction_set()}, no VNNI) are those of slower, exact kernels;"
            f" where the model of {target} cannot tell forms apart, they count against int8 (see"
            " the reason of the choice): measure there, or package on a machine with VNNI"
        )
    if in_codes and run.request.target.quantization.reduce_range and not saturates():
        notes.append(
            f"int8 times of this machine ({instruction_set()}) are shorter than those of {target}, which has"
            " no VNNI: tune or hold a tournament there"
        )
    return notes


def _memory_warnings(run: Run) -> list[str]:
    """Return warnings about a memory limit that was compared with another machine's memory."""
    here = any(isinstance(candidate.memory, PeakMemory) for candidate in run.candidates)
    if "memory" not in run.request.budget.limits or not here or measures_here(run.request.target):
        return []
    note = (
        f"the memory limit is held against this machine ({platform.machine()}): measured here, not"
        f" on {run.request.target.name}; measure there before you rely on it"
    )
    return [note]
