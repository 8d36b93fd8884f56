"""Chooses the samples and the task of a request, and prepares sequences for models with states."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgekit_runtime.errors import ModelError
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_toolkit.evaluation.scoring import spread_feeds, take_probes
from edgekit_toolkit.importers.model_file import SourceModel
from edgekit_toolkit.importers.sizes import with_batch
from edgekit_toolkit.importers.states import propose_states
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.request import Progress, Request
from edgekit_toolkit.samples import split
from edgekit_toolkit.samples.media.classes import check_class_count
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.sequences import SequenceSamples
from edgekit_toolkit.samples.split import Ranges, Samples
from edgekit_toolkit.tasks.proposal import TaskDecision, decide_task
from edgekit_toolkit.tasks.proposers import Evidence


@dataclass(frozen=True, slots=True)
class SampleChoice:
    """The samples for calibration and evaluation.

    Attributes:
        samples: The samples. If the model has states, calibration samples are steps and evaluation samples
            are sequences.
        ranges: A dict from inputs and states to the smallest and largest values to generate.
        sequences: Runs a model with states over samples. None for a model without states.
    """

    samples: Samples
    ranges: Ranges
    sequences: SequenceSamples | None = None


def choose_samples(
    request: Request,
    source: SourceModel[Model],
    dims: Mapping[str, int],
    ranges: Ranges,
    decoding: Decoding,
) -> SampleChoice:
    """Return the samples of a request. A model with states is run to find the ranges of the states.

    Raises:
        DataError: The samples do not fit the model, or there are too few.
        ModelError: The model has states, and the request fixes the batch size.
    """
    sequences, specs = None, with_batch(source.inputs, request.batch)
    if source.states:
        sequences = SequenceSamples(source.states, source.inputs, source.outputs, dims)
        specs, dims = sequences.specs, {**dims, **sequences.dims}
    files = (request.calibration, request.evaluation)
    samples = split.choose_samples(specs, *files, dims, ranges, decoding=decoding)
    notes = [
        f"output '{state.output}' has name and shape of input '{state.input}': if it is the value for the"
        f" next run, --state {state.output}={state.input} lets the service keep it between requests"
        for state in propose_states(source.inputs, source.outputs, source.states)
    ]
    if sequences is None:
        return SampleChoice(replace(samples, warnings=(*samples.warnings, *notes)), ranges)
    if request.batch not in (None, 1):
        raise ModelError(
            f"{source.path}: --batch {request.batch} and --state exclude each other: samples of a model with"
            " states run step by step; the service makes batches of several sequences"
        )
    run = source.model.open([spec.name for spec in source.outputs], threads=request.threads, rewrites=False)
    calibration, state_ranges = sequences.with_states(samples.calibration, run)
    notes.append(
        f"each sample is a sequence of its own; {calibration.count} steps of {samples.calibration.count}"
        " sequences calibrate"
    )
    if not any(ends != (0.0, 0.0) for ends in state_ranges.values()):
        notes.append(
            "the states are zeros in every step that calibrates, so their ranges say nothing: give sequences"
            " of several steps, [N, steps, ...]"
        )
    evaluation = replace(samples.evaluation, in_front=True, group=1)
    chosen = Samples(calibration, evaluation, (*samples.warnings, *notes))
    return SampleChoice(chosen, {**ranges, **state_ranges}, sequences)


def choose_decoding(request: Request, source: SourceModel[Model], progress: Progress) -> Decoding:
    """Return how images or recordings are decoded to samples.

    Raises:
        DataError: The class names come from folders, and the model has a different number of classes or no
            class scores.
    """
    classes = request.class_names
    if request.labels_from_folders:
        check_class_count(classes, source.outputs)
    return Decoding(
        request.preprocessing,
        classes,
        in_steps=bool(source.states) and (request.preprocessing or {}).get("type") == "audio",
        progress=lambda done, total: progress("reading files", done, total),
    )


def find_task(
    request: Request, source: SourceModel[Model], samples: Samples, sequences: SequenceSamples | None
) -> TaskDecision:
    """Return the task of the request, or determine it from the outputs of the source model on samples.

    Raises:
        DataError: The requested task cannot decode the outputs.
    """
    part, outputs = samples.evaluation, source.outputs
    feeds = spread_feeds(part)
    run = source.model.open([spec.name for spec in outputs], threads=request.threads, rewrites=False)
    if sequences is not None:
        run, outputs = sequences.over_sequences(run, steps="last"), sequences.judged
    probes = take_probes(run, part, feeds, inputs=source.inputs, outputs=outputs)
    return decide_task(
        request.task,
        Evidence(
            probes=probes,
            labels=request.class_names,
            labelled=part.labelled and part.truth is int,
            placement=Placement.of_input(next(iter(feeds[0].values())).shape),
            is_sound=(request.preprocessing or {}).get("type") == "audio",
            metadata=source.model.metadata if isinstance(source.model, OnnxModel) else {},
        ),
    )
