"""Measures on samples how large coded tensors are on the link, and how codings change answers.

Tensors are coded by the same nodes as in submodels (`edgekit_offload.partition.coding`). Times are measured
on this machine and scaled, until the cuts themselves are measured.
"""

import math
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgekit_offload.cuts.kernel_graph import KernelGraph
from edgekit_offload.partition.coding import (
    CUT_CODINGS,
    REPLY_CODING,
    Coding,
    build_model,
    code_tensor,
    codes_reply,
)
from edgekit_offload.partition.opened_model import Feeds, OpenedModel, open_model
from edgekit_offload.planning.costs import TENSOR_BYTES, CodedTensors
from edgekit_runtime.tensors import Array, TensorSpec

COMPRESSION_PAYS: Final = 0.95  # share of the uncompressed size. Above, compression is left out
_TENSOR: Final = "tensor"  # its name in sessions that only code
# What is coded of a tensor: of each sample at most so many values, spread over it, and no further samples
# after so many bytes. The tensors of a photograph of 640 x 640 would be a gigabyte. Cuts are measured whole.
_PART_VALUES: Final = 1 << 16
_PART_PIECES: Final = 8
_ENOUGH_BYTES: Final = 5e5
_RECORDED_BYTES: Final = 1e9  # of all tensors. Then no further sample is run
_OPSET: Final = 17  # codings are the same in all opsets
_ZSTD_LEVEL: Final = 1
_LEAST_CLASSES: Final = 2
_MAX_SESSIONS: Final = 256  # of codings, kept for other plans. A session of a coding has some kilobytes


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """The effect of a coding on the answers of a model.

    Attributes:
        changed: The fraction of the answers whose class changed.
        loss: The estimated fraction of the answers that become wrong. A changed answer is weighted with the
            model's probability of the original class minus that of the new class. The probabilities must be
            calibrated.
        loss_error: The standard error of `loss`, or 0 for one sample.
    """

    changed: float
    loss: float
    loss_error: float = 0.0


def compare_answers(answers: Feeds, expected: Feeds, classes: Collection[str]) -> AnswerChange | None:
    """Return how a coding changed the answers, or None if it changed an output without class scores.

    If there are several outputs, the one with the largest change counts.

    Args:
        answers: The outputs of the model with a coding.
        expected: The outputs of the model without it.
        classes: The outputs whose last axis has class scores.
    """
    changes = []
    for name, right in expected.items():
        if name in classes and answers[name].shape == right.shape and _has_rows(right):
            changes.append(_compare_scores(answers[name], right))
        elif not np.array_equal(answers[name], right, equal_nan=right.dtype.kind == "f"):
            return None
    return max(changes, key=lambda change: (change.loss, change.changed), default=AnswerChange(0.0, 0.0))


def average_changes(changes: Sequence[AnswerChange | None]) -> AnswerChange | None:
    """Return the mean of changes with the standard error of the loss, or None if any change is None."""
    known_changes = [change for change in changes if change is not None]
    if len(known_changes) < len(changes):
        return None
    losses = [change.loss for change in known_changes]
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    return AnswerChange(
        statistics.fmean(change.changed for change in known_changes), statistics.fmean(losses), error
    )


def find_probabilities(outputs: Sequence[Feeds]) -> frozenset[str]:
    """Return the names of outputs that are class probabilities, whose rows sum to 1 in all samples."""
    return frozenset(
        name
        for name in outputs[0]
        if all(_has_rows(sample[name]) and _are_probabilities(sample[name]) for sample in outputs)
    )


def _has_rows(scores: Array) -> bool:
    return scores.dtype.kind == "f" and scores.ndim > 1 and scores.shape[-1] >= _LEAST_CLASSES


def _compare_scores(answers: Array, expected: Array) -> AnswerChange:
    best, other = (scores.argmax(axis=-1)[..., np.newaxis] for scores in (expected, answers))
    probabilities = _probabilities(expected.astype(np.float64))
    lost = np.take_along_axis(probabilities, best, -1) - np.take_along_axis(probabilities, other, -1)
    return AnswerChange(float((best != other).mean()), float(lost.mean()))


