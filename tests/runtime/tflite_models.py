"""Small `.tflite` models, written with the schema that ai-edge-litert ships."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

schema: Any = pytest.importorskip("ai_edge_litert.schema_py_generated")
flatbuffers: Any = pytest.importorskip("flatbuffers")

WEIGHT = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
_TYPES = {
    "float32": "FLOAT32",
    "int8": "INT8",
    "uint8": "UINT8",
    "int16": "INT16",
    "int32": "INT32",
    "string": "STRING",
    "float16": "FLOAT16",
}


@dataclasses.dataclass
class Tensor:
    """One tensor; `signature` states the sizes with -1 for free ones, `values` makes it a constant."""

    name: str | bytes
    shape: Sequence[int]
    dtype: str = "float32"
    signature: Sequence[int] | None = None
    scales: Sequence[float] = ()
    zero_points: Sequence[int] = ()
    axis: int = 0
    values: Any = None


@dataclasses.dataclass
class Node:
    operator: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    options: Any = None


def write(
    tensors: Sequence[Tensor],
    nodes: Sequence[Node],
    inputs: Sequence[int],
    outputs: Sequence[int],
    signature: tuple[dict[str, int], dict[str, int]] | None = None,
) -> bytes:
    """Return a model of one subgraph."""
    model = schema.ModelT()
    model.version = 3
    model.buffers = [_buffer(None)]
    graph = schema.SubGraphT()
    graph.tensors = [_tensor(tensor, model.buffers) for tensor in tensors]
    graph.inputs, graph.outputs = list(inputs), list(outputs)
    model.operatorCodes, graph.operators = [], []
    for node in nodes:
        graph.operators.append(_operator(node, model.operatorCodes))
    model.subgraphs = [graph]
    if signature is not None:
        model.signatureDefs = [_signature(*signature)]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _buffer(values: Any) -> Any:
    buffer = schema.BufferT()
    if values is not None:
        buffer.data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
    return buffer


def _tensor(tensor: Tensor, buffers: list[Any]) -> Any:
    made = schema.TensorT()
    made.name, made.shape = tensor.name, list(tensor.shape)
    made.shapeSignature = None if tensor.signature is None else list(tensor.signature)
    made.type = getattr(schema.TensorType, _TYPES[tensor.dtype])
    made.buffer = 0
    if tensor.values is not None:
        made.buffer = len(buffers)
        buffers.append(_buffer(tensor.values))
    if len(tensor.scales):
        made.quantization = schema.QuantizationParametersT()
        made.quantization.scale = list(tensor.scales)
        made.quantization.zeroPoint = list(tensor.zero_points)
        made.quantization.quantizedDimension = tensor.axis
    return made


def _operator(node: Node, codes: list[Any]) -> Any:
    code = schema.OperatorCodeT()
    builtin = getattr(schema.BuiltinOperator, node.operator, None)
    if builtin is None:
        code.builtinCode, code.customCode = schema.BuiltinOperator.CUSTOM, node.operator
    else:
        code.builtinCode = builtin
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    code.version = 4 if node.operator == "FULLY_CONNECTED" else 1
    codes.append(code)
    made = schema.OperatorT()
    made.opcodeIndex = len(codes) - 1
    made.inputs, made.outputs = list(node.inputs), list(node.outputs)
    if node.options is not None:
        made.builtinOptions = node.options
        made.builtinOptionsType = getattr(schema.BuiltinOptions, type(node.options).__name__[:-1])
    return made


def _signature(inputs: dict[str, int], outputs: dict[str, int]) -> Any:
    made = schema.SignatureDefT()
    made.signatureKey, made.subgraphIndex = "serving_default", 0
    made.inputs, made.outputs = [], []
    for side, named in ((made.inputs, inputs), (made.outputs, outputs)):
        for name, index in named.items():
            entry = schema.TensorMapT()
            entry.name, entry.tensorIndex = name, index
            side.append(entry)
    return made


def linear(signature: tuple[dict[str, int], dict[str, int]] | None = None, **changes: Any) -> bytes:
    """y[N, 2] = x[N, 4] @ WEIGHT; changes are fields of the input tensor."""
    tensors = [
        Tensor("x", (1, 4), signature=(-1, 4)),
        Tensor("w", (2, 4), values=WEIGHT.T),
        Tensor("y", (1, 2), signature=(-1, 2)),
    ]
    tensors[0] = dataclasses.replace(tensors[0], **changes)
    options = schema.FullyConnectedOptionsT()
    return write(tensors, [Node("FULLY_CONNECTED", (0, 1, -1), (2,), options)], (0,), (2,), signature)


def quantized_linear(dtype: str = "int8", scale: float = 0.5, zero_point: int = 0, **weight: Any) -> bytes:
    """The same in 8-bit codes: x has `scale` and `zero_point`, y has twice the scale; weights are exact."""
    codes = Tensor("w", (2, 4), "int8", scales=[1.0], zero_points=[0], values=WEIGHT.T.astype(np.int8))
    if dtype == "uint8":
        codes = Tensor(
            "w", (2, 4), "uint8", scales=[1.0], zero_points=[128], values=(WEIGHT.T + 128).astype(np.uint8)
        )
    tensors = [
        Tensor("x", (1, 4), dtype, (-1, 4), [scale], [zero_point]),
        dataclasses.replace(codes, **weight),
        Tensor("y", (1, 2), dtype, (-1, 2), [2 * scale], [zero_point]),
    ]
    options = schema.FullyConnectedOptionsT()
    return write(tensors, [Node("FULLY_CONNECTED", (0, 1, -1), (2,), options)], (0,), (2,))
