"""Stores the weights of layers that compute in float as float16, int8 or blocks of int4.

The arithmetic remains float32. The engine converts float16 weights once when it loads the model.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import numpy as np
import onnx
import onnx.version_converter
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.onnx_graph.control_flow import captured
from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    add_constant,
    attribute,
    copy_model,
    copy_node,
    fresh_name,
    opset,
    remove_unused_initializers,
    set_items,
)
from edgekit_toolkit.onnx_graph.traversal import bodies, graphs
from edgekit_toolkit.quantize.onnx.emitter import Emitter
from edgekit_toolkit.quantize.plan import COMPUTE, weight_axis
from edgekit_toolkit.quantize.scheme import quantize_weight

# Smaller constants cost more in a Cast node than they save.
_MIN_ELEMENTS: Final = 128
_MIN_INT4_ELEMENTS: Final = 4096
_HALF_ROUNDING: Final = 2.0**-11
_BLOCK: Final = 32
OPSET_INT8: Final = 13
_OPSET_INT4: Final = 21
_IR_INT4: Final = 10
# Inputs that are weights: position of the first one. Others (sizes, limits of a Clip) must stay constants.
_WEIGHTS_FROM: Final = {
    "Conv": 1,
    "ConvTranspose": 1,
    "Gemm": 1,
    "MatMul": 0,
    "Gather": 0,
    "Add": 0,
    "Mul": 0,
    "LSTM": 1,
    "GRU": 1,
    "RNN": 1,
    "PRelu": 1,
    "Concat": 0,
    "Div": 0,
    "Expand": 0,
    "Reshape": 0,
    "Slice": 0,
    "Sub": 0,
    "Tile": 0,
    "Transpose": 0,
    "Unsqueeze": 0,
}


def half_weights(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return `model` with float32 weights stored as float16, or None if it has no weights that fit.

    Weights inside control flow are included, and so are outer weights that its sub-graphs read.
    """
    result = copy_model(model)
    names = GraphIndex(result.graph)
    # Inner graphs first: rewriting a graph copies the nodes that hold them.
    halved = [_halve(graph, names) for graph in reversed(list(graphs(result.graph)))]
    return result if any(halved) else None


def _halve(graph: onnx.GraphProto, names: GraphIndex) -> bool:
    """Store the weights of one graph as float16, in place; False if it has none."""
    index = GraphIndex(graph)
    casts, tensors = [], []
    for tensor in graph.initializer:
        if not _can_halve(index, tensor):
            tensors.append(tensor)
            continue
        half = numpy_helper.to_array(tensor).astype(np.float16)
        tensors.append(numpy_helper.from_array(half, fresh_name(names, f"{tensor.name}_half")))
        casts.append(
            helper.make_node(
                "Cast", [tensors[-1].name], [tensor.name], name=f"{tensor.name}_widen", to=TensorProto.FLOAT
            )
        )
    if not casts:
        return False
    set_items(graph.node, [*casts, *graph.node])
    set_items(graph.initializer, tensors)
    return True


def _can_halve(index: GraphIndex, tensor: onnx.TensorProto) -> bool:
    readers = list(_readers(index.consumers(tensor.name), tensor.name))
    if tensor.data_type != TensorProto.FLOAT or tensor.name in index.outputs or not readers:
        return False
    for node in readers:
        first = _WEIGHTS_FROM.get(node.op_type)
        if first is None or tensor.name not in list(node.input)[first:]:
            return False
    value = index.constant(tensor.name)
    return value is not None and value.size >= _MIN_ELEMENTS and fits_half(value)


