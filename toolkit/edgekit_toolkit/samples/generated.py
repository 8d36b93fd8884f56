"""Generates random inputs. A seed gives the same inputs on all machines and with all numpy versions.

The inputs are for trial runs of a model. They cannot replace calibration or evaluation data (see `source`).
The module also finds sizes for the free dimensions of a model by trial runs.

Only the raw stream of PCG64 and single IEEE operations are used. The streams of `Generator` may change
between numpy versions, and sums or transcendental functions may round differently between machines.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_runtime.errors import BackendError, DataError, ModelError
from edgekit_runtime.sessions.ort import OrtOptions
from edgekit_runtime.tensors import DTYPES, TensorSpec
from edgekit_toolkit.onnx_graph.specs import batch_dims, bound_shape, free_dims, input_specs
from edgekit_toolkit.openings.sessions import open_ort

Feeds = dict[str, NDArray[Any]]

DEFAULT_RANGE: Final = (-1.0, 1.0)
KNOTS: Final = 6  # random points of a smooth axis
NOISE_SHARE: Final = 0.25  # share of the range. The smooth field has the rest
SMALLEST_SMOOTH_AXIS: Final = 9  # shorter axes count as channels, which need not vary smoothly

# Tried for all free dimensions together, in this order: usual image sizes, then sequences, windows, channels.
COMMON_SIZES: Final = (224, 320, 640, 128, 64, 48, 32, 512, 256, 96, 16, 8, 3, 1)
MIXED_SIZES: Final = (1, 3, 32, 48, 64, 128, 224, 512)  # then tried in every combination
MAX_TRIALS: Final = 100


def generate_feeds(
    inputs: Sequence[TensorSpec],
    n: int,
    seed: int,
    dims: Mapping[str, int] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> list[Feeds]:
    """Return `n` random feeds.

    Float and 8-bit inputs of rank 3 or more are smooth fields with noise. Other inputs are noise.

    Args:
        inputs: The inputs of the model.
        n: The number of feeds.
        seed: The seed of the random stream, at least 0.
        dims: The sizes of the free dimensions by name (see `bind_dims`). A free leading dimension without a
            size gets 1.
        ranges: A dict from the name of an input to its smallest and largest value. The default is -1..1 for
            floats, the whole range for 8-bit inputs of rank 3 or more, and 0..1 for other integers, which may
            be masks or indices.

    Raises:
        DataError: A free dimension has no size, or a range does not fit its input.
    """
    shapes = {spec.name: bound_shape(spec, dims or {}) for spec in inputs}
    limits = {spec.name: _range(spec, (ranges or {}).get(spec.name)) for spec in inputs}
    stream = np.random.PCG64(seed)
    return [
        {spec.name: _values(stream, spec, shapes[spec.name], limits[spec.name]) for spec in inputs}
        for _ in range(n)
    ]


def scaled(feeds: Feeds, factor: float) -> Feeds:
    """Return the feeds with float inputs multiplied by `factor` and clipped to the range of their dtype.

    Other inputs are not changed.
    """
    return {
        name: _times(array, factor) if array.dtype.kind == "f" else array for name, array in feeds.items()
    }


def _times(array: NDArray[Any], factor: float) -> NDArray[Any]:
    most = np.finfo(array.dtype).max
    with np.errstate(over="ignore"):
        # `asarray`: the product of an array without axes is a scalar.
        return np.asarray(np.clip(array * array.dtype.type(factor), -most, most))


def bind_dims(
    model: onnx.ModelProto,
    dims: Mapping[str, int] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, int]:
    """Find a size for each free dimension of a model, so that the model runs on generated inputs.

    Args:
        model: An imported model.
        dims: The sizes that are already known. Other batch dimensions get 1. For the remaining dimensions,
            common sizes are tried.
        ranges: The ranges of the inputs, as for `generate_feeds`.

    Raises:
        ModelError: `dims` names a dimension that is not free, or the model runs with none of the tried sizes.
    """
    inputs = input_specs(model)
    free = free_dims(inputs)
    settled = dict(dims or {})
    batch = batch_dims(inputs)
    for name, size in settled.items():
        least = 1 if name in batch else 0  # a cache may be empty
        if name not in free or size < least:
            free_text = (
                f"free dimensions are {', '.join(free)}" if free else "the model has no free dimension"
            )
            raise ModelError(
                f"--dim {name}={size}: expected a free dimension and a size of at least {least}; {free_text}"
            )
    content = model.SerializeToString()
    reason = ""
    for trial in _trials(free, settled, batch):
        reason = _refusal(content, generate_feeds(inputs, 1, 0, trial, ranges)[0])
        if not reason:
            return trial
    raise ModelError(
        f"the model does not run{_advise_on_sizes(free, settled, batch)}."
        f"{advise_on_integers(inputs, ranges or {})} Last: {reason}"
    )


def _advise_on_sizes(free: Sequence[str], settled: Mapping[str, int], batch: Sequence[str]) -> str:
    """Return what a user can do for a model that does not run: other sizes, unless all of them are fixed."""
    unknown = [name for name in free if name not in settled and name not in batch]
    if unknown:
        options = " ".join(f"--dim {name}=VALUE" for name in unknown)
        return f" with the input sizes that were tried; give {options}"
    if not free:
        return (
            ", and its inputs have fixed sizes: mend the node that is named below, and export the model again"
        )
    sizes = ", ".join(f"{name}={settled.get(name, 1)}" for name in free)
    return f" with {sizes}; give other sizes (--dim), or mend the node that is named below"


def advise_on_integers(inputs: Sequence[TensorSpec], ranges: Mapping[str, tuple[float, float]]) -> str:
    """Return advice for the user of a model with integer inputs, or an empty text for other models.

    The advice starts with a space, so that it can be appended to a message.
    """
    integers = [spec for spec in inputs if DTYPES[spec.dtype].kind in "iu"]
    if not integers:
        return ""
    unknown = [f"'{spec.name}'" for spec in integers if spec.name not in ranges]
    if unknown:
        return (
            f" Values of the integer inputs {', '.join(unknown)} were made up: give --calibration with real"
            " samples, in whose range they are generated then."
        )
    stated_ranges = [
        f"'{spec.name}' in {'..'.join(f'{end:.0f}' for end in ranges[spec.name])}" for spec in integers
    ]
    return (
        f" Values of integer inputs were generated as in the samples ({', '.join(stated_ranges)}): if the"
        " model takes only some of them together, export it with these inputs fixed."
    )


def _refusal(content: bytes, feeds: Feeds) -> str:
    """Return why the model does not run with these inputs; empty if it runs."""
    try:
        outputs = open_ort(content, OrtOptions(optimise=False), feeds).run(feeds)
    except BackendError as err:
        return str(err)
    absent = [name for name, array in outputs.items() if array is None]  # such as statistics for training
    return f"onnxruntime makes no output '{absent[0]}'; export the model without it" if absent else ""


def _trials(
    free: Sequence[str], settled: Mapping[str, int], batch: Sequence[str]
) -> Iterator[dict[str, int]]:
    start = {name: settled.get(name, 1) for name in free if name in settled or name in batch}
    others = [name for name in free if name not in start]
    if not others:
        yield start
        return
    alike = ((size,) * len(others) for size in COMMON_SIZES)
    mixed = itertools.product(MIXED_SIZES, repeat=len(others)) if len(others) > 1 else ()
    for sizes in itertools.islice(itertools.chain(alike, mixed), MAX_TRIALS):
        yield {**start, **dict(zip(others, sizes, strict=True))}


def _range(spec: TensorSpec, stated: tuple[float, float] | None) -> tuple[float, float]:
    dtype = DTYPES[spec.dtype]
    if dtype.kind == "f":
        low, high = stated or DEFAULT_RANGE
        smallest, largest = float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    elif dtype.kind == "b":
        low, high = stated or (0, 1)
        smallest, largest = 0, 1
    else:
        smallest, largest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        is_image = dtype.itemsize == 1 and len(spec.shape) >= 3
        low, high = stated or ((smallest, largest) if is_image else (0, 1))
    if not smallest <= low <= high <= largest:
        raise DataError(f"input '{spec.name}' ({spec.dtype}): {low}..{high} is not a range of its values")
    return low, high


def _values(
    stream: np.random.PCG64, spec: TensorSpec, shape: tuple[int, ...], limits: tuple[float, float]
) -> NDArray[Any]:
    dtype = DTYPES[spec.dtype]
    low, high = limits
    unit = _uniform(stream, shape)
    if len(shape) >= 3 and (dtype.kind == "f" or dtype.itemsize == 1):
        unit = _smooth(stream, shape) * (1 - NOISE_SHARE) + unit * NOISE_SHARE
    if dtype.kind == "f":
        return np.asarray(low + unit * (high - low), dtype)
    # Each integer of the range is as likely; the minimum guards the rounding of the product up to its end.
    return np.asarray(np.minimum(np.floor(unit * (high - low + 1)) + low, high), dtype)


def _uniform(stream: np.random.PCG64, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return float64 [*shape] in 0..1, 53 random bits each."""
    raw = np.asarray(stream.random_raw(math.prod(shape)), np.uint64)
    unit: NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return unit.reshape(shape)


def _smooth(stream: np.random.PCG64, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a low-frequency field float64 [*shape] in 0..1: random knots joined linearly, axis by axis."""
    smooth_axes = [axis for axis, size in enumerate(shape) if axis > 0 and size >= SMALLEST_SMOOTH_AXIS]
    field = _uniform(stream, tuple(KNOTS if axis in smooth_axes else size for axis, size in enumerate(shape)))
    for axis in smooth_axes:
        positions = np.arange(shape[axis], dtype=np.float64) * (KNOTS - 1) / (shape[axis] - 1)
        below = np.minimum(positions.astype(np.intp), KNOTS - 2)
        weight = (positions - below).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        field = field.take(below, axis) * (1 - weight) + field.take(below + 1, axis) * weight
    return field
