"""Parses and writes `.tflite` files, and reads names, types and constants of their tensors.

The content is not validated. It must have been written by edgekit or checked by `importers.tflite`.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.sessions import EngineMissingError
from edgekit_runtime.system.install_hint import install_command

try:
    import flatbuffers
    from ai_edge_litert import schema_py_generated
except ImportError as cause:
    raise EngineMissingError(
        f".tflite models need ai-edge-litert on the host ({cause}): {install_command('litert-host')}"
    ) from cause

schema: Final[Any] = schema_py_generated  # the generated code has no types
FILE_IDENTIFIER: Final = b"TFL3"
# The schema asks for 16: kernels read weights with aligned vector loads. The generated code does not align.
_BUFFER_ALIGNMENT: Final = 16
_MARGIN_BYTES: Final = 1 << 16  # for everything but weights. The builder grows if it needs more

OPERATORS: Final[Mapping[int, str]] = {
    value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)
}
TYPES: Final[Mapping[int, str]] = {
    value: name for name, value in vars(schema.TensorType).items() if isinstance(value, int)
}
# Types that numpy can hold directly. The others are packed (INT4), or no numbers.
DTYPES: Final[Mapping[int, np.dtype[Any]]] = {
    number: np.dtype(name.lower()) for number, name in TYPES.items() if name.lower() in np.sctypeDict
}
_PACKED_BITS: Final = {"INT4": 4, "UINT4": 4, "INT2": 2, "BFLOAT16": 16}
BITS: Final[Mapping[int, int]] = {
    **{number: 8 * dtype.itemsize for number, dtype in DTYPES.items()},
    **{number: _PACKED_BITS[name] for number, name in TYPES.items() if name in _PACKED_BITS},
}

Model = Any  # schema.ModelT. The generated classes have no types
SubGraph = Any
Operator = Any
Tensor = Any


def parse(content: bytes) -> Model:
    """Return a `.tflite` file as a mutable object.

    Buffers that are stored after the flatbuffer, as in files above 2 GB, are included. Damaged content can
    raise any error. Use the importer's `read_model` to validate a file.
    """
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    for buffer in model.buffers or []:
        if buffer.offset > 1:  # 0 and 1 mean that there are none
            buffer.data = np.frombuffer(content, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
    return model


def pack(model: Model) -> bytes:
    """Return the bytes of a `.tflite` file. The same object always gives the same bytes."""
    buffers = model.buffers
    stored_bytes = sum(len(buffer.data) for buffer in buffers if buffer.data is not None)
    builder = flatbuffers.Builder(stored_bytes + _MARGIN_BYTES)
    model.buffers = [_AlignedBuffer(buffer.data) for buffer in buffers]
    try:
        builder.Finish(model.Pack(builder), FILE_IDENTIFIER)
    finally:
        model.buffers = buffers
    return bytes(builder.Output())


class _AlignedBuffer(schema.BufferT):  # type: ignore[misc]
    """A buffer whose data are aligned as the schema asks."""

    def Pack(self, builder: flatbuffers.Builder) -> int:  # noqa: N802 - the generated code calls it
        if self.data is None or not len(self.data):
            schema.BufferStart(builder)
            return int(schema.BufferEnd(builder))
        data = np.ascontiguousarray(self.data, np.uint8)
        builder.StartVector(1, len(data), _BUFFER_ALIGNMENT)
        builder.head = builder.Head() - len(data)
        builder.Bytes[builder.Head() : builder.Head() + len(data)] = data.data
        vector = builder.EndVector()
        schema.BufferStart(builder)
        schema.BufferAddData(builder, vector)
        return int(schema.BufferEnd(builder))


def operator_name(model: Model, operator: Operator) -> str:
    """Return the schema's name of a built-in operator, or `CUSTOM`."""
    return OPERATORS[builtin_code(model.operatorCodes[operator.opcodeIndex])]


def builtin_code(code: Any) -> int:
    """Return the number of a built-in operator. Old files store the number in an 8-bit field."""
    return int(max(code.builtinCode, code.deprecatedBuiltinCode))


def tensor_name(tensor: Tensor) -> str:
    name = tensor.name or b""
    return name if isinstance(name, str) else bytes(name).decode("utf-8")


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor. A free dimension has the size in the file, which is usually 1."""
    return () if tensor.shape is None else tuple(int(size) for size in tensor.shape)


def is_static(tensor: Tensor) -> bool:
    """Return whether the tensor has no free dimensions."""
    return tensor.shapeSignature is None or not len(tensor.shapeSignature) or min(tensor.shapeSignature) >= 0


def sizes_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, with -1 for free dimensions."""
    return shape_of(tensor) if is_static(tensor) else tuple(int(size) for size in tensor.shapeSignature)


def add_buffer(model: Model, values: NDArray[Any]) -> int:
    """Add a buffer that holds the bytes of an array, and return its index."""
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(values.tobytes(), np.uint8)
    model.buffers.append(buffer)
    return len(model.buffers) - 1


def stored_bytes(model: Model, tensor: Tensor) -> int:
    """Return the number of bytes of a tensor's values in the file, 0 for a computed tensor."""
    data = model.buffers[tensor.buffer].data
    return 0 if data is None else len(data)


def expected_bytes(tensor: Tensor) -> int | None:
    """Return the number of bytes that a tensor's values need, or None if its type has no fixed size."""
    bits = BITS.get(tensor.type)
    return None if bits is None else (math.prod(shape_of(tensor)) * bits + 7) // 8


def constant(model: Model, tensor: Tensor) -> NDArray[Any] | None:
    """Return a constant in its shape, or None if the file has no values or numpy lacks the type."""
    values = stored_values(model, tensor)
    return None if values is None or tensor.sparsity is not None else values.reshape(shape_of(tensor))


def stored_values(model: Model, tensor: Tensor) -> NDArray[Any] | None:
    """Return a tensor's values as a flat array, or None if the file has none or numpy lacks the type."""
    dtype = DTYPES.get(tensor.type)
    if dtype is None or not stored_bytes(model, tensor):
        return None
    data = np.asarray(model.buffers[tensor.buffer].data, np.uint8)
    return np.frombuffer(data.tobytes(), dtype, len(data) // dtype.itemsize)


def operators(model: Model) -> Iterator[tuple[SubGraph, int, Operator]]:
    """Yield the sub-graph, the index in the sub-graph and the operator for each operator of a model."""
    for graph in model.subgraphs:
        for index, operator in enumerate(graph.operators):
            yield graph, index, operator


@lru_cache(maxsize=4)
def parsed(content: bytes) -> Model:
    """Return a `.tflite` file as a shared object that must not be modified. Recent results are cached."""
    return parse(content)
