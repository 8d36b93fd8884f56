"""Prepares a search: imports the model, chooses its sizes and the samples, and optimises it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

from edgekit_runtime.drift.class_outputs import class_output
from edgekit_runtime.errors import BackendError, DataError, ModelError
from edgekit_toolkit.evaluation.metrics import METRICS
from edgekit_toolkit.importers.model_file import SourceModel, errors_with_path
from edgekit_toolkit.importers.sizes import Size, StatedSizes, list_sizes, settle
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.ort_options import disable_optimizers
from edgekit_toolkit.packaging.assemble import GOLDEN_SEED, Reference, check_provable, golden_reference
from edgekit_toolkit.packaging.drift_reference import drift_reference
from edgekit_toolkit.passes.optimiser import PassResult, optimise
from edgekit_toolkit.passes.reference_check import check_reference
from edgekit_toolkit.passes.wrong_rewrites import WrongRewrites, find_wrong_rewrites
from edgekit_toolkit.pipeline.request import Phases, Request
from edgekit_toolkit.pipeline.sample_choice import choose_decoding, choose_samples, find_task
from edgekit_toolkit.samples.generated import Feeds, advise_on_integers
from edgekit_toolkit.samples.sequences import SequenceSamples
from edgekit_toolkit.samples.split import Ranges, Samples, first_feeds
from edgekit_toolkit.tasks.proposal import TaskDecision

# Parity is checked a dozen times. One large image shows what two would.
_PARITY_FEEDS = 2
_LARGE_FEEDS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The model and samples for a search.

    Attributes:
        sizes: A dict from the free dimensions to the sizes used for all figures.
        written_out: The operators replaced by their definitions, because the engine does not run them.
        feeds: The first calibration samples, at least one.
        steps: The results of the passes. Empty for a `.tflite` model.
        wrong_rewrites: The optimisations of onnxruntime that are disabled for `floats` and its forms, or
            None.
        floats: The optimised model with inferred shapes, or the unchanged `.tflite` model.
        ranges: A dict from each input to the smallest and largest value to generate. If the user gives
            samples, these are the smallest and largest value of the samples.
        golden: The golden inputs, and the outputs of `floats` for them.
        reference: Statistics of inputs and outputs on the calibration samples, or None without user samples.
        class_output: The name of the first output if it is known to be class scores, else None.
        sequences: Runs a model with states over samples. None for a model without states.
    """

    source: SourceModel[Model]
    sizes: Mapping[str, Size]
    written_out: tuple[str, ...]
    samples: Samples
    feeds: Sequence[Feeds]
    steps: Sequence[PassResult]
    wrong_rewrites: WrongRewrites | None
    floats: Model
    ranges: Ranges
    golden: Reference
    reference: Mapping[str, Any] | None
    task: TaskDecision
    class_output: str | None
    sequences: SequenceSamples | None = None

    @property
    def has_data(self) -> bool:
        """Whether candidates are judged on samples of the user."""
        return not self.samples.evaluation.is_generated

    @property
    def dims(self) -> dict[str, int]:
        """A dict from the free dimensions to their sizes as integers."""
        return {name: size.value for name, size in self.sizes.items()}

    def other_sizes(self, samples: Sequence[Feeds]) -> dict[str, int]:
        """Return the sizes of the free dimensions in `samples` that differ from `dims`, by name."""
        return {
            name: sample[spec.name].shape[axis]
            for sample in samples
            for spec in self.source.inputs
            for axis, name in enumerate(spec.shape)
            if isinstance(name, str) and sample[spec.name].shape[axis] != self.dims[name]
        }


