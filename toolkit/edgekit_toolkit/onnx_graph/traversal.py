"""Iterates over the graphs, nodes and stored tensors of an ONNX model, including those in control flow."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx
from onnx import numpy_helper


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """How a model stores the weights of one layer.

    Attributes:
        precision: "int8", "int8 weights", "int4 weights", "fp16 weights", "fp32" or "dynamic int8".
        weight_bytes: The size of the layer's constants in the file, including scales.
    """

    precision: str
    weight_bytes: int


RANDOM_OPERATORS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_INTEGER_OPERATORS = frozenset(
    {
        "QuantizeLinear",
        "DynamicQuantizeLinear",
        "QLinearConv",
        "QLinearMatMul",
        "ConvInteger",
        "MatMulInteger",
    }
)

FLOAT_TYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.DOUBLE: "float64",
}
"""A dict from ONNX's floating-point types to their names in numpy or ml_dtypes."""
_CONVERSIONS = frozenset({"Cast", "CastLike", "DequantizeLinear", "QuantizeLinear"})


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs inside a node: the body of a `Loop` or `Scan`, or the branches of an `If`."""
    return [graph for item in node.attribute for graph in ([item.g] if item.HasField("g") else item.graphs)]


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield `graph` and all graphs inside its `If`, `Loop` and `Scan` nodes. Outer graphs come first."""
    yield graph
    yield from _inner_graphs(graph.node)


def time_major_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the recurrent nodes whose first input axis is time."""
    for node in nodes(model):
        is_batch_major = any(item.name == "layout" and item.i for item in node.attribute)
        if node.op_type in {"LSTM", "GRU", "RNN"} and not is_batch_major:
            yield node


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node, including nodes inside control flow."""
    for graph in graphs(model.graph):
        yield from graph.node


def random_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes whose outputs are random.

    Nodes with a `seed` are included, because each run continues the random sequence. A Dropout is included
    unless its `training_mode` is missing or a constant False.
    """
    stored = {
        name: tensor for name, tensor in stored_tensors(model) if tensor.data_type == onnx.TensorProto.BOOL
    }

    def is_training(node: onnx.NodeProto) -> bool:
        mode = node.input[2] if len(node.input) > 2 else ""
        return bool(mode) and (mode not in stored or bool(numpy_helper.to_array(stored[mode]).any()))

    return [
        node
        for node in nodes(model)
        if node.op_type in RANDOM_OPERATORS or (node.op_type == "Dropout" and is_training(node))
    ]


def computes_in_integers(model: onnx.ModelProto) -> bool:
    """Return whether any operator quantizes activations or computes with quantized activations."""
    return any(node.op_type in _INTEGER_OPERATORS for node in nodes(model))


def has_foldable_weights(model: onnx.ModelProto) -> bool:
    """Return whether the model stores quantized weights but computes in float.

    The backend option `fold_weights` makes onnxruntime dequantize such weights when it loads the model.
    """
    is_quantized = any(node.op_type == "DequantizeLinear" for node in nodes(model))
    return is_quantized and not computes_in_integers(model)


def float_types(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the sorted names of the float types in which nodes compute. Type conversions are ignored.

    Args:
        model: A model with inferred shapes. Tensors of unknown type are ignored.
    """
    types_of_values = set()
    for graph in graphs(model.graph):
        types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
        computed = [name for node in graph.node if node.op_type not in _CONVERSIONS for name in node.output]
        types_of_values |= {FLOAT_TYPES[types[name]] for name in computed if types.get(name) in FLOAT_TYPES}
    return tuple(sorted(types_of_values))


def stored_tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield the name and content of each tensor in the file, in initializers and in node attributes.

    Tensors inside functions are included. A sparse tensor is yielded as two tensors, its values and its
    indices.
    """
    inner = [graph for function in model.functions for graph in _inner_graphs(function.node)]
    for graph in (*graphs(model.graph), *inner):
        for tensor in graph.initializer:
            yield tensor.name, tensor
        for sparse in graph.sparse_initializer:
            yield sparse.values.name, sparse.values
            yield f"{sparse.values.name} (indices)", sparse.indices
        yield from _attribute_tensors(graph.node)
    for function in model.functions:
        yield from _attribute_tensors(function.node)


def _inner_graphs(function_nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in function_nodes:
        for body in bodies(node):
            yield from graphs(body)


def _attribute_tensors(attribute_nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, onnx.TensorProto]]:
    for node in attribute_nodes:
        name = node.output[0] if node.output else node.name
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield name, attribute.t
            for tensor in attribute.tensors:
                yield name, tensor
            if attribute.HasField("sparse_tensor"):
                yield name, attribute.sparse_tensor.values
                yield f"{name} (indices)", attribute.sparse_tensor.indices
