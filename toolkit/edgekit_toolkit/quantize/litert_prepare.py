"""A `.tflite` model in the form that ai-edge-quantizer understands, and its results in the form that we ship.

The library reads only the newer of two fields that name an operator, so that in files of old converters
every operator is an ADD to it; it knows tensors by name, and wants lists where files may leave them out. It
has no SQUEEZE and EXPAND_DIMS, which are a RESHAPE where the shape is known. An output of the model that
operators read too becomes integers under one of its two uses, or under both: the file crashes the engine.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from edgekit_toolkit.tflite_file import (
    Model,
    Operator,
    SubGraph,
    builtin_code,
    is_static,
    operator_name,
    operators,
    pack,
    parse,
    parsed,
    schema,
    shape_of,
    stored_bytes,
    tensor_name,
)

_RESHAPES: Final = frozenset({"SQUEEZE", "EXPAND_DIMS"})


def prepare(content: bytes) -> bytes:
    """Return an equal model with one way to name an operator, and tensors that each have a name of their own.

    Names of inputs and outputs stay as they are.
    """
    model = parse(content)
    for code in model.operatorCodes:
        code.builtinCode = builtin_code(code)
    for name in ("signatureDefs", "metadata", "metadataBuffer"):
        setattr(model, name, [] if getattr(model, name) is None else getattr(model, name))
    taken: set[str] = set()
    for graph in model.subgraphs:
        _name_apart(graph, taken)
    for graph, _, operator in operators(model):
        if operator_name(model, operator) in _RESHAPES:
            _reshape(model, graph, operator)
    for graph in model.subgraphs:
        for place in read_outputs(graph):
            _part(model, graph, place)
        _part_constants(model, graph)
    return pack(model)


def read_outputs(graph: SubGraph) -> list[int]:
    """Return the outputs, by place, that an operator makes and another one reads."""
    made = {int(index) for operator in graph.operators for index in operator.outputs}
    return [place for place in dict.fromkeys(map(int, graph.outputs)) if place in made & _read(graph)]


def used_tensors(graph: SubGraph) -> set[int]:
    """Return the tensors, by place, that an operator reads or that are outputs."""
    return _read(graph) | {int(index) for index in graph.outputs}


def _read(graph: SubGraph) -> set[int]:
    return {int(index) for operator in graph.operators for index in operator.inputs}


def finish(content: bytes | bytearray, prepared: bytes) -> bytes:
    """Return an equal model with short names inside, and without what only people read.

    Args:
        content: what the library made.
        prepared: what it made it of; outputs have the names that they have there.
    """
    model = parse(bytes(content))
    for graph, source in zip(model.subgraphs, parsed(prepared).subgraphs, strict=True):
        for place, was in zip(graph.outputs, source.outputs, strict=True):
            graph.tensors[place].name = tensor_name(source.tensors[was])
        ends = {int(index) for index in (*graph.inputs, *graph.outputs)}
        taken = {tensor_name(graph.tensors[index]) for index in ends}
        fresh = (name for name in map(str, range(len(graph.tensors) + len(taken))) if name not in taken)
        for place, tensor in enumerate(graph.tensors):
            if place not in ends:
                tensor.name = next(fresh)
            if tensor.quantization is not None:
                tensor.quantization.min = tensor.quantization.max = None
    return pack(model)


def _name_apart(graph: SubGraph, taken: set[str]) -> None:
    """Give each tensor a name that is not among `taken`; the first sub-graph's ends keep theirs."""
    ends = [int(index) for index in (*graph.inputs, *graph.outputs)]
    order = dict.fromkeys([*ends, *range(len(graph.tensors))])
    for place in order:
        tensor = graph.tensors[place]
        name = tensor_name(tensor) or "tensor"
        while name in taken:
            name = f"{name}_{place}"
        taken.add(name)
        tensor.name = name


def _reshape(model: Model, graph: SubGraph, operator: Operator) -> None:
    """Turn an operator into a RESHAPE, unless more than one size is free."""
    made = graph.tensors[operator.outputs[0]]
    sizes = shape_of(made) if is_static(made) else tuple(int(size) for size in made.shapeSignature)
    if sum(size < 0 for size in sizes) > 1:
        return
    options = schema.ReshapeOptionsT()
    options.newShape = list(sizes)
    operator.opcodeIndex = _code(model, schema.BuiltinOperator.RESHAPE)
    operator.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
    operator.builtinOptions = options
    operator.inputs = [int(operator.inputs[0]), _constant(model, graph, f"{tensor_name(made)}_shape", sizes)]


def _part(model: Model, graph: SubGraph, place: int) -> None:
    """Let operators read a tensor of their own in the place of an output; the output is a copy of it."""
    output = graph.tensors[place]
    if not is_static(output):
        return
    inner = schema.TensorT()
    inner.name, inner.shape, inner.type = _free_name(graph, tensor_name(output)), output.shape, output.type
    inner.quantization = output.quantization
    graph.tensors.append(inner)
    own = len(graph.tensors) - 1
    for operator in graph.operators:
        operator.inputs = [own if index == place else int(index) for index in operator.inputs]
        operator.outputs = [own if index == place else int(index) for index in operator.outputs]
    copy, options = schema.OperatorT(), schema.ReshapeOptionsT()
    options.newShape = list(shape_of(output))
    copy.opcodeIndex = _code(model, schema.BuiltinOperator.RESHAPE)
    copy.builtinOptionsType, copy.builtinOptions = schema.BuiltinOptions.ReshapeOptions, options
    shape = _constant(model, graph, f"{tensor_name(output)}_shape", shape_of(output))
    copy.inputs, copy.outputs = [own, shape], [place]
    graph.operators.append(copy)


def _part_constants(model: Model, graph: SubGraph) -> None:
    """Let each operator read a tensor of its own for a constant that several read, with the same values.

    The library makes such tensors too, with a name of the wrong type that stops it later.
    """
    taken = set[int]()
    for operator in graph.operators:
        operator.inputs = [int(index) for index in operator.inputs]
        for slot, index in enumerate(operator.inputs):
            if index >= 0 and stored_bytes(model, graph.tensors[index]):
                operator.inputs[slot] = _copied(graph, index) if index in taken else index
                taken.add(index)


def _copied(graph: SubGraph, place: int) -> int:
    """Add a tensor like the one at `place`, of the same buffer; returns its place."""
    tensor = graph.tensors[place]
    twin = schema.TensorT()
    vars(twin).update(vars(tensor))
    twin.name = _free_name(graph, f"{tensor_name(tensor)};{len(graph.tensors)}")
    graph.tensors.append(twin)
    return len(graph.tensors) - 1


def _free_name(graph: SubGraph, name: str) -> str:
    taken = {tensor_name(one) for one in graph.tensors}
    while name in taken:
        name += "_"
    return name


def _code(model: Model, builtin: int) -> int:
    for place, code in enumerate(model.operatorCodes):
        if code.builtinCode == builtin:
            return place
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = builtin
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def _constant(model: Model, graph: SubGraph, name: str, values: Iterable[int]) -> int:
    array: np.ndarray[Any, Any] = np.asarray(list(values), np.int32)
    buffer, tensor = schema.BufferT(), schema.TensorT()
    buffer.data = np.frombuffer(array.tobytes(), np.uint8)
    model.buffers.append(buffer)
    tensor.name, tensor.shape = _free_name(graph, name), [array.size]
    tensor.type = schema.TensorType.INT32
    tensor.buffer = len(model.buffers) - 1
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1
