"""Summarises a `.tflite` model: operators, layers with their precision, and quantized inputs and outputs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from edgekit_toolkit.onnx_graph.traversal import StoredLayer
from edgekit_toolkit.tflite.flatbuffer import (
    TYPES,
    Model,
    Operator,
    SubGraph,
    Tensor,
    operator_name,
    operators,
    shape_of,
    stored_bytes,
    tensor_name,
)

# A dict from operators with weights to the index of the activation. Other inputs are weights if constant.
LAYERS: Final[Mapping[str, int]] = {
    "BATCH_MATMUL": 0,
    "CONV_2D": 0,
    "CONV_3D": 0,
    "DEPTHWISE_CONV_2D": 0,
    "EMBEDDING_LOOKUP": 0,
    "FULLY_CONNECTED": 0,
    "TRANSPOSE_CONV": 2,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": 0,
}
# Precision of a layer that quantizes its input at run time.
DYNAMIC: Final = "dynamic int8"
_WIDENS: Final = frozenset({"DEQUANTIZE", "DENSIFY"})
_INTEGERS: Final = frozenset({"INT8", "UINT8", "INT16"})
_STORED: Final = {
    "INT8": "int8 weights",
    "UINT8": "int8 weights",
    "INT4": "int4 weights",
    "INT2": "int2 weights",
    "FLOAT16": "fp16 weights",
}


@dataclass(frozen=True, slots=True)
class InterfaceTensor:
    """An input or output as stored in the file.

    Attributes:
        shape: The shape, with -1 for a free dimension.
        scale, zero_point: The scale and zero point of the codes, or None for a tensor that is not quantized.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None
    zero_point: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TfliteSummary:
    """The summary of a `.tflite` model.

    Attributes:
        operators: A dict from the name of an operator to the number of its uses, most frequent first.
        subgraphs: The number of sub-graphs. If it is above one, there is control flow or several signatures.
        tensors: The number of tensors in all sub-graphs, including constants.
        weight_bytes: The size of all constants.
        layers: A dict from the first output of each operator with weights to its weight type and size.
        integer_operators: The number of operators that compute with 8- or 16-bit codes.
        description: The description that the converter wrote to the file, possibly empty.
    """

    operators: Mapping[str, int]
    subgraphs: int
    tensors: int
    weight_bytes: int
    layers: Mapping[str, StoredLayer]
    inputs: tuple[InterfaceTensor, ...]
    outputs: tuple[InterfaceTensor, ...]
    integer_operators: int
    description: str

    @property
    def quantized(self) -> bool:
        """Whether weights or arithmetic are quantized. Such a model should not be quantized again."""
        stored = any(layer.precision not in {"fp32", "fp16 weights"} for layer in self.layers.values())
        return stored or self.integer_operators > 0


def summarise(model: Model) -> TfliteSummary:
    """Return the summary of a model. Its file must have been checked by `importers.tflite`."""
    counts = Counter(operator_name(model, operator) for _, _, operator in operators(model))
    main = model.subgraphs[0]
    return TfliteSummary(
        operators=dict(counts.most_common()),
        subgraphs=len(model.subgraphs),
        tensors=sum(len(graph.tensors) for graph in model.subgraphs),
        weight_bytes=sum(len(buffer.data) for buffer in model.buffers if buffer.data is not None),
        layers=stored_layers(model),
        inputs=tuple(_interface(main.tensors[index]) for index in main.inputs),
        outputs=tuple(_interface(main.tensors[index]) for index in main.outputs),
        integer_operators=sum(
            computes_in_integers(model, graph, operator) for graph, _, operator in operators(model)
        ),
        description=(model.description or b"").decode("utf-8", "replace"),
    )


def stored_layers(model: Model) -> dict[str, StoredLayer]:
    """Return a dict from the first output of each operator with weights to its weight type and size."""
    layers = {}
    for graph, _, operator in operators(model):
        name = operator_name(model, operator)
        if name not in LAYERS or not len(operator.outputs):
            continue
        weights = _weights(model, graph, operator, LAYERS[name])
        if not weights:
            continue
        largest = max(weights, key=lambda tensor: stored_bytes(model, tensor))
        if computes_in_integers(model, graph, operator):
            precision = "int8"
        else:
            precision = _STORED.get(TYPES[largest.type], "fp32")
            hybrid = largest in [graph.tensors[index] for index in operator.inputs if index >= 0]
            if hybrid and precision in {"int8 weights", "int4 weights"}:
                precision = DYNAMIC
        weight_bytes = sum(stored_bytes(model, tensor) for tensor in weights)
        label = tensor_name(graph.tensors[operator.outputs[0]])
        while label in layers:  # as `quantize.litert.prepare` renames tensors that share a name
            label = f"{label}_{operator.outputs[0]}"
        layers[label] = StoredLayer(precision, weight_bytes)
    return layers


def computes_in_integers(model: Model, graph: SubGraph, operator: Operator) -> bool:
    """Return whether an operator computes with 8- or 16-bit codes. QUANTIZE and DEQUANTIZE do not."""
    if operator_name(model, operator) in {"QUANTIZE", "DEQUANTIZE"}:
        return False
    ends = [*operator.inputs[:1], *operator.outputs[:1]]
    tensors = [graph.tensors[index] for index in ends if index >= 0]
    return bool(tensors) and any(_is_code(tensor) for tensor in tensors)


def _is_code(tensor: Tensor) -> bool:
    quantization = tensor.quantization
    scaled = quantization is not None and quantization.scale is not None and len(quantization.scale) > 0
    return scaled and TYPES[tensor.type] in _INTEGERS


def _weights(model: Model, graph: SubGraph, operator: Operator, activation: int) -> list[Tensor]:
    """Return the constants that an operator reads, also those that another operator widens for it."""
    makers = {
        int(producer.outputs[0]): producer
        for producer in graph.operators
        if len(producer.outputs) == 1 and operator_name(model, producer) in _WIDENS
    }
    roles = []
    for position, index in enumerate(operator.inputs):
        if position == activation or index < 0:
            continue
        source = int(index)
        while source in makers:
            source = int(makers[source].inputs[0])
        if stored_bytes(model, graph.tensors[source]):
            roles.append(graph.tensors[source])
    return roles


def _interface(tensor: Tensor) -> InterfaceTensor:
    free = tensor.shapeSignature
    sizes = shape_of(tensor) if free is None or not len(free) else tuple(int(size) for size in free)
    codes = _is_code(tensor)
    points = tensor.quantization.zeroPoint if codes else None
    return InterfaceTensor(
        name=tensor_name(tensor),
        dtype=TYPES[tensor.type].lower(),
        shape=sizes,
        scale=float(tensor.quantization.scale[0]) if codes else None,
        zero_point=None if not codes else (int(points[0]) if points is not None and len(points) else 0),
    )
