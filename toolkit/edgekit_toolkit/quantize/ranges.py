"""Collects ranges and histograms of activations over a stream of samples.

Tensors are read in groups of limited size, so that a large image does not bring all activations into memory
at once. `clipping` computes narrower ranges from the histograms.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError, ModelError
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.onnx_graph.index import GraphIndex, copy_model, fresh_name, recorded_shapes, with_outputs
from edgekit_toolkit.onnx_graph.shapes import with_shapes
from edgekit_toolkit.onnx_graph.specs import dimension, real_inputs
from edgekit_toolkit.samples.generated import Feeds

GROUP_BYTES: Final = 192 << 20  # size of the activations that are fetched in one run of the model


@dataclass(frozen=True, slots=True)
class Range:
    """The smallest and largest values of an activation, float64 [channels], or [1] for all channels."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def whole(self) -> tuple[float, float]:
        """Return the smallest and the largest value over all channels."""
        return float(self.low.min()), float(self.high.max())


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram of the values of one activation with bins of equal width.

    Attributes:
        low, high: The lower end of the first bin and the upper end of the last bin. `low` is less than
            `high`.
        counts: The numbers of values, int64 [`HISTOGRAM_BINS`].
    """

    low: float
    high: float
    counts: NDArray[np.int64]


HISTOGRAM_BINS = 4096
_NO_SAMPLES: Final = "calibration: there are no samples; give at least one"
# Masks use the smallest float like -inf. Codes that reach it leave one code for all other values.
_MAX_CODED: Final = 1e30
# An activation with a smaller range counts as constant.
_LEAST_WIDTH = 1e-12

# Runs a model on one sample and yields the requested activations, by name.
ReadActivations = Callable[[Feeds], Iterable[tuple[str, NDArray[Any]]]]


def collect(
    model: onnx.ModelProto,
    names: Sequence[str],
    samples: Callable[[], Iterable[Feeds]],
    *,
    threads: int,
    group_bytes: int = GROUP_BYTES,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Range]:
    """Run a model on samples and return the ranges of the activations `names`, for each channel (axis 1).

    Activations without a range are left out, see `gather`.

    Raises:
        DataError: There are no samples.
        BackendError: The model does not run on a sample.
    """
    first = next(iter(samples()), None)
    if first is None:
        raise DataError(_NO_SAMPLES)
    read = activation_reader(model, names, first, threads=threads, group_bytes=group_bytes)
    return gather(samples, read, progress, axis=1, unsized=_find_unsized(model, names, first))


def _find_unsized(model: onnx.ModelProto, names: Sequence[str], feeds: Feeds) -> set[str]:
    """Return the activations whose shape depends on the data, as far as inference shows it.

    It knows no shape behind operators that ONNX does not define; nothing is said of these.
    """
    dims = {
        name: size
        for value in real_inputs(model.graph)
        for axis, size in enumerate(feeds[value.name].shape)
        if isinstance(name := dimension(value.name, axis, value.type.tensor_type.shape.dim[axis]), str)
    }
    try:
        shapes = recorded_shapes(with_shapes(model, dims).graph)
    except ModelError:  # inference contradicts what the engine runs
        return set()
    undefined: set[str] = set()
    for node in model.graph.node:
        if node.domain not in {"", "ai.onnx"} or not undefined.isdisjoint(node.input):
            undefined.update(node.output)
    return {name for name in names if None in shapes.get(name, (None,)) and name not in undefined}


def activation_reader(
    model: onnx.ModelProto,
    names: Sequence[str],
    first: Feeds,
    *,
    threads: int,
    group_bytes: int = GROUP_BYTES,
) -> ReadActivations:
    """Return a function that runs `model` on a sample and yields the names and values of activations.

    Args:
        model: The model.
        names: The names of activations or inputs.
        first: A sample from which the sizes of the activations are determined.
        threads: The number of threads of one inference.
        group_bytes: The maximum size of the activations in one run. The function runs the model several times
            if necessary.

    Raises:
        BackendError: The model does not run on the sample.
    """
    inner = [name for name in names if name not in first]
    sizes = _measured_bytes(model, inner, first, threads)
    groups = split_by_bytes(sizes, group_bytes)
    sessions = [session_for(with_outputs(model, group), threads=threads) for group in groups]

    def values(feeds: Feeds) -> Iterator[tuple[str, NDArray[Any]]]:
        yield from ((name, feeds[name]) for name in names if name in feeds)
        for group, session in zip(groups, sessions, strict=True):
            yield from zip(group, run_session(session, feeds, group), strict=True)

    return values


def split_by_bytes(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divide tensors into groups with a total size of at most `most` bytes, in order.

    A tensor that is larger than `most` bytes forms its own group.
    """
    groups: list[list[str]] = []
    total = 0
    for name, size in sizes.items():
        if not groups or total + size > most:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups


