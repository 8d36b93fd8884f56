"""Moves the weights of a LiteRT model closer to those of its earlier version, see `near_version`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.quantize.litert.prepare import share_buffers
from edgekit_toolkit.quantize.near_version import WeightCodes, near_bias, near_floats, near_weight
from edgekit_toolkit.tflite.flatbuffer import (
    Model,
    SubGraph,
    Tensor,
    add_buffer,
    constant,
    pack,
    parse,
    parsed,
    shape_of,
)

_LEAST_FLOATS = 8


def bring_near(content: bytes, earlier: bytes) -> bytes:
    """Return the `.tflite` model `content` with weights closer to those of `earlier`.

    Args:
        content: The `.tflite` model of the new version.
        earlier: The model of the earlier version in the same form. Tensors and sub-graphs that do not match
            are skipped.
    """
    model, before = parse(content), parsed(earlier)
    for graph, was in zip(model.subgraphs, before.subgraphs, strict=False):
        if len(graph.tensors) == len(was.tensors):
            _TflitePair(model, graph, before, was).bring_near()
    share_buffers(model)
    return pack(model)


class _TflitePair:
    """A graph to change, and the earlier one; tensors are identified by their places."""

    def __init__(self, model: Model, graph: SubGraph, before: Model, was: SubGraph) -> None:
        self._model, self._graph, self._before, self._was = model, graph, before, was
        self._settled: set[int] = set()

    def bring_near(self) -> None:
        for operator in self._graph.operators:
            indices = [int(index) for index in operator.inputs if index >= 0]
            for index in indices:
                pair = self._coded(index, np.int8)
                if pair is None:
                    continue
                new, earlier = pair
                coded, step = near_weight(new, earlier)
                self._store(index, coded)
                for other in indices:
                    if (bias := self._coded(other, np.int32)) is not None:
                        self._store(other, near_bias(*bias, (coded, new, earlier), step))
        for index, tensor in enumerate(self._graph.tensors):
            self._bring_floats(index, tensor)

    def _coded(self, index: int, dtype: type[np.integer[Any]]) -> tuple[WeightCodes, WeightCodes] | None:
        """Return the codes of a constant, and those of its earlier version; None if they are settled."""
        values, scales = self._read(index), []
        tensors = self._graph.tensors[index], self._was.tensors[index]
        if values is None or index in self._settled or values[0].dtype != dtype:
            return None
        for tensor in tensors:
            quantization = tensor.quantization
            if (
                quantization is None
                or quantization.scale is None
                or not len(quantization.scale)
                or np.any(quantization.zeroPoint)
            ):
                return None
            scales.append(np.asarray(quantization.scale, np.float32))
        axis = int(tensors[0].quantization.quantizedDimension)
        new, earlier = (
            WeightCodes(codes, scale if len(scale) > 1 else scale.reshape(()), axis)
            for codes, scale in zip(values, scales, strict=True)
        )
        return (new, earlier) if new.is_like(earlier) else None

    def _read(self, index: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
        new, earlier = self._graph.tensors[index], self._was.tensors[index]
        if new.type != earlier.type or shape_of(new) != shape_of(earlier):
            return None
        now, was = constant(self._model, new), constant(self._before, earlier)
        return None if now is None or was is None else (now, was)

    def _store(self, index: int, coded: WeightCodes) -> None:
        tensor = self._graph.tensors[index]
        tensor.quantization.scale = np.atleast_1d(coded.scales)
        tensor.buffer = add_buffer(self._model, coded.codes)  # equal ones are shared again at the end
        self._settled.add(index)

    def _bring_floats(self, index: int, tensor: Tensor) -> None:
        values = self._read(index)
        if (
            values is not None
            and values[0].dtype in (np.float16, np.float32)
            and values[0].size >= _LEAST_FLOATS
        ):
            tensor.buffer = add_buffer(self._model, near_floats(*values))
