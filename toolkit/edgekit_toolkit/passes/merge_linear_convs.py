"""Merges two consecutive 1x1 convolutions into one, if that needs fewer weights.

The product of two linear maps is one linear map: W2 (W1 x + b1) + b2 = (W2 W1) x + (W2 b1 + b2). A
bottleneck, which has few channels between the convolutions, is not merged, because W2 W1 would be larger.
"""

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    add_constant,
    attribute,
    replace_nodes,
    rewrite_all,
)


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with consecutive 1x1 convolutions merged where that saves weights."""
    return rewrite_all(model, _merge_one)


def _merge_one(graph: onnx.GraphProto) -> bool:
    index = GraphIndex(graph)
    for second in graph.node:
        first = index.producers.get(second.input[0]) if second.input else None
        if first is None or not is_pointwise(index, first) or not is_pointwise(index, second):
            continue
        if not index.only_feeds(first.output[0], second):
            continue
        w1, b1 = matrix(index, first)
        w2, b2 = matrix(index, second)
        if w1.size + w2.size <= w1.shape[1] * w2.shape[0]:
            continue
        weight = add_constant(
            index, f"{second.input[1]}_merged", (w2 @ w1)[:, :, None, None].astype(np.float32)
        )
        inputs = [first.input[0], weight]
        if b1 is not None or b2 is not None:
            bias = (0 if b1 is None else w2 @ b1) + (0 if b2 is None else b2)
            inputs.append(add_constant(index, f"{second.input[1]}_merged_bias", np.asarray(bias, np.float32)))
        second.input[:] = inputs
        replace_nodes(graph, [first], [])
        return True
    return False


def is_pointwise(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Return whether a node is an ungrouped, unpadded 1x1 Conv with stride 1 and constant float32 weights."""
    if (
        node.op_type != "Conv"
        or attribute(node, "group", 1) != 1
        or attribute(node, "auto_pad", b"NOTSET") != b"NOTSET"
    ):
        return False
    if any(value != 1 for value in attribute(node, "strides", [])) or any(attribute(node, "pads", [])):
        return False
    values = [index.constant(name) for name in node.input[1:] if name]
    return all(v is not None and v.dtype == np.float32 for v in values) and values[0].shape[2:] == (1, 1)  # type: ignore[union-attr]


def matrix(index: GraphIndex, node: onnx.NodeProto) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Return the weights [out, in] and the bias [out] of a 1x1 convolution. A missing bias is None."""
    weight = np.asarray(index.constant(node.input[1]), np.float64)[:, :, 0, 0]
    has_bias = len(node.input) > 2 and node.input[2] != ""
    return weight, np.asarray(index.constant(node.input[2]), np.float64) if has_bias else None