def gather(
    samples: Callable[[], Iterable[Feeds]],
    read: ReadActivations,
    progress: Callable[[], None],
    *,
    axis: int | None,
    unsized: Collection[str] = (),
) -> dict[str, Range]:
    """Return the ranges of activations over a stream of samples.

    An activation has no range if it is always empty, or if it has values that cannot be quantized, such as
    -inf in an attention mask. A vector whose length depends on the data has no range either, because
    onnxruntime with several threads crashes on an empty quantized vector.

    Args:
        samples: Returns an iterator over the samples.
        read: Runs the model on a sample and yields the activations.
        progress: Called after each sample.
        axis: The axis of the channels, or None for one range per tensor.
        unsized: The activations whose shapes depend on the data.

    Raises:
        DataError: There are no samples.
    """
    extremes: dict[str, Range] = {}
    without_range: set[str] = set()
    lengths: dict[tuple[object, ...], int] = {}
    feeds = None
    for feeds in samples():
        shapes = tuple(value.shape for value in feeds.values())
        for name, value in read(feeds):
            is_vector = sum(size != 1 for size in value.shape) <= 1
            varies = name in unsized or lengths.setdefault((name, shapes), value.size) != value.size
            if (is_vector and varies) or not (np.abs(value) <= _MAX_CODED).all():  # NaN too
                without_range.add(name)
            elif value.size:
                _update(extremes, name, value, axis)
        progress()
    if feeds is None:
        raise DataError(_NO_SAMPLES)
    return {name: item for name, item in extremes.items() if name not in without_range}


def count_values(
    samples: Iterable[Feeds], read: ReadActivations, ranges: Mapping[str, tuple[float, float]]
) -> dict[str, Histogram]:
    """Return a dict from the activations to their histograms. Constant activations are left out.

    `ranges` contains the range (low, high) of each activation. Values outside are counted in the first or
    last bin.
    """
    histograms: dict[str, Histogram] = {}
    for feeds in samples:
        for name, value in read(feeds):
            low, high = ranges[name]
            if not value.size or high - low < _LEAST_WIDTH:
                continue
            bins_per_unit = np.float32(HISTOGRAM_BINS / (high - low))
            bins = ((value.reshape(-1) - np.float32(low)) * bins_per_unit).astype(np.int64)
            counts = np.bincount(np.clip(bins, 0, HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS)
            previous = histograms.get(name)
            histograms[name] = Histogram(low, high, counts if previous is None else previous.counts + counts)
    return histograms


def _measured_bytes(
    model: onnx.ModelProto, names: Sequence[str], feeds: Feeds, threads: int
) -> dict[str, int]:
    """Size of each activation on one sample, from `Size` nodes so that the values are not fetched."""
    if not names:
        return {}
    copy = copy_model(model)
    del copy.graph.output[:]
    index = GraphIndex(copy.graph)
    sizes = [fresh_name(index, f"{name}_size") for name in names]
    for name, size in zip(names, sizes, strict=True):
        copy.graph.node.append(onnx.helper.make_node("Size", [name], [size]))
        copy.graph.output.append(onnx.helper.make_tensor_value_info(size, onnx.TensorProto.INT64, []))
    values = run_session(session_for(copy, threads=threads), feeds, sizes)
    return {name: int(value) * 4 for name, value in zip(names, values, strict=True)}


def _update(extremes: dict[str, Range], name: str, value: NDArray[Any], axis: int | None) -> None:
    # A channel axis whose length varies from sample to sample (a sequence, say) has only overall extremes.
    others = tuple(other_axis for other_axis in range(value.ndim) if other_axis != axis)
    low, high = np.atleast_1d(value.min(axis=others)), np.atleast_1d(value.max(axis=others))
    previous = extremes.get(name)
    if previous is None:
        extremes[name] = Range(low.astype(np.float64), high.astype(np.float64))
    elif previous.low.shape == low.shape:
        extremes[name] = Range(np.minimum(previous.low, low), np.maximum(previous.high, high))
    else:
        whole_low, whole_high = previous.whole()
        extremes[name] = Range(
            np.atleast_1d(np.float64(min(whole_low, low.min()))),
            np.atleast_1d(np.float64(max(whole_high, high.max()))),
        )
