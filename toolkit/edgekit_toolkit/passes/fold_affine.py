"""Folds multiplications and additions of constants into the convolution before or after them.

Exporters often emit `Mul`, `Add`, `Div`, `Sub` and `BatchNormalization` with constants around convolutions.
For example, PP-OCR has two such operators after each activation. Each operator reads and writes the whole
tensor, and after quantization it takes as long as the convolution. onnxruntime only folds a
BatchNormalization after a `Conv`.

An addition is not folded into a later convolution with padding, because the constant would be missing in the
padding.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    Shape,
    add_constant,
    attribute,
    inferred_shapes,
    replace_nodes,
    rewrite_all,
)

Float = NDArray[np.float64]


class Affine(NamedTuple):
    """A node that computes `scale * source + shift`.

    Attributes:
        scale, shift: float64 constants of shape [] or [channels].
        operand: The shape of the constant in the graph, or () for a BatchNormalization.
    """

    source: str
    scale: Float
    shift: Float
    operand: tuple[int, ...]


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with constant scales and shifts folded into the weights of convolutions."""
    # They hold to the end: a fold keeps the shape of every tensor that stays.
    shapes = inferred_shapes(model)
    return rewrite_all(model, lambda graph: _fold_one(graph, shapes))


def _fold_one(graph: onnx.GraphProto, shapes: Mapping[str, Shape]) -> bool:
    index = GraphIndex(graph, shapes)
    for node in graph.node:
        affine = as_affine(index, node)
        if affine is None:
            continue
        if (
            _fold_backward(index, node, affine)
            or _fold_forward(index, node, affine)
            or _swap(index, node, affine)
        ):
            return True
    return False


def as_affine(index: GraphIndex, node: onnx.NodeProto) -> Affine | None:
    """Return the scale and shift of a node, or None if it does not scale or shift by a constant."""
    if node.op_type == "BatchNormalization" and len(node.output) == 1:
        return _batch_normalization(index, node)
    if node.op_type not in {"Mul", "Div", "Add", "Sub"} or len(node.input) != 2:
        return None
    values = [index.constant(name) for name in node.input]
    if (values[0] is None) == (values[1] is None):
        return None
    at = 0 if values[0] is not None else 1
    if at == 0 and node.op_type in {"Div", "Sub"}:
        return None
    operand = values[at]
    constant = _per_channel(operand)
    if operand is None or constant is None or (node.op_type == "Div" and not constant.all()):
        return None
    scale, shift = np.ones(()), np.zeros(())
    if node.op_type in {"Mul", "Div"}:
        scale = constant if node.op_type == "Mul" else 1 / constant
    else:
        shift = constant if node.op_type == "Add" else -constant
    return Affine(node.input[1 - at], np.asarray(scale), np.asarray(shift), operand.shape)


def keeps_shape(index: GraphIndex, affine: Affine) -> bool:
    """Return whether the output has the shape of the source. Broadcasting a constant can add axes."""
    if not affine.operand:
        return True
    shape = index.shapes.get(affine.source)
    if shape is None or len(affine.operand) > len(shape):
        return False
    aligned = zip(reversed(affine.operand), reversed(shape), strict=False)
    return all(size in {1, channels} for size, channels in aligned)


def _batch_normalization(index: GraphIndex, node: onnx.NodeProto) -> Affine | None:
    parameters = [index.constant(name) for name in node.input[1:5]]
    if any(value is None for value in parameters):
        return None
    gamma, beta, mean, variance = (np.asarray(value, np.float64) for value in parameters)
    scale = gamma / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
    return Affine(node.input[0], scale, beta - mean * scale, ())


def _per_channel(value: NDArray[Any] | None) -> Float | None:
    """The constant as float64 [] or [channels] of an N-C-H-W tensor; None for any other shape or dtype."""
    if value is None or value.dtype != np.float32 or not np.isfinite(value).all():
        return None
    if value.size == 1 and value.ndim <= 4:
        return np.asarray(value.reshape(()), np.float64)
    if value.ndim in {3, 4} and value.shape[-2:] == (1, 1) and (value.ndim == 3 or value.shape[0] == 1):
        return np.asarray(value.reshape(-1), np.float64)
    return None


class _Weights(NamedTuple):
    weight: Float
    bias: Float | None
    out_axis: int
    channels: int


def _weights(index: GraphIndex, node: onnx.NodeProto) -> _Weights | None:
    """Return weights that only one convolution reads, or None if they cannot be rewritten."""
    group = attribute(node, "group", 1)
    if node.op_type not in {"Conv", "ConvTranspose"} or (node.op_type == "ConvTranspose" and group != 1):
        return None
    names = list(node.input[1:3])
    if not all(index.only_feeds(name, node) for name in names if name):
        return None
    weight = index.constant(names[0])
    bias = index.constant(names[1]) if len(names) > 1 and names[1] else None
    if (
        weight is None
        or weight.dtype != np.float32
        or weight.ndim != 4
        or (bias is None and len(names) > 1 and names[1])
    ):
        return None
    axis = 0 if node.op_type == "Conv" else 1
    return _Weights(
        weight.astype(np.float64), None if bias is None else bias.astype(np.float64), axis, weight.shape[axis]
    )


