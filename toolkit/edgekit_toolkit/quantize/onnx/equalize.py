"""Equalizes the channels of activations between linear layers, so that one scale suits all channels.

After a depthwise convolution, the ranges of channels can differ by a factor of 100. If all operators between
a convolution and its consumers are homogeneous (f(s x) = s f(x) for s > 0), channel c can be divided by s[c]
in the weights of the convolution and multiplied by s[c] in the weights of its consumers. The results are
equal, and the tensors can be quantized better.

Source: M. Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, 2019, section
4.1. The factor balances the ranges of activations and weights as in G. Xiao et al., SmoothQuant, 2023,
equation 4.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    add_constant,
    attribute,
    copy_model,
    remove_unused_initializers,
)
from edgekit_toolkit.quantize.ranges import Range

_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize"})
# A factor beyond this comes from a channel that is nearly dead. Its codes do not matter.
_MAX_FACTOR = 256.0


def find_factors(model: onnx.ModelProto, ranges: Mapping[str, Range]) -> dict[str, NDArray[np.float32]]:
    """Return a dict from convolution outputs to the float32 divisors of their channels, of shape [channels].

    An output is included only if its consumers can undo the division. `ranges` contains the range of each
    channel. Outputs without ranges are not changed.
    """
    index = GraphIndex(model.graph)
    factors = {}
    for node in model.graph.node:
        if node.op_type != "Conv" or node.output[0] not in ranges or not _has_own_weights(index, node):
            continue
        tensors: list[str] = []
        readers = _readers(index, node.output[0], tensors)
        if readers:
            balance = _balance(index, node, readers, ranges[node.output[0]])
            if balance is not None:
                factors[node.output[0]] = balance
    return factors


def apply_factors(model: onnx.ModelProto, factors: Mapping[str, NDArray[np.float32]]) -> onnx.ModelProto:
    """Return an equivalent model with convolution outputs divided by `factors`. The consumers undo this.

    Raises:
        KeyError: A tensor in `factors` is not the output of a node of `model`.
        ValueError: The consumers cannot undo the factors, or the number of channels differs.
    """
    result = copy_model(model)
    index = GraphIndex(result.graph)
    # Found before any weight is replaced, and in the order of the graph: rounding must not depend on the
    # order of `factors`, which a recipe sorts.
    positions = {
        name: position for position, node in enumerate(result.graph.node) for name in node.output[:1]
    }
    pairs = [
        (index.producers[name], _checked_readers(index, name, factors[name]), factors[name])
        for name in sorted(factors, key=lambda name: positions[name])
    ]
    for conv, readers, factor in pairs:
        _scale_outputs(index, conv, 1 / factor.astype(np.float64))
        for reader in readers:
            _scale_inputs(index, reader, factor.astype(np.float64))
    remove_unused_initializers(result.graph)
    return result


def _checked_readers(index: GraphIndex, name: str, factor: NDArray[np.float32]) -> Sequence[onnx.NodeProto]:
    conv = index.producers[name]
    fits = conv.op_type == "Conv" and _has_own_weights(index, conv)
    readers = _readers(index, name, []) if fits else None
    channels = {_input_channels(index, reader) for reader in readers or []}
    if not readers or channels | {_weight(index, conv).shape[0]} != {factor.size}:
        raise ValueError(f"tensor {name!r} cannot be equalized by {factor.size} factors")
    return readers


def apply_to_ranges(
    model: onnx.ModelProto, ranges: Mapping[str, Range], factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Range]:
    """Return the ranges of the activations after equalization by `factors`."""
    index = GraphIndex(model.graph)
    scaled = dict(ranges)
    for name, factor in factors.items():
        tensors: list[str] = []
        _readers(index, name, tensors)
        for tensor in tensors:
            if tensor in scaled and scaled[tensor].low.shape == factor.shape:
                scaled[tensor] = Range(scaled[tensor].low / factor, scaled[tensor].high / factor)
    return scaled


def _balance(
    index: GraphIndex, conv: onnx.NodeProto, readers: Sequence[onnx.NodeProto], activation: Range
) -> NDArray[np.float32] | None:
    span = np.maximum(activation.high, 0) - np.minimum(activation.low, 0)
    channels = _weight(index, conv).shape[0]
    if span.shape != (channels,) or any(_input_channels(index, reader) != channels for reader in readers):
        return None
    weight_span = np.max([_input_span(index, reader) for reader in readers], axis=0)
    live = (span > 0) & (weight_span > 0)
    if not live.any():
        return None
    factor = np.ones(channels)
    factor[live] = np.sqrt(span[live] / weight_span[live])
    factor[live] /= np.exp(np.log(factor[live]).mean())
    return np.clip(factor, 1 / _MAX_FACTOR, _MAX_FACTOR).astype(np.float32)


def _readers(index: GraphIndex, name: str, tensors: list[str]) -> list[onnx.NodeProto] | None:
    """Convolutions that read tensor `name` through homogeneous operators; None if anything else does.

    The names of the tensors on the way are added to `tensors`.
    """
    if name in index.outputs:
        return None
    tensors.append(name)
    readers: list[onnx.NodeProto] = []
    for node in index.consumers(name):
        if node.op_type == "Conv" and node.input[0] == name and _has_own_weights(index, node):
            readers.append(node)
            continue
        product = node.op_type == "Mul" and node.input[0] != node.input[1]
        if not product and not (node.op_type in _HOMOGENEOUS and node.input[0] == name):
            return None
        further = _readers(index, node.output[0], tensors)
        if further is None:
            return None
        readers.extend(further)
    return readers


def _has_own_weights(index: GraphIndex, conv: onnx.NodeProto) -> bool:
    names = [name for name in conv.input[1:] if name]
    return all(index.constant(name) is not None and index.only_feeds(name, conv) for name in names)


def _weight(index: GraphIndex, conv: onnx.NodeProto) -> NDArray[np.float64]:
    return np.asarray(index.constant(conv.input[1]), np.float64)


def _input_channels(index: GraphIndex, conv: onnx.NodeProto) -> int:
    return int(_weight(index, conv).shape[1] * attribute(conv, "group", 1))


def _channel(weight: NDArray[np.float64], group: int) -> NDArray[np.int64]:
    """Input channel of weight[o, i], int64 [outs, ins a group]."""
    outs, per_group = weight.shape[:2]
    channel: NDArray[np.int64] = (np.arange(outs) // (outs // group))[:, None] * per_group + np.arange(
        per_group
    )
    return channel


def _input_span(index: GraphIndex, conv: onnx.NodeProto) -> NDArray[np.float64]:
    """Largest weight that reads each input channel, float64 [channels]."""
    weight = _weight(index, conv)
    peaks = np.abs(weight).reshape(*weight.shape[:2], -1).max(axis=2)
    span = np.zeros(_input_channels(index, conv))
    np.maximum.at(span, _channel(weight, attribute(conv, "group", 1)), peaks)
    return span


def _scale_outputs(index: GraphIndex, conv: onnx.NodeProto, factor: NDArray[np.float64]) -> None:
    weight = _weight(index, conv) * factor.reshape(-1, *[1] * (_weight(index, conv).ndim - 1))
    bias = index.constant(conv.input[2]) if len(conv.input) > 2 and conv.input[2] else None
    _replace(index, conv, weight, None if bias is None else bias * factor)


def _scale_inputs(index: GraphIndex, conv: onnx.NodeProto, factor: NDArray[np.float64]) -> None:
    weight = _weight(index, conv)
    scale = factor[_channel(weight, attribute(conv, "group", 1))]
    _replace(index, conv, weight * scale.reshape(*scale.shape, *[1] * (weight.ndim - 2)), None)


def _replace(
    index: GraphIndex, conv: onnx.NodeProto, weight: NDArray[np.float64], bias: NDArray[np.float64] | None
) -> None:
    conv.input[1] = add_constant(index, f"{conv.input[1]}_eq", weight.astype(np.float32))
    if bias is not None:
        conv.input[2] = add_constant(index, f"{conv.input[2]}_eq", bias.astype(np.float32))
