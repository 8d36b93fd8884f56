"""Convolutions that are one matrix product for each pixel: 1x1, one group, no padding."""

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute


def is_pointwise(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Whether a node is such a convolution, with constant float32 weights and bias (if any)."""
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
    """Weights [out, in] and bias [out], or None, of a pointwise convolution."""
    weight = np.asarray(index.constant(node.input[1]), np.float64)[:, :, 0, 0]
    has_bias = len(node.input) > 2 and node.input[2] != ""
    return weight, np.asarray(index.constant(node.input[2]), np.float64) if has_bias else None
