"""Replaces a transposed convolution whose kernel size equals its stride by a 1x1 Conv and DepthToSpace.

In such a convolution, each input pixel produces a separate block of kernel x kernel output pixels. This
equals a 1x1 convolution with channels x kernel x kernel output channels, followed by a reordering. The
engines have fast int8 kernels for 1x1 convolutions, but none for transposed convolutions.

Source: W. Shi et al., Is the deconvolution layer the same as a convolutional layer?, 2016.
"""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    add_constant,
    attribute,
    fresh_name,
    opset,
    replace_nodes,
    rewrite_all,
)

# The first operator set with DepthToSpace's CRD mode, the order of channels in the weights.
_MIN_OPSET = 11


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with 1x1 convolutions instead of transposed convolutions without overlap."""
    return rewrite_all(model, _rewrite_one) if opset(model) >= _MIN_OPSET else model


def _rewrite_one(graph: onnx.GraphProto) -> bool:
    index = GraphIndex(graph)
    for node in graph.node:
        weight = index.constant(node.input[1]) if node.op_type == "ConvTranspose" else None
        block = None if weight is None else _block(index, node, weight)
        if weight is None or block is None:
            continue
        ins, outs = weight.shape[:2]
        # DepthToSpace in CRD mode reads channel c * block * block + row * block + column.
        pointwise = weight.transpose(1, 2, 3, 0).reshape(outs * block * block, ins, 1, 1)
        inputs = [
            node.input[0],
            add_constant(index, f"{node.input[1]}_pointwise", np.ascontiguousarray(pointwise)),
        ]
        if len(node.input) > 2 and node.input[2]:
            bias = np.repeat(np.asarray(index.constant(node.input[2])), block * block)
            inputs.append(add_constant(index, f"{node.input[2]}_repeated", bias))
        deep = fresh_name(index, f"{node.output[0]}_deep")
        conv = helper.make_node("Conv", inputs, [deep], name=node.name, kernel_shape=[1, 1])
        space = helper.make_node(
            "DepthToSpace",
            [deep],
            [node.output[0]],
            name=node.name and f"{node.name}_space",
            blocksize=block,
            mode="CRD",
        )
        replace_nodes(graph, [node], [conv, space])
        return True
    return False


def _block(index: GraphIndex, node: onnx.NodeProto, weight: NDArray[Any]) -> int | None:
    """The block size where a transposed convolution does not overlap, else None."""
    has_bias = len(node.input) > 2 and node.input[2] != ""
    if weight.dtype != np.float32 or weight.ndim != 4:
        return None
    if attribute(node, "group", 1) != 1 or (has_bias and index.constant(node.input[2]) is None):
        return None
    block: int = weight.shape[2]
    plain = (
        weight.shape[3] == block
        and list(attribute(node, "strides", [])) == [block, block]
        and not any(attribute(node, "pads", []))
        and not any(attribute(node, "output_padding", []))
        and all(value == 1 for value in attribute(node, "dilations", []))
        and attribute(node, "auto_pad", b"NOTSET") in {b"NOTSET", b"VALID"}
        and attribute(node, "output_shape") is None
    )
    return block if plain and block > 1 else None
