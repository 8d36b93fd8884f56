"""Sizes of the free dimensions for which latency, memory and energy hold.

They are given, or those of the samples; a batch is 1 without either. Any other size is asked for: a height
or a length that is guessed makes each figure a guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edgekit_runtime.errors import ModelError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.specs import batch_dims, free_dims
from edgekit_toolkit.samples.generated import Feeds, bind_dims
from edgekit_toolkit.samples.shards import Batching
from edgekit_toolkit.samples.split import Ranges


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a free dimension, and where it is from; only a batch is assumed, as 1."""

    value: int
    origin: Literal["given", "samples", "assumed"]


def settle_sizes(
    model: Model,
    inputs: Sequence[TensorSpec],
    given: Mapping[str, int],
    sample: Feeds | None,
    ranges: Ranges,
) -> dict[str, Size]:
    """Return the size of each free dimension; an ONNX model has been run with them.

    Args:
        model: an imported model.
        inputs: what it takes.
        given: sizes that the user states.
        sample: the first of the user's samples, or None.
        ranges: as for `generate_feeds`.

    Raises:
        ModelError: a size is not known, is of no free dimension, or does not suit the model.
    """
    found = {name: Size(value, "given") for name, value in given.items()}
    batch = batch_dims(inputs)
    chosen = batch if Batching.of(inputs).stacked else ()  # how many samples are stacked, no sample says
    for spec in inputs:
        for axis, name in enumerate(spec.shape):
            if isinstance(name, str) and sample is not None and name not in chosen:
                found.setdefault(name, Size(sample[spec.name].shape[axis], "samples"))
    missing = [name for name in free_dims(inputs) if name not in found and name not in batch]
    found |= {name: Size(1, "assumed") for name in batch if name not in found}
    if not isinstance(model, OnnxModel):
        if missing:
            raise ModelError(f"{_unknown(missing)}: give samples of the right sizes (--calibration)")
        return {name: found[name] for name in free_dims(inputs)}
    runs_with = bind_dims(model.proto, {name: size.value for name, size in found.items()}, ranges)
    if missing:
        options = " ".join(f"--dim {name}={runs_with[name]}" for name in missing)
        raise ModelError(
            f"{_unknown(missing)}: give samples (--calibration), or {options} with the sizes that the model"
            " is used with (it runs with these)"
        )
    return {name: found[name] for name in free_dims(inputs)}


def find_other_sizes(
    inputs: Sequence[TensorSpec], sizes: Mapping[str, int], samples: Sequence[Feeds]
) -> dict[str, int]:
    """Return the free dimensions in which a sample has another size than the figures hold for, with its size.

    Args:
        inputs: what the model takes.
        sizes: of all free dimensions.
        samples: some of the user's samples.
    """
    return {
        name: sample[spec.name].shape[axis]
        for sample in samples
        for spec in inputs
        for axis, name in enumerate(spec.shape)
        if isinstance(name, str) and sample[spec.name].shape[axis] != sizes[name]
    }


def list_sizes(sizes: Mapping[str, int]) -> str:
    """Return sizes as `--dim` takes them."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _unknown(missing: Sequence[str]) -> str:
    what = "size of the free dimension" if len(missing) == 1 else "sizes of the free dimensions"
    return f"latency, memory and energy depend on the {what} {', '.join(missing)}, which nothing tells"
