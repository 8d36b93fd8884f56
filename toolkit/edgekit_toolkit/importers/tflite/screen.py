"""Refuses `.tflite` models that cannot be used. Each error states the operator and the tensor.

`bounds` has already checked that all parts are within the file. This module changes nothing and runs nothing.
The engine checks whether the shapes and options of an operator fit together, in the child process of `trial`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.tflite.flatbuffer import (
    DTYPES,
    OPERATORS,
    TYPES,
    Model,
    Operator,
    SubGraph,
    Tensor,
    builtin_code,
    expected_bytes,
    operator_name,
    operators,
    shape_of,
    stored_bytes,
    stored_values,
    tensor_name,
)

_VERSION: Final = 3
_DAMAGED: Final = "the file is damaged, copy or export it again"


def check_model(model: Model) -> None:
    """Check that a model is consistent and that every target can run it.

    Raises:
        ModelError: The schema has another version, there are no operators, inputs or outputs, or an operator
            is custom or unknown. Also raised for external or missing data, NaN weights, and an invalid index,
            shape, quantization or order of operators.
    """
    if model.version != _VERSION:
        raise ModelError(f"has schema version {model.version}, expected {_VERSION}; {_DAMAGED}")
    if not model.subgraphs or not model.subgraphs[0].operators:
        raise ModelError("the model has no operators: nothing would run; export it again")
    if model.externalBuffers or model.externalBufferGroups:
        raise ModelError("keeps weights in other files, which are not read; export it as one file")
    for number, graph in enumerate(model.subgraphs):
        for name in ("tensors", "inputs", "outputs", "operators"):
            setattr(graph, name, [] if getattr(graph, name) is None else getattr(graph, name))
        for position, tensor in enumerate(graph.tensors):
            _check_tensor(model, tensor, _tensor_place(number, position, tensor))
    _check_interface(model.subgraphs[0])
    for graph, position, operator in operators(model):
        _check_operator(model, graph, position, operator)
    for number, graph in enumerate(model.subgraphs):
        _check_order(model, number, graph)
    _check_signatures(model)


def _check_interface(graph: SubGraph) -> None:
    for role in ("inputs", "outputs"):
        indices = getattr(graph, role)
        if not len(indices):
            raise ModelError(f"the model has no {role}; export it again with named inputs and outputs")
        _check_places(f"the model's {role}", indices, graph, least=0)
        for index in indices:
            if not graph.tensors[index].name:
                raise ModelError(f"{role[:-1]} tensor {index} has no name; export it again with names")


def _check_tensor(model: Model, tensor: Tensor, where: str) -> None:
    try:
        tensor_name(tensor)
    except UnicodeDecodeError as error:
        raise ModelError(f"{where}: its name is not UTF-8; {_DAMAGED}") from error
    if tensor.type not in TYPES:
        raise ModelError(f"{where}: element type {tensor.type} is not known; {_DAMAGED}")
    if tensor.externalBuffer:
        raise ModelError(f"{where}: its data lie in another file, which is not read; export it as one file")
    if not 0 <= tensor.buffer < len(model.buffers or []):
        raise ModelError(f"{where}: buffer {tensor.buffer} of {len(model.buffers or [])}; {_DAMAGED}")
    if any(size < 0 for size in shape_of(tensor)):
        raise ModelError(f"{where}: shape {list(shape_of(tensor))} has a size below 0; {_DAMAGED}")
    signature = () if tensor.shapeSignature is None else tuple(tensor.shapeSignature)
    if signature and len(signature) != len(shape_of(tensor)):
        raise ModelError(f"{where}: {len(signature)} free or fixed sizes for shape {list(shape_of(tensor))}")
    _check_data(model, tensor, where)
    _check_quantization(tensor, where, is_constant=bool(stored_bytes(model, tensor)))


def _check_data(model: Model, tensor: Tensor, where: str) -> None:
    stored, expected = stored_bytes(model, tensor), expected_bytes(tensor)
    if stored and expected is not None and stored != expected and tensor.sparsity is None:
        raise ModelError(
            f"{where}: {list(shape_of(tensor))} of {TYPES[tensor.type]} takes {expected} bytes, its buffer"
            f" has {stored}; {_DAMAGED}"
        )
    values = stored_values(model, tensor) if TYPES[tensor.type].startswith("FLOAT") else None
    if values is None:
        return
    finite = np.isfinite(values)
    # Only infinities, or infinities among zeros, are bounds and masks.
    if finite.all() or (not np.isnan(values).any() and (values.size == 1 or not values[finite].any())):
        return
    raise ModelError(
        f"{where}: {int(np.isnan(values).sum())} NaN and {int(np.isinf(values).sum())} infinite weights of"
        f" {values.size}: training diverged or the file is damaged; export a sound checkpoint"
    )


def _check_quantization(tensor: Tensor, where: str, *, is_constant: bool) -> None:
    quantization = tensor.quantization
    scales = () if quantization is None or quantization.scale is None else quantization.scale
    if not len(scales):
        return
    values = np.asarray(scales, np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or (not is_constant and not values.all()):
        raise ModelError(f"{where}: a scale is {values.min()}, expected finite numbers over 0; {_DAMAGED}")
    zero_points = 0 if quantization.zeroPoint is None else len(quantization.zeroPoint)
    if zero_points not in {0, 1, len(values)}:
        raise ModelError(f"{where}: {zero_points} zero points for {len(values)} scales; {_DAMAGED}")
    limits = (
        np.iinfo(DTYPES[tensor.type]) if tensor.type in DTYPES and DTYPES[tensor.type].kind in "iu" else None
    )
    if (
        zero_points
        and limits
        and not limits.min <= min(quantization.zeroPoint) <= max(quantization.zeroPoint) <= limits.max
    ):
        raise ModelError(
            f"{where}: zero point {max(quantization.zeroPoint, key=abs)} is no {TYPES[tensor.type]};"
            f" {_DAMAGED}"
        )
    if len(values) > 1:
        _check_axis(quantization, shape_of(tensor), where)


def _check_axis(quantization: Any, shape: tuple[int, ...], where: str) -> None:
    axis = quantization.quantizedDimension
    if not 0 <= axis < len(shape):
        raise ModelError(
            f"{where}: quantized_dimension is {axis}, expected 0 to {len(shape) - 1} for shape"
            f" {list(shape)}; quantize the model again"
        )
    if len(quantization.scale) != shape[axis]:
        raise ModelError(
            f"{where}: {len(quantization.scale)} scales for {shape[axis]} channels (axis {axis} of"
            f" {list(shape)}); quantize the model again"
        )
    if quantization.zeroPoint is not None and any(quantization.zeroPoint):
        raise ModelError(f"{where}: zero points of channels other than 0, which no kernel takes; {_DAMAGED}")


def _check_operator(model: Model, graph: SubGraph, position: int, operator: Operator) -> None:
    where = f"operator {position}"
    codes = model.operatorCodes or []
    if not 0 <= operator.opcodeIndex < len(codes):
        raise ModelError(f"{where}: code {operator.opcodeIndex} of {len(codes)}; {_DAMAGED}")
    code = codes[operator.opcodeIndex]
    for name in ("inputs", "outputs", "intermediates"):
        if getattr(operator, name) is None:
            setattr(operator, name, [])
    _check_places(f"{where}: inputs", operator.inputs, graph, least=-1)
    _check_places(f"{where}: outputs", operator.outputs, graph, least=0)
    _check_places(f"{where}: intermediates", operator.intermediates, graph, least=-1)
    outputs = ", ".join(f"'{tensor_name(graph.tensors[index])}'" for index in operator.outputs) or "nothing"
    if builtin_code(code) not in OPERATORS:
        raise ModelError(
            f"{where}, which makes {outputs}: built-in {builtin_code(code)} is not known; {_DAMAGED}"
        )
    if operator_name(model, operator) == "CUSTOM":
        custom = (code.customCode or b"").decode("utf-8", "replace")
        flex = "; convert without SELECT_TF_OPS" if custom.startswith("Flex") else ""
        raise ModelError(
            f"custom operator '{custom}' at {where}, which makes {outputs}: only built-in operators run on"
            f" every target{flex or '; export it with these'}"
        )


def _check_places(subject: str, indices: Iterable[int], graph: SubGraph, *, least: int) -> None:
    for index in indices:
        if not least <= index < len(graph.tensors):
            raise ModelError(f"{subject}: tensor {index} of {len(graph.tensors)}; {_DAMAGED}")


def _check_order(model: Model, number: int, graph: SubGraph) -> None:
    """Every tensor that is read holds data, is an input, or was written by an operator before."""
    _check_places(f"subgraph {number}: inputs", graph.inputs, graph, least=0)
    _check_places(f"subgraph {number}: outputs", graph.outputs, graph, least=0)
    filled = {int(index) for index in graph.inputs}
    filled |= {
        index
        for index, tensor in enumerate(graph.tensors)
        if tensor.isVariable or stored_bytes(model, tensor)
    }
    ready = filled | {index for index, tensor in enumerate(graph.tensors) if 0 in shape_of(tensor)}
    for position, operator in enumerate(graph.operators):
        name = operator_name(model, operator)
        for index in operator.inputs:
            if index >= 0 and index not in ready:
                where = _tensor_place(number, index, graph.tensors[index])
                raise ModelError(f"operator {position} ({name}): reads {where} before it is made; {_DAMAGED}")
        for index in operator.outputs:
            if index in filled:
                where = _tensor_place(number, index, graph.tensors[index])
                raise ModelError(
                    f"operator {position} ({name}): makes {where}, which exists already; {_DAMAGED}"
                )
            filled.add(int(index))
            ready.add(int(index))
    _check_made(number, graph, ready)


def _check_made(number: int, graph: SubGraph, ready: set[int]) -> None:
    for index in graph.outputs:
        if index not in ready:
            where = _tensor_place(number, index, graph.tensors[index])
            raise ModelError(f"output {where} is made by no operator; {_DAMAGED}")


def _check_signatures(model: Model) -> None:
    for signature in model.signatureDefs or []:
        key = (signature.signatureKey or b"").decode("utf-8", "replace")
        if not 0 <= signature.subgraphIndex < len(model.subgraphs):
            raise ModelError(f"signature '{key}': subgraph {signature.subgraphIndex}; {_DAMAGED}")
        graph = model.subgraphs[signature.subgraphIndex]
        maps: Sequence[Any] = [*(signature.inputs or []), *(signature.outputs or [])]
        _check_places(f"signature '{key}'", [item.tensorIndex for item in maps], graph, least=0)


def _tensor_place(number: int, index: int, tensor: Tensor) -> str:
    name = (tensor.name or b"").decode("utf-8", "replace")
    inner = f" of subgraph {number}" if number else ""
    return f"tensor {index} '{name}'{inner}"
