"""Writes the graph of a `Builder` to a TFLite file, with a signature that has the model's names."""

import math
from collections.abc import Sequence
from typing import Any, Final

from edgekit_toolkit.tflite.builder import TENSOR_TYPES, Builder, Operation, Tensor
from edgekit_toolkit.tflite.flatbuffer import add_buffer, pack, schema
from edgekit_toolkit.tflite.refusal import ConversionError

SIGNATURE_KEY: Final = "serving_default"
SCHEMA_VERSION: Final = 3
# Offsets are signed 32-bit. Everything but weights is far smaller than this margin.
MAX_DATA_BYTES: Final = (1 << 31) - (64 << 20)
MAX_OLD_OPERATOR_CODE: Final = 127  # later codes do not fit the field that old readers read


def write(
    builder: Builder, inputs: Sequence[tuple[str, Tensor]], outputs: Sequence[tuple[str, Tensor]]
) -> bytes:
    """Return a graph as the bytes of a TFLite file.

    `inputs` and `outputs` are pairs of name and tensor, in order.

    Raises:
        ConversionError: The weights are too large for one file.
    """
    check_size(builder)
    model = schema.ModelT()
    model.version = SCHEMA_VERSION
    model.description = "edgekit"
    model.buffers = [schema.BufferT()]  # buffer 0 is empty by the schema: tensors without data refer to it
    used = _used(builder, [*inputs, *outputs])
    positions = {tensor.index: index for index, tensor in enumerate(used)}
    graph = schema.SubGraphT()
    graph.name = "main"
    graph.tensors = [_tensor(tensor, model) for tensor in used]
    graph.inputs = [positions[tensor.index] for _, tensor in inputs]
    graph.outputs = [positions[tensor.index] for _, tensor in outputs]
    codes: dict[str, int] = {}
    versions: dict[str, int] = {}
    for operation in builder.operations:
        codes.setdefault(operation.kind, len(codes))
        versions[operation.kind] = max(versions.get(operation.kind, 1), operation.version)
    graph.operators = [_operator(operation, codes, positions) for operation in builder.operations]
    model.operatorCodes = [_code(kind, versions[kind]) for kind in codes]
    model.subgraphs = [graph]
    model.signatureDefs = [_signature(inputs, outputs, positions)]
    return pack(model)


def check_size(builder: Builder) -> None:
    """Raise ConversionError if the constants of a graph are too large for one TFLite file."""
    stored = [tensor for tensor in builder.tensors if tensor.data is not None]
    total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in stored)
    if total > MAX_DATA_BYTES:
        raise ConversionError(
            f"the weights have {total} bytes, and a TFLite file holds at most {MAX_DATA_BYTES}; choose a"
            " smaller model for a device"
        )


def _used(builder: Builder, ends: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """Return the tensors that something refers to, by index; some constants were read and replaced."""
    used = {tensor.index for _, tensor in ends}
    for operation in builder.operations:
        used |= {tensor.index for tensor in (*operation.inputs, *operation.outputs) if tensor is not None}
    return [tensor for tensor in builder.tensors if tensor.index in used]


def _tensor(tensor: Tensor, model: Any) -> Any:
    result = schema.TensorT()
    result.name = tensor.name or f"t{tensor.index}"
    result.shape = list(tensor.shape)
    result.type = getattr(schema.TensorType, TENSOR_TYPES[tensor.dtype.name])
    result.hasRank = True
    if tensor.data is not None:
        result.buffer = add_buffer(model, tensor.data)
    return result


def _operator(operation: Operation, codes: dict[str, int], positions: dict[int, int]) -> Any:
    result = schema.OperatorT()
    result.opcodeIndex = codes[operation.kind]
    result.inputs = [-1 if tensor is None else positions[tensor.index] for tensor in operation.inputs]
    result.outputs = [positions[tensor.index] for tensor in operation.outputs]
    options = operation.options
    if options is not None:
        result.builtinOptionsType = getattr(schema.BuiltinOptions, options.table)
        result.builtinOptions = getattr(schema, f"{options.table}T")()
        for name, value in options.fields.items():
            setattr(result.builtinOptions, name, value)
    return result


def _code(kind: str, version: int) -> Any:
    result = schema.OperatorCodeT()
    result.builtinCode = getattr(schema.BuiltinOperator, kind)
    result.deprecatedBuiltinCode = min(result.builtinCode, MAX_OLD_OPERATOR_CODE)
    result.version = version
    return result


def _signature(
    inputs: Sequence[tuple[str, Tensor]],
    outputs: Sequence[tuple[str, Tensor]],
    positions: dict[int, int],
) -> Any:
    result = schema.SignatureDefT()
    result.signatureKey = SIGNATURE_KEY
    result.subgraphIndex = 0
    result.inputs = [_entry(name, positions[tensor.index]) for name, tensor in inputs]
    result.outputs = [_entry(name, positions[tensor.index]) for name, tensor in outputs]
    return result


def _entry(name: str, index: int) -> Any:
    result = schema.TensorMapT()
    result.name = name
    result.tensorIndex = index
    return result
