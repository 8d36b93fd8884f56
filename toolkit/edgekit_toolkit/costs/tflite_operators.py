"""Computes the work of each operator of a `.tflite` model: arithmetic and memory traffic.

This is the counterpart of `onnx_operators` for LiteRT. Operators that XNNPACK fuses are counted separately.
Free dimensions have the sizes that are stored in the file, so a free batch usually has the size 1.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from numpy.typing import NDArray

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.costs.target_model import NodeCost
from edgekit_toolkit.tflite.flatbuffer import (
    Model,
    Operator,
    SubGraph,
    Tensor,
    constant,
    expected_bytes,
    operator_name,
    shape_of,
    stored_bytes,
    tensor_name,
)
from edgekit_toolkit.tflite.summary import DYNAMIC, computes_in_integers, stored_layers

Shape = tuple[int, ...]

# Multiply-accumulates from the shapes of the inputs and of the output.
_MACS: Final[Mapping[str, Callable[[list[Shape], Shape], int]]] = {
    # Filter [out, height, width, in / groups].
    "CONV_2D": lambda ins, out: math.prod(out) * math.prod(ins[1][1:]),
    # Filter [depth, height, width, in / groups, out].
    "CONV_3D": lambda ins, out: math.prod(out) * math.prod(ins[1][:-1]),
    # Filter [1, height, width, out].
    "DEPTHWISE_CONV_2D": lambda ins, out: math.prod(out) * ins[1][1] * ins[1][2],
    # Output sizes, filter [out, height, width, in], input.
    "TRANSPOSE_CONV": lambda ins, _: math.prod(ins[2][:3]) * math.prod(ins[1]),
    # Weights [out, in].
    "FULLY_CONNECTED": lambda ins, out: math.prod(out) * ins[1][1],
    # Matrices [.., rows, inner], or the other way round. Either side's batch may be broadcast.
    "BATCH_MATMUL": lambda ins, out: math.prod(out) * math.prod(ins[0][-2:]) // out[-2],
}
# Work that is not counted, so 0 would be wrong: other sub-graphs, and layers whose steps follow one another.
_UNCOUNTED: Final = frozenset(
    {
        "BIDIRECTIONAL_SEQUENCE_LSTM",
        "BIDIRECTIONAL_SEQUENCE_RNN",
        "CALL",
        "CONV_3D_TRANSPOSE",
        "IF",
        "LSTM",
        "RNN",
        "STABLEHLO_CONVOLUTION",
        "STABLEHLO_WHILE",
        "SVDF",
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        "UNIDIRECTIONAL_SEQUENCE_RNN",
        "WHILE",
    }
)
_MOST_USED: Final = 0.7
# These only rename memory.
_FREE: Final = frozenset({"RESHAPE", "SQUEEZE", "EXPAND_DIMS"})


def tflite_costs(model: Model, dims: Mapping[str, int] | None = None) -> list[NodeCost]:
    """Return the work of the operators of the first sub-graph.

    An operator that reads only constants is omitted, because it does not run in each inference.

    Args:
        model: A file that the importer has checked, see `flatbuffer.parsed`.
        dims: The sizes of the model's free dimensions, or None for the stored sizes.

    Raises:
        ModelError: `dims` differ from the stored sizes, or the work of an operator cannot be counted.
    """
    graph = model.subgraphs[0]
    stored = _free_sizes(graph)
    if dims and stored and sorted(stored) != sorted(dims.values()):
        raise ModelError(
            f"the work of a .tflite is counted for the sizes that it has as stored, {stored}, and it is used"
            f" with {list(dims.values())}; export it with these sizes, or measure on the device"
        )
    dynamic = {name for name, layer in stored_layers(model).items() if layer.precision == DYNAMIC}
    return [
        _cost(model, graph, operator, dynamic)
        for operator in graph.operators
        if operator_name(model, operator) not in _FREE and _runs_every_time(model, graph, operator)
    ]


def _free_sizes(graph: SubGraph) -> list[int]:
    """Sizes, as stored, of the dimensions of the inputs that may have any size."""
    return [
        stored
        for tensor in _tensors(graph, graph.inputs)
        if tensor.shapeSignature is not None
        for size, stored in zip(tensor.shapeSignature, shape_of(tensor), strict=False)
        if size < 0
    ]


def _runs_every_time(model: Model, graph: SubGraph, operator: Operator) -> bool:
    """Whether an operator has a computed input; operators on constants run only once."""
    return any(not stored_bytes(model, tensor) for tensor in _tensors(graph, operator.inputs))


def _cost(model: Model, graph: SubGraph, operator: Operator, dynamic: AbstractSet[str]) -> NodeCost:
    kind = operator_name(model, operator)
    inputs, outputs = _tensors(graph, operator.inputs), _tensors(graph, operator.outputs)
    stored = [stored_bytes(model, tensor) for tensor in inputs]
    count = _MACS.get(kind)
    macs = count([shape_of(tensor) for tensor in inputs], shape_of(outputs[0])) if count and outputs else 0
    if kind == "CONV_2D":
        macs = round(macs * _share_used(constant(model, inputs[1])))
    name = tensor_name(outputs[0]) if outputs else kind
    if kind in _UNCOUNTED:
        raise ModelError(
            f"operator {kind} that makes {name!r}: its work cannot be counted; measure on the device instead"
        )
    in_codes = name in dynamic or computes_in_integers(model, graph, operator)
    return NodeCost(
        name=name,
        op=kind,
        macs=macs,
        bytes_read=sum(
            _bytes(source) for source, is_stored in zip(inputs, stored, strict=True) if not is_stored
        ),
        bytes_written=sum(_bytes(output) for output in outputs),
        weight_bytes=sum(stored),
        precision="int8" if in_codes else "fp32",
    )


def _share_used(filters: NDArray[Any] | None) -> float:
    """Share of the columns of a convolution's weights that an output channel uses; 1 unless it is small.

    Where pixels are folded into channels (`quantize.litert.fold`) each output channel has zeros of its own:
    they fill steps that a kernel runs in any case. Channels of zeros only count like others.
    """
    if filters is None:
        return 1.0
    used = filters.any(axis=1).reshape(len(filters), -1)
    live = used[used.any(axis=1)][:, used.any(axis=0)]
    if not live.size or live.mean() > _MOST_USED:
        return 1.0
    return float(live.mean() * live.shape[1] / used.shape[1])


def _tensors(graph: SubGraph, indices: list[int]) -> list[Tensor]:
    return [graph.tensors[index] for index in indices if index >= 0]


def _bytes(tensor: Tensor) -> int:
    return expected_bytes(tensor) or 0