def _probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores as probabilities; scores that are no probabilities are logits."""
    if _are_probabilities(scores):
        return scores
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _are_probabilities(scores: Array) -> bool:
    return bool((scores >= 0).all() and np.allclose(scores.sum(axis=-1), 1, atol=1e-2))


def measure_codings(
    model: OpenedModel,
    graph: KernelGraph,
    feeds: Sequence[Feeds],
    *,
    device_slowdown: float,
    server_slowdown: float,
) -> dict[str, CodedTensors]:
    """Return a dict from each coding to the mean sizes and times of the coded tensors.

    Args:
        model: The model.
        graph: The kernels of the model, with its tensor names.
        feeds: The samples, one request each.
        device_slowdown: The ratio of the device's time to this machine's time.
        server_slowdown: The ratio of the server's time to this machine's time.

    Raises:
        CutError: The model does not run on a sample.
    """
    sizes, reply_bytes = ({coding: np.zeros(len(graph.tensors)) for coding in CUT_CODINGS} for _ in range(2))
    is_coded = {coding: np.zeros(len(graph.tensors), np.bool_) for coding in CUT_CODINGS}
    raw_bytes, coded_bytes, counts = np.zeros((3, len(graph.tensors)))
    spent_s, recorded_bytes = dict.fromkeys(CUT_CODINGS, 0.0), 0
    coders = {coding: TensorCoder(coding) for coding in CUT_CODINGS}
    compressed_bytes(np.zeros(1))  # the first call may import
    for arrays in model.record(graph.tensors, feeds):
        recorded_bytes += sum(array.nbytes for array in arrays)
        rows = np.flatnonzero(coded_bytes < _ENOUGH_BYTES)
        parts_of = {row: _take_part(arrays[row]) for row in rows}
        coded_bytes[rows] += [part.nbytes for part in parts_of.values()]
        raw_bytes[rows] += [arrays[row].nbytes for row in rows]
        counts[rows] += 1
        for row, array in parts_of.items():
            scale = arrays[row].nbytes / max(array.nbytes, 1)
            encoded: dict[str, tuple[Array, ...]] = {}
            for coding, coder in coders.items():
                is_coded[coding][row] |= coder.codes(array)  # opens the session before the clock starts
                encoded[coding], body_bytes, seconds = _encode(coder, array)
                sizes[coding][row] += body_bytes * scale + TENSOR_BYTES * (len(encoded[coding]) - 1)
                spent_s[coding] += seconds
            for coding in coders if graph.tensors[row] in graph.outputs else ():
                reply = encoded[REPLY_CODING] if _codes_reply(arrays[row], coding) else (array,)
                reply_bytes[coding][row] += sum(part.nbytes for part in reply) * scale
        if recorded_bytes > _RECORDED_BYTES:
            break
    # Seconds of this machine for a tensor of a request, by the mean speed over all tensors.
    per_byte = raw_bytes / counts / max(float(coded_bytes.sum()), 1.0)
    return {
        coding: CodedTensors(
            names=tuple(coding if coded else "raw" for coded in is_coded[coding]),
            sent_bytes=sizes[coding] / counts,
            encode_s=per_byte * spent_s[coding] * device_slowdown,
            decode_s=per_byte * spent_s[coding] * server_slowdown,
            reply_bytes=reply_bytes[coding] / counts,
        )
        for coding in coders
    }


def _encode(coder: "TensorCoder", array: Array) -> tuple[tuple[Array, ...], int, float]:
    """Return a tensor as it is sent, its bytes on the link, and the seconds that this took."""
    begin_s = time.perf_counter()
    parts = coder.encode(array)
    size_bytes = compressed_bytes(np.concatenate([part.reshape(-1).view(np.uint8) for part in parts]))
    return parts, size_bytes, time.perf_counter() - begin_s


def _codes_reply(array: Array, coding: str) -> bool:
    spec = TensorSpec(_TENSOR, array.dtype.name, ("N", *array.shape[1:]))
    return array.ndim > 1 and codes_reply(spec, TensorCoder(coding).coding)


def _take_part(array: Array) -> Array:
    """Return some rows of a large tensor, or pieces of its one row as a row: neighbours stay neighbours."""
    if array.size <= _PART_VALUES or array.ndim < 2:
        return array
    row_values = array[0].size
    if row_values <= _PART_VALUES:
        return array[np.linspace(0, len(array) - 1, _PART_VALUES // row_values).astype(np.intp)]
    flat, size = array.reshape(-1), _PART_VALUES // _PART_PIECES
    starts = np.linspace(0, array.size - size, _PART_PIECES).astype(np.intp)
    return np.concatenate([flat[start : start + size] for start in starts])[np.newaxis]


class TensorCoder:
    """Encodes tensors with the nodes of heads, and decodes them with the nodes of tails.

    Tensors whose shapes differ at most in axis 0 share a session, which is opened on first use. A single
    session for all shapes would take seconds to open.
    """

    def __init__(self, coding: str) -> None:
        self.coding = Coding(coding if coding in CUT_CODINGS else "raw")

    def codes(self, array: Array) -> bool:
        """Return whether the coding changes this tensor, or False if it is sent unchanged."""
        return self._open("encode", array) is not None

    def encode(self, array: Array) -> tuple[Array, ...]:
        session = self._open("encode", array)
        if session is None:
            return (np.ascontiguousarray(array),)
        return tuple(session.run(None, {_TENSOR: array}))

    def restore(self, array: Array) -> Array:
        """Return a tensor as the server gets it after decoding."""
        session = self._open("decode", array)
        if session is None:
            return array
        names = [value.name for value in session.get_inputs()]
        (restored,) = session.run(None, dict(zip(names, self.encode(array), strict=True)))
        return np.asarray(restored)

    def _open(self, half: Literal["encode", "decode"], array: Array) -> onnxruntime.InferenceSession | None:
        """Return the session that codes or decodes a tensor; None if it is sent as it is.

        Raises:
            CutError: onnxruntime refuses the nodes.
        """
        if array.ndim < 2 or array.dtype != np.float32:
            return None
        return _open_code(self.coding.kind, half, array.shape[1:])


@lru_cache(maxsize=_MAX_SESSIONS)
def _open_code(
    kind: str, half: Literal["encode", "decode"], sizes: tuple[int, ...]
) -> onnxruntime.InferenceSession | None:
    spec = TensorSpec(_TENSOR, "float32", ("N", *sizes))
    coded = code_tensor(spec, Coding(kind), _OPSET)
    if coded is None:
        return None
    restored = replace(spec, name=coded.restored)
    nodes, inputs, outputs = {
        "encode": (coded.encode, [spec], list(coded.sent)),
        "decode": (coded.decode, list(coded.sent), [restored]),
    }[half]
    return open_model(build_model([nodes], inputs, outputs))


def compressed_bytes(array: Array) -> int:
    """Return the size of a tensor on the link in bytes. zstd is used if it is installed and saves enough."""
    try:
        import zstandard
    except ImportError:
        return array.nbytes
    packed = len(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(np.ascontiguousarray(array).tobytes()))
    return packed if packed < COMPRESSION_PAYS * array.nbytes else array.nbytes