def _set_weights(index: GraphIndex, node: onnx.NodeProto, weight: Float, bias: Float | None) -> None:
    stem = node.input[1]
    names = [add_constant(index, stem, weight.astype(np.float32))]
    if bias is not None:
        names.append(add_constant(index, f"{stem}_bias", bias.astype(np.float32)))
    node.input[1:] = names


def _fold_backward(index: GraphIndex, node: onnx.NodeProto, affine: Affine) -> bool:
    """Turn conv -> affine into conv."""
    conv = index.producers.get(affine.source)
    if conv is None or not index.only_feeds(affine.source, node):
        return False
    folded = _weights(index, conv)
    if folded is None or not _fits(affine, folded.channels):
        return False
    scale = np.broadcast_to(affine.scale, (folded.channels,))
    along = [1] * folded.weight.ndim
    along[folded.out_axis] = -1
    bias = np.zeros(folded.channels) if folded.bias is None else folded.bias
    keep_none = folded.bias is None and not affine.shift.any()
    _set_weights(
        index, conv, folded.weight * scale.reshape(along), None if keep_none else bias * scale + affine.shift
    )
    conv.output[0] = node.output[0]
    # The convolution moves to the place of the node, whose other readers come later anyway.
    replace_nodes(index.graph, [conv, node], [conv])
    return True


def _fold_forward(index: GraphIndex, node: onnx.NodeProto, affine: Affine) -> bool:
    """Turn affine -> convs into convs."""
    convs = index.consumers(node.output[0])
    if not convs or node.output[0] in index.outputs or not keeps_shape(index, affine):
        return False
    folds = []
    for conv in convs:
        weights = _weights(index, conv) if conv.input[0] == node.output[0] else None
        if weights is None or conv.op_type != "Conv" or (affine.shift.any() and _pads(conv)):
            return False
        if not _fits(affine, weights.weight.shape[1] * attribute(conv, "group", 1)):
            return False
        folds.append((conv, weights))
    for conv, weights in folds:
        _scale_inputs(index, conv, weights, affine)
        conv.input[0] = affine.source
    replace_nodes(index.graph, [node], [])
    return True


def _scale_inputs(index: GraphIndex, conv: onnx.NodeProto, weights: _Weights, affine: Affine) -> None:
    group = attribute(conv, "group", 1)
    outs, per_group = weights.weight.shape[:2]
    # Input channel of weight[o, i]: the group of o, then i.
    channel = (np.arange(outs) // (outs // group))[:, None] * per_group + np.arange(per_group)
    everywhere = (per_group * group,)
    scale = np.broadcast_to(affine.scale, everywhere)[channel][:, :, None, None]
    shift = np.broadcast_to(affine.shift, everywhere)[channel][:, :, None, None]
    bias = weights.bias
    if affine.shift.any():
        added = (weights.weight * shift).sum(axis=(1, 2, 3))
        bias = added if bias is None else bias + added
    _set_weights(index, conv, weights.weight * scale, bias)


def _swap(index: GraphIndex, node: onnx.NodeProto, affine: Affine) -> bool:
    """Turn mul -> add -> padded convs into add -> mul -> convs, so that the scaling can fold forward."""
    if affine.shift.any() or affine.scale.ndim or not affine.scale or node.output[0] in index.outputs:
        return False
    readers = index.consumers(node.output[0])
    if len(readers) != 1 or readers[0].op_type not in {"Add", "Sub"}:
        return False
    shift_node = readers[0]
    shift = as_affine(index, shift_node)
    convs = index.consumers(shift_node.output[0])
    if (
        shift is None
        or not (keeps_shape(index, affine) and keeps_shape(index, shift))
        or not convs
        or any(conv.op_type != "Conv" or conv.input[0] != shift_node.output[0] for conv in convs)
    ):
        return False
    if any(_weights(index, conv) is None for conv in convs) or shift_node.output[0] in index.outputs:
        return False
    constant = (shift.shift / affine.scale).astype(np.float32)
    if constant.ndim:
        constant = constant.reshape(1, -1, 1, 1)
    name = add_constant(index, f"{node.output[0]}_shift", constant)
    scale = add_constant(index, f"{node.output[0]}_scale", np.asarray(affine.scale, np.float32))
    add = helper.make_node("Add", [affine.source, name], [node.output[0]], name=shift_node.name)
    mul = helper.make_node("Mul", [node.output[0], scale], [shift_node.output[0]], name=node.name)
    replace_nodes(index.graph, [node, shift_node], [add, mul])
    return True


def _fits(affine: Affine, channels: int) -> bool:
    return all(value.ndim == 0 or value.shape == (channels,) for value in (affine.scale, affine.shift))


def _pads(conv: onnx.NodeProto) -> bool:
    automatic = attribute(conv, "auto_pad", b"NOTSET")
    return automatic not in {b"NOTSET", b"VALID"} or any(attribute(conv, "pads", []))