def prepare(request: Request, phases: Phases) -> Preparation:
    """Import and optimise the model, and read the samples.

    Raises:
        ModelError: The model cannot be used.
        DataError: The samples do not fit the model.
        BackendError: The engine fails on the source model.
    """
    with phases.phase("import"):
        source = load_model(request.model, request.fixed, request.states)
        with errors_with_path(source.path):
            check_provable(source.model)
        decoding = choose_decoding(request, source, phases.progress)
        stated = StatedSizes(request.dims, request.batch, request.calibration or request.evaluation)
        settled = settle(source, stated, decoding)
        source, sizes = settled.source, settled.sizes
        dims = {name: size.value for name, size in sizes.items()}
        chosen = choose_samples(request, source, dims, settled.ranges, decoding)
        samples, ranges = chosen.samples, chosen.ranges
    feeds = _parity_feeds(samples)
    if source.original is not None and isinstance(source.model, OnnxModel):
        check_reference(source.original, source.model.proto, feeds)
    floats, steps, wrong = source.model, tuple[PassResult, ...](), None
    if isinstance(floats, OnnxModel):
        with phases.phase("optimise"):
            optimised = optimise(floats.proto, batch=request.batch, feeds=feeds)
            proto, steps = onnx.shape_inference.infer_shapes(optimised.model), optimised.steps
            samples = replace(samples, warnings=(*samples.warnings, *optimised.warnings))
            wrong = find_wrong_rewrites(proto, feeds)
            floats = OnnxModel(disable_optimizers(proto, () if wrong is None else wrong.names))
    golden = _golden(source, floats, dims, ranges)
    with phases.phase("look at the samples"):
        classes = _stated_class_output(request, floats, samples)
        task = find_task(request, source, samples, chosen.sequences)
        reference = drift_reference(floats, samples.calibration, says_classes=classes is not None)
    return Preparation(
        source=source,
        sizes=sizes,
        written_out=settled.written_out,
        samples=samples,
        feeds=feeds,
        steps=steps,
        wrong_rewrites=wrong,
        floats=floats,
        ranges=ranges,
        golden=golden,
        reference=reference,
        task=task,
        class_output=classes,
        sequences=chosen.sequences,
    )


def _parity_feeds(samples: Samples) -> Sequence[Feeds]:
    feeds = first_feeds(samples.calibration, _PARITY_FEEDS)
    large = sum(array.nbytes for array in feeds[0].values()) > _LARGE_FEEDS_BYTES
    return feeds[:1] if large else feeds


def _golden(source: SourceModel[Model], floats: Model, dims: Mapping[str, int], ranges: Ranges) -> Reference:
    """Return the golden inputs, before any search: they are generated, and a model may refuse them.

    Raises:
        ModelError: the model does not run on them, or its outputs have other shapes than it states.
        DataError: its outputs for them cannot be compared.
    """
    try:
        golden = golden_reference(floats, dims, ranges, GOLDEN_SEED)
    except BackendError as error:
        raise ModelError(
            f"{source.path}: the model does not run on the golden inputs, which are generated."
            f"{advise_on_integers(source.inputs, ranges)} Reason: {error}"
        ) from error
    try:
        for spec in floats.specs(list(golden.outputs))[1]:
            spec.check(golden.outputs[spec.name])
    except DataError as error:
        raise ModelError(
            f"{source.path}: an output is not what the model states: {error}; export it with the right shape,"
            " or a free one"
        ) from error
    return golden


def _stated_class_output(request: Request, floats: Model, samples: Samples) -> str | None:
    """Return the first output's name if it is known, not only by its shape, to hold class scores."""
    output = class_output(floats.specs()[1])
    if output is None:
        return None
    if request.metric == "auto":
        is_stated = samples.evaluation.labelled and samples.evaluation.truth is int
    else:
        is_stated = request.metric in METRICS and METRICS[request.metric].reads_classes
    if not is_stated and request.labels is not None:
        is_stated = len(request.class_names) == output.shape[-1]
    return output.name if is_stated else None


def check_fixed_sizes(prepared: Preparation) -> None:
    """Check that the samples have the sizes in `prepared.dims`, which are fixed in a `.tflite` model.

    Raises:
        ModelError: A sample has another size.
    """
    if other := prepared.other_sizes(prepared.feeds):
        fixed_sizes = list_sizes({name: prepared.dims[name] for name in other})
        raise ModelError(
            f"{prepared.source.path}: for LiteRT sizes are fixed, here to {fixed_sizes}, and a sample has"
            f" {list_sizes(other)}; give samples of one size, without --dim, or take --backend ort"
        )
