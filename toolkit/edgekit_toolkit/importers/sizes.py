"""Determines the sizes of a model's free dimensions.

Latency, memory and energy depend on these sizes. The sizes are taken from the user or from samples. A batch
defaults to 1. There is no default for other sizes, because figures for guessed sizes would be meaningless.
The model runs for the first time here, so this module also replaces operators on which the engine fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from edgekit_runtime.errors import ModelError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.importers.model_file import SourceModel
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.functions import inline_functions, named_functions
from edgekit_toolkit.onnx_graph.specs import batch_dims, free_dims
from edgekit_toolkit.samples.generated import Feeds, bind_dims
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.sequences import SequenceSamples
from edgekit_toolkit.samples.shards import Batching
from edgekit_toolkit.samples.split import Ranges, read_ranges


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a free dimension.

    Attributes:
        value: The size.
        origin: Whether the size is `given` by the user, read from `samples`, or `assumed`. Only batch sizes
            are assumed. They are then 1.
    """

    value: int
    origin: Literal["given", "samples", "assumed"]


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model and the sizes of its free dimensions. The model runs with these sizes.

    Attributes:
        source: The model. Its `original` is set if operators were replaced.
        sizes: A dict from the name of a free dimension to its size.
        ranges: A dict from input name to the smallest and largest value to generate.
        written_out: The operators that were replaced by their definitions, because the engine fails on them.
    """

    source: SourceModel[Model]
    sizes: dict[str, Size]
    ranges: Ranges
    written_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StatedSizes:
    dims: Mapping[str, int]
    batch: int | None
    samples: Path | None


def settle(source: SourceModel[Model], stated: StatedSizes, decoding: Decoding) -> SizedModel:
    """Return a model that runs, and the sizes of its free dimensions.

    Operators on which the engine fails are replaced by their definitions.

    Raises:
        ModelError: A size is unknown or cannot be set, or the model does not run with its sizes.
    """
    try:
        return SizedModel(source, *_sizes(source, stated, decoding))
    except ModelError as error:
        if not isinstance(source.model, OnnxModel):
            raise
        proto = source.model.proto
        failing = named_functions(proto, str(error))
        written_out = inline_functions(proto, failing)
        if written_out is None:
            raise
    runnable = replace(source, model=OnnxModel(written_out), original=source.original or proto)
    settled = settle(runnable, stated, decoding)
    return replace(settled, written_out=(*sorted(failing), *settled.written_out))


def _sizes(
    source: SourceModel[Model], stated: StatedSizes, decoding: Decoding
) -> tuple[dict[str, Size], Ranges]:
    """Sizes of all free dimensions, and the ranges of the inputs' values."""
    dims, path = dict(stated.dims), stated.samples
    if path is None:
        codes = source.model.input_code_ranges()
        ranges: Ranges = {name: (code_range.low, code_range.high) for name, code_range in codes.items()}
        first = None
    else:
        sequences = SequenceSamples(source.states, source.inputs, source.outputs, stated.dims)
        specs = sequences.specs if source.states else source.inputs
        first, ranges = read_ranges(path, specs, decoding)
        first = sequences.first_step(first) if source.states else first
    if not source.model.has_fixed_sizes:
        if stated.batch is not None:
            dims.update(dict.fromkeys(batch_dims(source.inputs), stated.batch))
    elif stated.batch is not None or set(stated.dims) - set(free_dims(source.inputs)):
        raise ModelError(
            f"{source.path}: --batch and --dim cannot change the sizes of a .tflite; give the ONNX model, or"
            " export the file with the sizes that you want"
        )
    return settle_sizes(source.model, source.inputs, dims, first, ranges), ranges


def settle_sizes(
    model: Model,
    inputs: Sequence[TensorSpec],
    stated: Mapping[str, int],
    sample: Feeds | None,
    ranges: Ranges,
) -> dict[str, Size]:
    """Return a dict from the name of a free dimension to its size. An ONNX model is run as a check.

    Args:
        model: The model.
        inputs: The inputs of the model.
        stated: The sizes that the user states.
        sample: The first of the user's samples, or None.
        ranges: See `generate_feeds`.

    Raises:
        ModelError: A size is unknown, `stated` has an unknown dimension, or the model does not run.
    """
    sizes_by_name = {name: Size(value, "given") for name, value in stated.items()}
    batch = batch_dims(inputs)
    # One sample does not tell the batch, unless it has an axis for it beside that of the samples.
    is_one = sample is None or all(array.shape[:1] == (1,) for array in sample.values())
    chosen = batch if is_one and Batching.of(inputs).stacked else ()
    for spec in inputs:
        for axis, name in enumerate(spec.shape):
            if isinstance(name, str) and sample is not None and name not in chosen:
                sizes_by_name.setdefault(name, Size(sample[spec.name].shape[axis], "samples"))
    missing = [name for name in free_dims(inputs) if name not in sizes_by_name and name not in batch]
    sizes_by_name |= {name: Size(1, "assumed") for name in batch if name not in sizes_by_name}
    if not isinstance(model, OnnxModel):
        if missing:
            raise ModelError(f"{_unknown(missing)}: give samples of the right sizes (--calibration)")
        return {name: sizes_by_name[name] for name in free_dims(inputs)}
    runs_with = bind_dims(model.proto, {name: size.value for name, size in sizes_by_name.items()}, ranges)
    if missing:
        options = " ".join(f"--dim {name}={runs_with[name]}" for name in missing)
        raise ModelError(
            f"{_unknown(missing)}: give samples (--calibration), or {options} with the sizes that the model"
            " is used with (it runs with these)"
        )
    return {name: sizes_by_name[name] for name in free_dims(inputs)}


def _unknown(missing: Sequence[str]) -> str:
    subject = "size of the free dimension" if len(missing) == 1 else "sizes of the free dimensions"
    return f"latency, memory and energy depend on the {subject} {', '.join(missing)}, which nothing tells"


def with_batch(inputs: tuple[TensorSpec, ...], batch: int | None) -> tuple[TensorSpec, ...]:
    """Replace the free batch dimension of the inputs by `batch`, unless `batch` is None."""
    if batch is None:
        return inputs
    free = batch_dims(inputs)
    return tuple(
        replace(spec, shape=tuple(batch if size in free else size for size in spec.shape)) for spec in inputs
    )


def list_sizes(sizes: Mapping[str, int]) -> str:
    """Return sizes as text, such as `height=224, width=224`."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