def _readers(nodes: Iterable[onnx.NodeProto], name: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that read a tensor, also inside their bodies, or whose bodies return it."""
    for node in nodes:
        if name in node.input:
            yield node
        for body in bodies(node):
            if name in {value.name for value in body.output}:
                yield node
            if name in captured(body):
                yield from _readers(body.node, name)


def fits_half(weight: NDArray[Any]) -> bool:
    """Return whether the norm of a weight's error in float16 is at most 2**-11 of the norm of the weight.

    float16 overflows above 65504, and loses precision below 6e-5.
    """
    wide = weight.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        error = wide.astype(np.float16).astype(np.float64) - wide
    return bool(np.linalg.norm(error) <= _HALF_ROUNDING * np.linalg.norm(wide))


def int8_weights(
    model: onnx.ModelProto,
    layers: Collection[str] | None = None,
    scales: Mapping[str, NDArray[np.float32]] | None = None,
) -> onnx.ModelProto | None:
    """Return `model` with the weights of matrix products stored as int8, with a scale for each channel.

    Args:
        model: A float model.
        layers: The first outputs of the products to change, or None for all.
        scales: A dict from initializers to float32 scales [channels], for weights that are exact multiples of
            them.

    Returns:
        The model, or None if it has no such product or its opset does not support scales per channel.
    """
    if opset(model) < OPSET_INT8:
        return None
    result = copy_model(model)
    graph = result.graph
    index = GraphIndex(graph)
    emitter = Emitter(index)
    for node in graph.node:
        copy = copy_node(node)
        weight = int8_weight(index, node)
        if weight is not None and (layers is None or node.output[0] in layers):
            axis = weight_axis(node)
            codes, params = quantize_weight(weight, axis, exact=(scales or {}).get(node.input[1]))
            copy.input[1] = emitter.constant(node.input[1], codes, params, axis=axis)
        emitter.nodes.append(copy)
    if len(emitter.nodes) == len(graph.node):
        return None
    set_items(graph.node, emitter.nodes)
    remove_unused_initializers(graph)
    return result


def int8_weight(index: GraphIndex, node: onnx.NodeProto) -> NDArray[np.float32] | None:
    """Return the constant weight of a node that `int8_weights` changes, or None for other nodes."""
    weight = index.constant(node.input[1]) if node.op_type in COMPUTE else None
    if weight is None or weight.dtype != np.float32 or weight.size < _MIN_ELEMENTS:
        return None
    # MatMul by a stack of matrices has no single axis of output channels.
    return weight if weight.ndim == 2 or (node.op_type == "Conv" and weight.ndim > 2) else None


def int4_weights(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return `model` with the weights of large MatMul and Gemm nodes as int4, in blocks of 32 inputs.

    The blocks use the DequantizeLinear of opset 21, which onnxruntime fuses with MatMul to its 4-bit kernel.

    Returns:
        The model, or None if it has no such layer or cannot be converted to opset 21.
    """
    index = GraphIndex(model.graph)
    chosen = [node for node in model.graph.node if _fits_blocks(index, node)]
    if not chosen:
        return None
    try:
        result = onnx.version_converter.convert_version(model, max(opset(model), _OPSET_INT4))
    except Exception:  # the converter raises RuntimeError and others for operators that it does not know
        return None
    result.ir_version = max(result.ir_version, _IR_INT4)
    graph = result.graph
    index = GraphIndex(graph)
    nodes: list[onnx.NodeProto] = []
    floats: dict[tuple[str, int], str] = {}
    for node in graph.node:
        copy = copy_node(node)
        if _fits_blocks(index, node):
            key = node.input[1], _input_axis(node)
            if key not in floats:
                nodes.append(_blocked(index, *key))
                floats[key] = nodes[-1].output[0]
            copy.input[1] = floats[key]
        nodes.append(copy)
    set_items(graph.node, nodes)
    remove_unused_initializers(graph)
    return result


def _fits_blocks(index: GraphIndex, node: onnx.NodeProto) -> bool:
    weight = index.constant(node.input[1]) if node.op_type in {"MatMul", "Gemm"} else None
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or weight.size < _MIN_INT4_ELEMENTS:
        return False
    inputs: int = weight.shape[_input_axis(node)]
    return inputs % _BLOCK == 0


def _input_axis(node: onnx.NodeProto) -> int:
    return 1 if node.op_type == "Gemm" and attribute(node, "transB", 0) else 0


def _blocked(index: GraphIndex, name: str, axis: int) -> onnx.NodeProto:
    """Store weight `name` [K, N] (axis 0) or [N, K] (axis 1) as int4 codes and scales; returns their DQ."""
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
        name=fresh_name(index, f"{name}_codes"),
        data_type=TensorProto.INT4,
        dims=flat.shape,
        raw_data=packed.tobytes(),
    )
    index.graph.initializer.append(tensor)
    inputs = [tensor.name, add_constant(index, f"{name}_scale", scale)]
    floats = fresh_name(index, f"{name}_dq")
    return helper.make_node("DequantizeLinear", inputs, [floats], name=floats, axis=axis, block_size=_BLOCK)


def dynamic_int8(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return `model` with int8 matrix products that determine the ranges of their inputs at run time.

    Convolutions are not changed.

    Returns:
        The model, or None if it has no Gemm, MatMul or LSTM that onnxruntime can quantize.

    Raises:
        BackendError: onnxruntime's quantizer fails on the model.
    """
    # The release for Python 3.10 imports sympy for the inference of symbolic shapes, which is not used here.
    if find_spec("sympy") is None:
        unused = ModuleType("onnxruntime.quantization.shape_inference")
        unused.quant_pre_process = None  # type: ignore[attr-defined]
        sys.modules.setdefault(unused.__name__, unused)
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode

    kinds = ["Gemm", "LSTM", "MatMul"]
    if not any(node.op_type in kinds for node in model.graph.node):
        return None
    copy = copy_model(model)
    quantizer = ONNXQuantizer(
        copy,
        per_channel=True,
        reduce_range=False,
        mode=QuantizationMode.IntegerOps,
        static=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=None,
        nodes_to_quantize=[],
        nodes_to_exclude=[],
        op_types_to_quantize=kinds,
        extra_options={"MatMulConstBOnly": True},
    )
    try:
        quantizer.quantize_model()
    except Exception as error:  # the library passes on exceptions of any class
        reason = " ".join(str(error).split())
        raise BackendError(f"onnxruntime cannot make dynamic-int8 of the model: {reason}") from error
    result: onnx.ModelProto = quantizer.model.model
    integer = {"MatMulInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"}
    return result if any(node.op_type in integer for node in result.graph.node) else None
