"""What tensors take on the link in each coding: sizes of real tensors, recorded on samples.

The coding itself is part of the submodels (`edgekit_offload.partition`); here it is repeated in numpy to
learn its size. Times are modelled until the cuts are measured as they are.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from edgekit_offload.cuts.kernel_graph import KernelGraph
from edgekit_offload.planning.costs import CodedTensors
from edgekit_runtime.errors import CutError
from edgekit_runtime.remote.measure import PAUSE_S
from edgekit_runtime.tensors import Array

FAMILIES: Final = ("raw", "int8", "int4")
COMPRESSION_PAYS: Final = 0.95  # of the size without it; above, it is left out
_LEAST_VALUES: Final = 64  # a smaller tensor is sent raw: its scale and description weigh as much
_CODING_BYTES_PER_S: Final = 1e9  # quantisation in the graph, of this machine; estimated
_ZSTD_LEVEL: Final = 1
_WARMUP: Final = 2
_ROUNDS: Final = 5

Feeds: TypeAlias = Mapping[str, Array]
_LEAST_CLASSES: Final = 2


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """What a coding does to the answers of a classifier.

    Attributes:
        changed: share of the answers that are another class.
        loss: share of the answers that it is expected to make wrong, by the probabilities that the model
            itself gives to its best class and to the one that took its place. So near ties cost little, as
            they do in accuracy, and much less than one answer can be seen. It is right for a model whose
            probabilities are (calibration); estimated.
    """

    changed: float
    loss: float


def compare_answers(answers: Feeds, expected: Feeds) -> AnswerChange | None:
    """Return what became of the answers; None where there are no classes.

    Of several outputs it is the one that changes most: some may come from the device, some from the server.

    Args:
        answers: outputs of the model with a coding.
        expected: its outputs without.
    """
    found = [
        _compare_scores(answers[name], right)
        for name, right in expected.items()
        if answers[name].shape == right.shape and min(right.ndim, *right.shape[-1:]) >= _LEAST_CLASSES
    ]
    return max(found, key=lambda one: (one.loss, one.changed), default=None)


def _compare_scores(answers: Array, expected: Array) -> AnswerChange:
    best, other = (one.argmax(axis=-1)[..., np.newaxis] for one in (expected, answers))
    probabilities = _probabilities(expected.astype(np.float64))
    lost = np.take_along_axis(probabilities, best, -1) - np.take_along_axis(probabilities, other, -1)
    return AnswerChange(float((best != other).mean()), float(lost.mean()))


def _probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores as probabilities; those that are none yet are logits."""
    if (scores >= 0).all() and np.allclose(scores.sum(axis=-1), 1, atol=1e-2):
        return scores
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def measure_codings(
    model: bytes,
    graph: KernelGraph,
    feeds: Sequence[Feeds],
    *,
    device_slowdown: float,
    server_slowdown: float,
) -> dict[str, CodedTensors]:
    """Return what every tensor of a graph takes in each family of codings, the mean of the samples.

    Args:
        model: the ONNX model.
        graph: its kernels; tensors have the names of the model.
        feeds: samples, one request each.
        device_slowdown: time of the device as a multiple of this machine's.
        server_slowdown: the same of the server.

    Raises:
        CutError: the model does not run on a sample.
    """
    sizes = {family: np.zeros((len(feeds), len(graph.tensors))) for family in FAMILIES}
    raw_bytes = np.zeros(len(graph.tensors))
    names = {family: ["raw"] * len(graph.tensors) for family in FAMILIES}
    spent_s = dict.fromkeys(FAMILIES, 0.0)
    compressed_bytes(np.zeros(1))  # the first call may import
    for number, one in enumerate(feeds):
        for row, array in enumerate(_record(model, graph, one)):
            raw_bytes[row] += array.nbytes / len(feeds)
            for family in FAMILIES:
                coded = encode(array, family)
                if coded.dtype != array.dtype:
                    names[family][row] = family
                begin_s = time.perf_counter()
                sizes[family][number, row] = compressed_bytes(coded)
                spent_s[family] += time.perf_counter() - begin_s
    codings = {}
    for family in FAMILIES:
        sent = sizes[family].mean(axis=0)
        packed = raw_bytes / {"raw": 1, "int8": 4, "int4": 8}[family]
        zstd_s = packed * spent_s[family] / max(float(packed.sum()) * len(feeds), 1.0)
        coded_s = raw_bytes / _CODING_BYTES_PER_S if family != "raw" else np.zeros_like(raw_bytes)
        codings[family] = CodedTensors(
            tuple(names[family]),
            sent,
            (coded_s + zstd_s) * device_slowdown,
            (coded_s + zstd_s) * server_slowdown,
        )
    return codings


def encode(array: Array, family: str) -> Array:
    """Return a tensor as it is sent: int8 or packed 4-bit codes with one scale a sample, or as it is."""
    if not _is_coded(array, family):
        return array
    codes = np.rint(array / _scale(array, family)).astype(np.int8)
    if family == "int8":
        return codes
    flat = np.append(codes.ravel(), np.zeros(codes.size % 2, np.int8)) & 0xF
    return np.asarray(flat[0::2] | flat[1::2] << 4, np.uint8)


def restore(array: Array, family: str) -> Array:
    """Return a tensor as the server has it after decoding."""
    if not _is_coded(array, family):
        return array
    scale = _scale(array, family)
    return np.asarray(np.rint(array / scale) * scale, array.dtype)


def _is_coded(array: Array, family: str) -> bool:
    return family in ("int8", "int4") and array.dtype.kind == "f" and array.size >= _LEAST_VALUES


def _scale(array: Array, family: str) -> float:
    return float(np.abs(array).max()) / (127 if family == "int8" else 7) or 1.0


def compressed_bytes(array: Array) -> int:
    """Return the size of a tensor on the link: with zstd where that pays and is installed, else without."""
    try:
        import zstandard
    except ImportError:
        return array.nbytes
    packed = len(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(np.ascontiguousarray(array).tobytes()))
    return packed if packed < COMPRESSION_PAYS * array.nbytes else array.nbytes


def run_seconds(model: bytes, feeds: Feeds) -> float:
    """Return the median time of a run of a model on this machine."""
    session = open_model(model)
    return median_s(lambda: session.run(None, dict(feeds)))


def median_s(call: Callable[[], object]) -> float:
    """Return the median time of a call on this machine after a pause, as machines measure models.

    The first calls, which may import, do not count.
    """
    times = []
    for _ in range(_WARMUP + _ROUNDS):
        time.sleep(PAUSE_S)
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[_WARMUP:])


def open_model(
    model: bytes, settings: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    """Return a session of a model on the processor of this machine.

    Raises:
        CutError: onnxruntime refuses it.
    """
    try:
        return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    except Exception as cause:  # its exceptions have no common base but this
        raise CutError(f"onnxruntime refused the model: {cause}") from cause


def _record(model: bytes, graph: KernelGraph, feeds: Feeds) -> list[NDArray[np.generic]]:
    """Return the value of every tensor of the graph for one request, in the graph's order."""
    inputs = set(graph.inputs)
    proto = onnx.load_from_string(model)
    known = {one.name for one in proto.graph.output}
    made = [tensor for tensor in graph.tensors if tensor not in inputs]
    proto.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in made if tensor not in known)
    session = open_model(proto.SerializeToString())
    try:
        outputs = session.run(made, dict(feeds))
    except Exception as cause:  # as above
        raise CutError(f"the model does not run on a sample: {cause}") from cause
    values = {**feeds, **dict(zip(made, outputs, strict=True))}
    return [np.asarray(values[tensor]) for tensor in graph.tensors]
