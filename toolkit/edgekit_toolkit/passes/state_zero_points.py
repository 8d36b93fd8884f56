"""Add missing zero points of int8 codes that have a scale for each channel or block.

They are 0. On x86 without VNNI, onnxruntime's exact 8-bit products (`edgekit_runtime.sessions.ort_products`)
turn int8 codes into uint8, and add a zero point of the wrong shape to such codes without one.
"""

import numpy as np
import onnx
from onnx import TensorProto

from edgekit_toolkit.onnx_graph.index import GraphIndex, add_constant, copy_model
from edgekit_toolkit.onnx_graph.traversal import graphs


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` in which stored int8 codes have a zero point for each scale."""
    result = copy_model(model)
    for graph in graphs(result.graph):
        index = GraphIndex(graph)
        for node in graph.node:
            if node.op_type != "DequantizeLinear" or (len(node.input) > 2 and node.input[2]):
                continue
            codes, scale = (index.initializers.get(name) for name in node.input[:2])
            if codes is None or scale is None or codes.data_type != TensorProto.INT8 or not scale.dims:
                continue
            zeros = add_constant(index, f"{codes.name}_zero_point", np.zeros(tuple(scale.dims), np.int8))
            node.input[:] = [*node.input[:2], zeros]
    return result
