"""Converts `.tflite` models for ai-edge-quantizer, and restores the names in its results.

The conversion works around these limits of the library:

- It only reads the newer of two fields for the operator code, so it reads operators of old files as ADD.
- It requires unique tensor names, and the lists of signatures and metadata, which are optional in files.
- It lacks SQUEEZE and EXPAND_DIMS. They are replaced by RESHAPE if the shape is known.
- If two operators read a constant, both may get the values that were quantized for only one of them.
- If operators read an output of the model, it may quantize that output wrongly, and the engine crashes.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, Final

import numpy as np

from edgekit_toolkit.tflite.flatbuffer import (
    TYPES,
    Model,
    Operator,
    SubGraph,
    add_buffer,
    builtin_code,
    constant,
    is_static,
    operator_name,
    operators,
    pack,
    parse,
    parsed,
    schema,
    shape_of,
    sizes_of,
    stored_bytes,
    tensor_name,
)

_RESHAPES: Final = frozenset({"SQUEEZE", "EXPAND_DIMS"})


def prepare(content: bytes) -> bytes:
    """Return an equivalent `.tflite` model that ai-edge-quantizer supports.

    The names of inputs and outputs do not change.
    """
    model = parse(content)
    for code in model.operatorCodes:
        code.builtinCode = builtin_code(code)
    for name in ("signatureDefs", "metadata", "metadataBuffer"):
        setattr(model, name, [] if getattr(model, name) is None else getattr(model, name))
    names: set[str] = set()
    filled: set[int] = set()
    for graph in model.subgraphs:
        _widen_halves(model, graph)
        _part_constants(model, graph, filled)
        _name_apart(graph, names)
    for graph, _, operator in operators(model):
        name = operator_name(model, operator)
        if name in _RESHAPES:
            _reshape(model, graph, operator)
        if name == "MAXIMUM":
            _level_ranks(model, graph, operator)
    for graph in model.subgraphs:
        for index in read_outputs(graph):
            _part(model, graph, index)
    return pack(model)


def read_outputs(graph: SubGraph) -> list[int]:
    """Return the indices of graph outputs that operators compute and that other operators read."""
    produced = {int(index) for operator in graph.operators for index in operator.outputs}
    return [index for index in dict.fromkeys(map(int, graph.outputs)) if index in produced & _read(graph)]


def used_tensors(graph: SubGraph) -> set[int]:
    """Return the indices of the tensors that an operator reads or that are outputs of the graph."""
    return _read(graph) | {int(index) for index in graph.outputs}


def _read(graph: SubGraph) -> set[int]:
    return {int(index) for operator in graph.operators for index in operator.inputs}


def finish(content: bytes | bytearray, prepared: bytes) -> bytes:
    """Return a smaller equivalent file with short tensor names and no recorded ranges or duplicate buffers.

    `prepared` is the model before quantization, from which the names of the outputs are restored.
    """
    model = parse(bytes(content))
    for graph, source in zip(model.subgraphs, parsed(prepared).subgraphs, strict=True):
        for number, was in zip(graph.outputs, source.outputs, strict=True):
            graph.tensors[number].name = tensor_name(source.tensors[was])
        ends = {int(index) for index in (*graph.inputs, *graph.outputs)}
        names = {tensor_name(graph.tensors[index]) for index in ends}
        fresh = (name for name in map(str, range(len(graph.tensors) + len(names))) if name not in names)
        for number, tensor in enumerate(graph.tensors):
            if number not in ends:
                tensor.name = next(fresh)
            if tensor.quantization is not None:
                tensor.quantization.min = tensor.quantization.max = None
    share_buffers(model)
    return pack(model)


def share_buffers(model: Model) -> None:
    """Store equal tensor contents once and remove unused buffers, in place."""
    positions: dict[bytes, int] = {}
    buffers: list[Any] = model.buffers[:1]  # the first buffer is empty by the schema
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            if not stored_bytes(model, tensor):
                tensor.buffer = 0
                continue
            buffer = model.buffers[tensor.buffer]
            content = np.asarray(buffer.data, np.uint8).tobytes()
            if content not in positions:
                positions[content] = len(buffers)
                buffers.append(buffer)
            tensor.buffer = positions[content]
    for item in model.metadata or []:
        buffers.append(model.buffers[item.buffer])
        item.buffer = len(buffers) - 1
    model.buffers = buffers


def _widen_halves(model: Model, graph: SubGraph) -> None:
    """Store float16 weights as float32: the library takes what DEQUANTIZE makes for an activation."""
    tensors = []
    for operator in graph.operators:
        stored = graph.tensors[operator.inputs[0]] if len(operator.inputs) else None
        value = None if stored is None else constant(model, stored)
        is_widened = operator_name(model, operator) == "DEQUANTIZE"
        if value is None or value.dtype != np.float16 or not is_widened:
            tensors.append(operator)
            continue
        graph.tensors[operator.outputs[0]].buffer = add_buffer(model, value.astype(np.float32))
    graph.operators = tensors
    used = used_tensors(graph)
    for number, tensor in enumerate(graph.tensors):
        if TYPES[tensor.type] == "FLOAT16" and number not in used:
            tensor.buffer = 0


def _part_constants(model: Model, graph: SubGraph, filled: set[int]) -> None:
    """Give each reader of a float constant its own tensor and buffer, except those `filled` before."""
    read: set[int] = set()
    for operator in graph.operators:
        operator.inputs = [int(index) for index in operator.inputs]
        for position, index in enumerate(operator.inputs):
            tensor = graph.tensors[index]
            if index < 0 or TYPES[tensor.type] != "FLOAT32" or not stored_bytes(model, tensor):
                continue
            if index in read:
                tensor = copy(tensor)
                graph.tensors.append(tensor)
                operator.inputs[position] = len(graph.tensors) - 1
            read.add(index)
            if tensor.buffer in filled:
                model.buffers.append(copy(model.buffers[tensor.buffer]))
                tensor.buffer = len(model.buffers) - 1
            filled.add(tensor.buffer)


def _name_apart(graph: SubGraph, names: set[str]) -> None:
    """Give each tensor a name not in `names`; inputs and outputs of the first sub-graph keep theirs."""
    ends = [int(index) for index in (*graph.inputs, *graph.outputs)]
    order = dict.fromkeys([*ends, *range(len(graph.tensors))])
    for index in order:
        tensor = graph.tensors[index]
        name = tensor_name(tensor) or "tensor"
        while name in names:
            name = f"{name}_{index}"
        names.add(name)
        tensor.name = name


def _reshape(model: Model, graph: SubGraph, operator: Operator) -> None:
    """Turn an operator into a RESHAPE, unless more than one size is free."""
    output = graph.tensors[operator.outputs[0]]
    sizes = sizes_of(output)
    if sum(size < 0 for size in sizes) > 1:
        return
    options = schema.ReshapeOptionsT()
    options.newShape = list(sizes)
    operator.opcodeIndex = operator_code(model, schema.BuiltinOperator.RESHAPE)
    operator.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
    operator.builtinOptions = options
    operator.inputs = [
        int(operator.inputs[0]),
        _constant(model, graph, f"{tensor_name(output)}_shape", sizes),
    ]


def _level_ranks(model: Model, graph: SubGraph, operator: Operator) -> None:
    """Give constants the rank of the output, since the library copies the output's scale to them."""
    rank = len(shape_of(graph.tensors[operator.outputs[0]]))
    for index in operator.inputs:
        tensor = graph.tensors[index]
        if stored_bytes(model, tensor):
            tensor.shape = [*[1] * (rank - len(shape_of(tensor))), *shape_of(tensor)]


