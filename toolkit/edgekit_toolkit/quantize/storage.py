"""Smaller weights for layers that compute in float: half precision, int8, or blocks of int4.

Arithmetic stays float32. Half-precision weights are widened once, when the engine loads the model.
"""

from typing import Final

import numpy as np
import onnx
import onnx.version_converter
from onnx import TensorProto, helper, numpy_helper

from edgekit_toolkit.graph import GraphIndex, attribute, opset, remove_unused_initializers
from edgekit_toolkit.quantize.plan import COMPUTE, weight_axis
from edgekit_toolkit.quantize.scheme import quantize_weight

# Smaller constants cost more in a Cast node than they save.
_MIN_ELEMENTS: Final = 128
_MIN_INT4_ELEMENTS: Final = 4096
_BLOCK: Final = 32
_OPSET_INT4: Final = 21
_IR_INT4: Final = 10
# Inputs that are weights: position of the first one. Others (sizes, limits of a Clip) must stay constants.
_WEIGHTS_FROM: Final = {
    "Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 0, "Gather": 0, "Add": 0, "Mul": 0, "LSTM": 1, "GRU": 1,
    "RNN": 1, "PRelu": 1,
}  # fmt: skip


def half_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with its float32 weights stored as float16, where they are in its range."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    index = GraphIndex(graph)
    casts = []
    for tensor in list(graph.initializer):
        if not _can_halve(index, tensor):
            continue
        half = numpy_helper.to_array(tensor).astype(np.float16)
        stored = numpy_helper.from_array(half, f"{tensor.name}_half")
        casts.append(
            helper.make_node(
                "Cast", [stored.name], [tensor.name], name=f"{tensor.name}_widen", to=TensorProto.FLOAT
            )
        )
        graph.initializer.remove(tensor)
        graph.initializer.append(stored)
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def _can_halve(index: GraphIndex, tensor: onnx.TensorProto) -> bool:
    readers = index.consumers(tensor.name)
    if tensor.data_type != TensorProto.FLOAT or tensor.name in index.outputs or not readers:
        return False
    for node in readers:
        first = _WEIGHTS_FROM.get(node.op_type)
        if first is None or tensor.name not in list(node.input)[first:]:
            return False
    value = numpy_helper.to_array(tensor)
    return value.size >= _MIN_ELEMENTS and float(np.abs(value).max()) < float(np.finfo(np.float16).max)


def int8_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with the weights of its matrix products stored as int8, a scale a channel."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    index = GraphIndex(graph)
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()
    for node in list(graph.node):
        weight = index.constant(node.input[1]) if node.op_type in COMPUTE and len(node.input) > 1 else None
        plain = weight is not None and weight.dtype == np.float32 and weight.ndim >= 2
        # MatMul by a stack of matrices has no single axis of output channels.
        if (
            weight is None
            or not plain
            or weight.size < _MIN_ELEMENTS
            or (node.op_type == "MatMul" and weight.ndim != 2)
        ):
            nodes.append(node)
            continue
        axis, stem = weight_axis(node), f"{node.input[1]}_{weight_axis(node)}"
        if stem not in done:
            done.add(stem)
            codes, params = quantize_weight(weight, axis)
            values = {"codes": codes, "scale": params.scale, "zero_point": params.zero_point}
            graph.initializer.extend(numpy_helper.from_array(v, f"{stem}_{k}") for k, v in values.items())
            names = [f"{stem}_{key}" for key in values]
            nodes.append(
                helper.make_node("DequantizeLinear", names, [f"{stem}_dq"], name=f"{stem}_dq", axis=axis)
            )
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[1] = f"{stem}_dq"
        nodes.append(copy)
    del graph.node[:]
    graph.node.extend(nodes)
    remove_unused_initializers(graph)
    return result


def int4_weights(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return `model` with the weights of its large MatMuls and Gemms as int4, a scale for each 32 along the input.

    Written with the standard blocked DequantizeLinear of opset 21, which onnxruntime fuses into its own 4-bit
    kernel for MatMul.

    Returns:
        None where the model has no layer that this fits.
    """
    index = GraphIndex(model.graph)
    chosen = [node for node in model.graph.node if _fits_blocks(index, node)]
    if not chosen:
        return None
    try:
        result = onnx.version_converter.convert_version(model, max(opset(model), _OPSET_INT4))
    except Exception:  # the converter raises RuntimeError and others for what it does not know
        return None
    result.ir_version = max(result.ir_version, _IR_INT4)
    graph = result.graph
    index = GraphIndex(graph)
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()
    for node in list(graph.node):
        if _fits_blocks(index, node):
            transposed = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
            stem = f"{node.input[1]}_int4_{int(transposed)}"
            if stem not in done:
                done.add(stem)
                nodes.append(_blocked(index, node.input[1], stem, axis=1 if transposed else 0))
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[1] = f"{stem}_dq"
            nodes.append(copy)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    remove_unused_initializers(graph)
    return result


def _fits_blocks(index: GraphIndex, node: onnx.NodeProto) -> bool:
    weight = index.constant(node.input[1]) if node.op_type in {"MatMul", "Gemm"} else None
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or weight.size < _MIN_INT4_ELEMENTS:
        return False
    transposed = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
    return bool(weight.shape[1 if transposed else 0] % _BLOCK == 0)


def _blocked(index: GraphIndex, name: str, stem: str, axis: int) -> onnx.NodeProto:
    """Store weight `name` [K, N] (axis 0) or [N, K] (axis 1) as int4 codes and scales; returns their DQ node."""
    weight = np.asarray(index.constant(name), np.float64)
    rows = weight if axis == 1 else weight.T
    blocks = rows.reshape(rows.shape[0], -1, _BLOCK)
    scale = np.maximum(np.abs(blocks).max(axis=2) / 7, 1e-30).astype(np.float32)
    codes = np.clip(np.rint(blocks / scale[:, :, None].astype(np.float64)), -8, 7).astype(np.int8)
    flat = codes.reshape(rows.shape)
    flat, scale = (
        (flat, scale) if axis == 1 else (np.ascontiguousarray(flat.T), np.ascontiguousarray(scale.T))
    )
    nibbles = flat.reshape(-1).astype(np.uint8) & 0xF
    packed = nibbles[0::2] | (nibbles[1::2] << 4)  # an even number: whole blocks of 32
    tensor = onnx.TensorProto(
        name=f"{stem}_codes", data_type=TensorProto.INT4, dims=flat.shape, raw_data=packed.tobytes()
    )
    index.graph.initializer.extend([tensor, numpy_helper.from_array(scale, f"{stem}_scale")])
    inputs = [tensor.name, f"{stem}_scale"]
    return helper.make_node(
        "DequantizeLinear", inputs, [f"{stem}_dq"], name=f"{stem}_dq", axis=axis, block_size=_BLOCK
    )


def dynamic_int8(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return `model` with int8 matrix products whose input ranges are taken at run time; never convolutions.

    Returns:
        None where the model has no MatMul or LSTM for it.
    """
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode

    kinds = ["Gemm", "LSTM", "MatMul"]
    if not any(node.op_type in kinds for node in model.graph.node):
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    quantizer = ONNXQuantizer(
        copy, True, False, QuantizationMode.IntegerOps, False, QuantType.QInt8, QuantType.QUInt8, None, [], [], kinds,
        {"MatMulConstBOnly": True},
    )  # fmt: skip
    quantizer.quantize_model()
    result: onnx.ModelProto = quantizer.model.model
    integer = {"MatMulInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"}
    return result if any(node.op_type in integer for node in result.graph.node) else None
