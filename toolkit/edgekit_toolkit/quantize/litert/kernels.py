"""Finds operators of a float LiteRT model that integer kernels can run, and the ranges that they need."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from edgekit_toolkit.quantize.litert.prepare import read_outputs, used_tensors
from edgekit_toolkit.quantize.precise import OperatorNode, precise_operators
from edgekit_toolkit.tflite.flatbuffer import (
    TYPES,
    Model,
    Operator,
    SubGraph,
    constant,
    operator_name,
    operators,
    stored_bytes,
    tensor_name,
)

COMPUTE: Final = frozenset(
    {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV", "BATCH_MATMUL"}
)
# Operators with int8 kernels in LiteRT that ai-edge-quantizer can request, without those whose results have
# too wide a range for 8 bits: DIV, SQRT, RSQRT, SUM.
_OTHERS: Final = frozenset(
    {
        "ADD",
        "AVERAGE_POOL_2D",
        "CONCATENATION",
        "GATHER",
        "HARD_SWISH",
        "LOGISTIC",
        "MAXIMUM",
        "MAX_POOL_2D",
        "MEAN",
        "MIRROR_PAD",
        "MUL",
        "PACK",
        "PAD",
        "PADV2",
        "RELU",
        "RESHAPE",
        "RESIZE_BILINEAR",
        "RESIZE_NEAREST_NEIGHBOR",
        "SLICE",
        "SOFTMAX",
        "SPACE_TO_DEPTH",
        "SPLIT",
        "STRIDED_SLICE",
        "SUB",
        "TANH",
        "TRANSPOSE",
        "UNPACK",
    }
)
_LARGEST: Final = 1e30


def kernel_names(model: Model, *, elementwise: bool) -> tuple[str, ...]:
    """Return the first outputs of the operators that integer kernels can run, in order.

    The result is empty for a model with control flow. If `elementwise` is False, it only contains matrix
    products.
    """
    if len(model.subgraphs) > 1:  # control flow: a branch may never run while ranges are collected
        return ()
    kinds = COMPUTE | _OTHERS if elementwise else COMPUTE
    main = model.subgraphs[0]
    ends = [tensor_name(main.tensors[index]) for index in main.outputs]
    unbounded, precise = _unbounded(model), precise_operators(operator_nodes(model), ends)
    return tuple(
        tensor_name(main.tensors[operator.outputs[0]])
        for operator in main.operators
        if operator_name(model, operator) in kinds
        and _fits(model, main, operator)
        and tensor_name(main.tensors[operator.outputs[0]]) not in precise
        and not unbounded & {*map(int, operator.inputs), *map(int, operator.outputs)}
    )


def operator_nodes(model: Model) -> list[OperatorNode]:
    """Return the operators of the first sub-graph. `prepare` must have made the tensor names unique."""
    graph = model.subgraphs[0]
    names = [tensor_name(tensor) for tensor in graph.tensors]
    return [
        OperatorNode(
            operator_name(model, operator),
            [
                None if index < 0 or stored_bytes(model, graph.tensors[index]) else names[index]
                for index in operator.inputs
            ],
            [names[index] for index in operator.outputs],
            operator_name(model, operator) in COMPUTE,
        )
        for operator in graph.operators
    ]


def _unbounded(model: Model) -> set[int]:
    """Tensors padded with the lowest float, as before a maximum: no scale can represent their values."""
    return {
        int(operator.outputs[0])
        for graph, _, operator in operators(model)
        if operator_name(model, operator) == "PADV2"
        and (value := constant(model, graph.tensors[operator.inputs[2]])) is not None
        and np.abs(value).max() > _LARGEST
    }


def _fits(model: Model, graph: SubGraph, operator: Operator) -> bool:
    if operator_name(model, operator) == "SOFTMAX" and operator.outputs[0] in graph.outputs:
        return False  # in steps of 1/256 most probabilities would be 0, and float costs no time here
    if set(read_outputs(graph)).intersection((*operator.inputs, *operator.outputs)):
        return False  # free sizes: an output that operators read, too, cannot be copied
    if not used_tensors(graph).issuperset(map(int, operator.outputs)):
        return False  # the library leaves an unread result in float, and the kernel refuses that
    inputs = [graph.tensors[index] for index in operator.inputs if index >= 0]
    outputs = [graph.tensors[index] for index in operator.outputs]
    computed = [tensor for tensor in inputs if not stored_bytes(model, tensor)]
    stored = [tensor for tensor in inputs if stored_bytes(model, tensor)]
    if not computed or any(TYPES[tensor.type] != "FLOAT32" for tensor in (*computed, *outputs)):
        return False
    if any(TYPES[tensor.type] not in {"FLOAT32", "INT32", "INT64"} for tensor in stored):
        return False
    if operator_name(model, operator) in COMPUTE - {"BATCH_MATMUL"}:
        return any(TYPES[tensor.type] == "FLOAT32" for tensor in stored)
    return True


def touched_tensors(model: Model, kernels: Sequence[str]) -> list[str]:
    """Return the sorted names of the float activations that the `kernels` read or write."""
    chosen, names = set(kernels), set()
    for graph, _, operator in operators(model):
        if tensor_name(graph.tensors[operator.outputs[0]]) not in chosen:
            continue
        for index in (*operator.inputs, *operator.outputs):
            tensor = graph.tensors[index]
            if index >= 0 and TYPES[tensor.type] == "FLOAT32" and not stored_bytes(model, tensor):
                names.add(tensor_name(tensor))
    return sorted(names)


def scope(graph: SubGraph, operator: Operator) -> str:
    """Return the text by which ai-edge-quantizer identifies an operator.

    It contains each output name followed by `;`.
    """
    return "".join(f"{tensor_name(graph.tensors[index])};" for index in operator.outputs)
