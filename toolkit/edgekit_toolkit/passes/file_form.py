"""The form of a file that later passes and engines read: weights, zero points, operator set."""

from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, version_converter

from edgekit_toolkit.onnx_graph.index import GraphIndex, add_constant, copy_model, opset, set_items
from edgekit_toolkit.onnx_graph.specs import real_inputs
from edgekit_toolkit.onnx_graph.traversal import graphs

TARGET_OPSET: Final = 17
IR_VERSION: Final = 8  # of opset 17; every onnxruntime that we support reads it


def separate_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` in IR 8 or later whose only inputs are those that a caller must pass.

    Before IR 4 every initializer had to be an input too. Since then an initializer that is also an input is a
    default that a caller may replace, and passes and engines optimise only weights that nobody can replace.
    """
    result = copy_model(model)
    set_items(result.graph.input, real_inputs(result.graph))
    result.ir_version = max(result.ir_version, IR_VERSION)
    return result


def state_zero_points(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` in which stored int8 codes per channel state their zero points, all 0.

    On x86 without VNNI, onnxruntime's exact 8-bit products (`edgekit_runtime.sessions.ort_products`) turn
    int8 codes into uint8, and add a zero point of the wrong shape to codes that state none.
    """
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


def convert_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` raised to operator set 17, for quantization per channel.

    A model of a later operator set keeps it: engines read all of them, and conversion downwards loses
    operators.

    Raises:
        Exception: the converter does not support an operator; its exceptions have no common base.
    """
    if opset(model) >= TARGET_OPSET:
        return copy_model(model)
    return version_converter.convert_version(model, TARGET_OPSET)
