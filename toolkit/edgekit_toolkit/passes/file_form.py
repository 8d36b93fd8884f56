"""Converts the inputs, zero points and operator set of a model to the form that later passes need."""

from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, version_converter

from edgekit_toolkit.onnx_graph.index import GraphIndex, add_constant, copy_model, opset, set_items
from edgekit_toolkit.onnx_graph.specs import real_inputs
from edgekit_toolkit.onnx_graph.traversal import graphs

TARGET_OPSET: Final = 17
IR_VERSION: Final = 8  # of opset 17. Every onnxruntime that we support reads it


def separate_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` in IR 8 or later whose initializers are not inputs.

    Before IR 4 every initializer had to be an input. Since then, an initializer that is an input is a default
    that a caller may override, so engines do not optimise it.
    """
    result = copy_model(model)
    set_items(result.graph.input, real_inputs(result.graph))
    result.ir_version = max(result.ir_version, IR_VERSION)
    return result


def state_zero_points(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with explicit zero points of 0 for int8 weights quantized per channel.

    onnxruntime converts int8 weights to uint8 on x86 processors without VNNI, and then creates missing zero
    points with the wrong shape. See `edgekit_runtime.sessions.ort_products`.
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
    """Return a copy of `model` with operator set 17, or with its own operator set if that is later.

    Raises:
        Exception: The converter does not support an operator. Its exceptions have no common base class.
    """
    if opset(model) >= TARGET_OPSET:
        return copy_model(model)
    return version_converter.convert_version(model, TARGET_OPSET)