def _part(model: Model, graph: SubGraph, position: int) -> None:
    """Let operators read a new tensor instead of an output, which becomes a copy of that tensor."""
    output = graph.tensors[position]
    if not is_static(output):
        return
    own = add_like(graph, position, shape_of(output))
    for operator in graph.operators:
        operator.inputs = [own if index == position else int(index) for index in operator.inputs]
        operator.outputs = [own if index == position else int(index) for index in operator.outputs]
    graph.operators.append(reshape(model, graph, own, position))


def add_like(graph: SubGraph, index: int, sizes: Sequence[int]) -> int:
    """Add a copy of tensor `index` without its content and return its index.

    `sizes` is the shape of the new tensor. Negative sizes are free.
    """
    source, added = graph.tensors[index], schema.TensorT()
    added.name, added.type = _free_name(graph, tensor_name(source)), source.type
    added.shape = [max(1, size) for size in sizes]
    added.shapeSignature = list(sizes) if min(sizes, default=1) < 0 else None
    added.quantization = source.quantization
    graph.tensors.append(added)
    return len(graph.tensors) - 1


def reshape(model: Model, graph: SubGraph, source: int, output: int) -> Operator:
    """Return an operator that reshapes `source` to `output`, which may have one free size.

    The operator is not added to the graph.
    """
    operator = schema.OperatorT()
    operator.inputs, operator.outputs = [source], [output]
    _reshape(model, graph, operator)
    return operator


def _free_name(graph: SubGraph, name: str) -> str:
    names = {tensor_name(tensor) for tensor in graph.tensors}
    while name in names:
        name += "_"
    return name


def operator_code(model: Model, builtin: int) -> int:
    """Return the index of the builtin operator in `model.operatorCodes`. It is added if it is missing."""
    for number, code in enumerate(model.operatorCodes):
        if code.builtinCode == builtin:
            return number
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = builtin
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def _constant(model: Model, graph: SubGraph, name: str, values: Iterable[int]) -> int:
    array = np.asarray(list(values), np.int32)
    tensor = schema.TensorT()
    tensor.name, tensor.shape = _free_name(graph, name), [array.size]
    tensor.type = schema.TensorType.INT32
    tensor.buffer = add_buffer(model, array)
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1
