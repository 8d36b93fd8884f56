"""Moves the weights of an ONNX model closer to those of its earlier version, see `near_version`."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute, copy_model
from edgekit_toolkit.quantize.near_version import WeightCodes, near_bias, near_floats, near_weight

_LEAST_FLOATS = 8


def bring_near(model: onnx.ModelProto, earlier: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with weights closer to those of `earlier`.

    Args:
        model: The new version, with its final tensor names.
        earlier: The earlier version in the same form. Weights are matched by name and shape.
    """
    result = copy_model(model)
    _GraphPair(result.graph, earlier.graph).bring_near()
    return result


class _GraphPair:
    def __init__(self, graph: onnx.GraphProto, earlier: onnx.GraphProto) -> None:
        self._graph, self._index = graph, GraphIndex(graph)
        self._earlier = {tensor.name: tensor for tensor in earlier.initializer}
        # Scales and zero points are decided with their codes.
        self._settled = {name for node in graph.node if "Quantize" in node.op_type for name in node.input[1:]}

    def bring_near(self) -> None:
        for node in self._graph.node:
            pair = self._coded(node)
            if pair is None or pair[0].codes.dtype != np.int8 or node.input[0] in self._settled:
                continue
            new, earlier = pair
            coded, step = near_weight(new, earlier)
            self._store(node, coded)
            for reader in self._index.consumers(node.output[0]):
                self._bring_bias(reader, (coded, new, earlier), step)
        for tensor in self._graph.initializer:
            if tensor.name not in self._settled:
                self._bring_floats(tensor)

    def _bring_bias(
        self,
        layer: onnx.NodeProto,
        weights: tuple[WeightCodes, WeightCodes, WeightCodes],
        step: int,
    ) -> None:
        source = self._index.producers.get(layer.input[2]) if len(layer.input) > 2 else None
        pair = None if source is None else self._coded(source)
        if source is None or pair is None or pair[0].codes.dtype != np.int32:
            return
        if source.input[0] not in self._settled:
            self._store(source, near_bias(*pair, weights, step))

    def _bring_floats(self, tensor: onnx.TensorProto) -> None:
        coded = self._read(tensor.name)
        if coded is None:
            return
        new, earlier = coded
        if new.dtype in (np.float16, np.float32) and new.size >= _LEAST_FLOATS and new.shape == earlier.shape:
            _write(tensor, near_floats(new, earlier))

    def _coded(self, node: onnx.NodeProto) -> tuple[WeightCodes, WeightCodes] | None:
        """Return a constant that a node dequantizes, and its earlier version."""
        if node.op_type != "DequantizeLinear":
            return None
        codes, scales = self._read(node.input[0]), self._read(node.input[1])
        if codes is None or scales is None:
            return None
        axis = int(attribute(node, "axis", 1))
        new, earlier = (WeightCodes(codes[version], scales[version], axis) for version in (0, 1))
        is_known = new.is_like(earlier) and new.codes.dtype == earlier.codes.dtype
        return (new, earlier) if is_known and new.scales.ndim < 2 else None

    def _read(self, name: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        new, earlier = self._index.initializers.get(name), self._earlier.get(name)
        if new is None or earlier is None or new.data_type != earlier.data_type:
            return None
        return numpy_helper.to_array(new), numpy_helper.to_array(earlier)

    def _store(self, node: onnx.NodeProto, coded: WeightCodes) -> None:
        for name, value in zip(node.input, (coded.codes, coded.scales), strict=False):
            _write(self._index.initializers[name], np.asarray(value))
            self._settled.add(name)


def _write(tensor: onnx.TensorProto, values: NDArray[Any]) -> None:
    """Write values into the tensor's present field, so that nothing moves in the file."""
    stored = numpy_helper.from_array(values, tensor.name)
    if tensor.HasField("raw_data"):
        tensor.raw_data = stored.raw_data
    else:
        tensor.CopyFrom(stored)
