"""Finds the value ranges of the inputs of a quantized model.

If a model quantizes an input directly, the scale and the zero point limit the range of the input. Values
outside the range are clipped. If a model first computes with an input, such as by subtracting a mean, the
input has no such range.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit_toolkit.onnx_graph.index import reads
from edgekit_toolkit.onnx_graph.specs import real_inputs
from edgekit_toolkit.samples.range_trap import CodeRange

# Operators that move values without changing them.
_MOVES: Final = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_TFLITE_MOVES: Final = frozenset({"EXPAND_DIMS", "RESHAPE", "SQUEEZE", "TRANSPOSE"})
_SYMMETRIC_ZERO: Final = {"int8": 0, "uint8": 128, "int16": 0, "uint16": 1 << 15}


def onnx_code_ranges(model: onnx.ModelProto) -> dict[str, CodeRange]:
    """Return the range of each input that the model quantizes directly, by the name of the input.

    The range of an integer input is the range of its codes.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t
        for name in reads(node):
            readers.setdefault(name, []).append(node)
    range_by_input = {}
    for value in real_inputs(model.graph):
        ranges = list(_onnx_ranges(value.name, readers, constants))
        if ranges:  # several readers: the one that clips least
            range_by_input[value.name] = max(ranges, key=lambda code_range: code_range.high - code_range.low)
    return range_by_input


def _onnx_ranges(
    name: str, readers: Mapping[str, list[onnx.NodeProto]], constants: Mapping[str, onnx.TensorProto]
) -> Iterator[CodeRange]:
    for node in readers.get(name, ()):
        if node.op_type in _MOVES and node.input[0] == name:
            yield from _onnx_ranges(node.output[0], readers, constants)
        elif node.op_type in {"QuantizeLinear", "DequantizeLinear"} and node.input[0] == name:
            stored = [constants[other] for other in node.input[1:] if other in constants]
            if len(stored) != 2:  # computed, or without a zero point, which would state the type of the codes
                continue
            scale, zero_point = (numpy_helper.to_array(tensor) for tensor in stored)
            if scale.size == 1 and zero_point.dtype.name in _SYMMETRIC_ZERO:
                step = float(scale.item()) if node.op_type == "QuantizeLinear" else None
                yield _code_range(zero_point.dtype.name, step, int(zero_point.item()))


def _code_range(dtype: str, scale: float | None, zero_point: int) -> CodeRange:
    """Return the range of values, or of the codes if no scale is given."""
    limits = np.iinfo(dtype)
    symmetric = zero_point == _SYMMETRIC_ZERO[dtype]
    if scale is None:
        return CodeRange(float(limits.min), float(limits.max), symmetric)
    return CodeRange((limits.min - zero_point) * scale, (limits.max - zero_point) * scale, symmetric)


def tflite_code_ranges(content: bytes) -> dict[str, CodeRange]:
    """Return the range of each quantized input in float32 values, by the name of the input.

    Raises:
        BackendError: LiteRT refuses the model.
    """
    from edgekit_runtime.sessions.litert.engine import load_interpreter
    from edgekit_runtime.sessions.litert.tensors import read_tensors
    from edgekit_toolkit.tflite.flatbuffer import parsed

    model = parsed(content)
    inputs, _ = read_tensors(load_interpreter(content, threads=1, xnnpack=False), float_io=True)
    range_by_input = {}
    for tensor in inputs:
        ranges = list(_tflite_codes(model, tensor.index))
        if ranges:
            range_by_input[tensor.spec.name] = max(
                ranges, key=lambda code_range: code_range.high - code_range.low
            )
    return range_by_input


def _tflite_codes(model: Any, index: int) -> Iterator[CodeRange]:
    """The ranges of the codes that an input tensor holds or is turned into."""
    from edgekit_toolkit.tflite.flatbuffer import TYPES, operator_name

    graph = model.subgraphs[0]
    quantization, dtype = graph.tensors[index].quantization, TYPES[graph.tensors[index].type].lower()
    if dtype in {"int8", "uint8", "int16"}:
        if quantization is not None and quantization.scale is not None and len(quantization.scale) == 1:
            points = quantization.zeroPoint
            zero_point = int(points[0]) if points is not None and len(points) else 0
            yield _tflite_range(dtype, float(quantization.scale[0]), zero_point)
        return
    for operator in graph.operators:
        takes = len(operator.inputs) and operator.inputs[0] == index
        if takes and operator_name(model, operator) in {*_TFLITE_MOVES, "QUANTIZE"}:
            yield from _tflite_codes(model, int(operator.outputs[0]))


def _tflite_range(dtype: str, scale: float, zero_point: int) -> CodeRange:
    """Return the range; only 16-bit activations are symmetric, by TFLite's quantization specification."""
    code_range = _code_range(dtype, scale, zero_point)
    return CodeRange(code_range.low, code_range.high, dtype == "int16")
