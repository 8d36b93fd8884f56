"""Removes duplicate weights, and nodes and weights that no output needs."""

import hashlib
from typing import Final

import onnx
from onnx import TensorProto, numpy_helper

from edgekit_toolkit.onnx_graph.index import copy_model, reads, remove_unused_initializers, set_items
from edgekit_toolkit.onnx_graph.traversal import graphs

FLOAT_TYPES: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})


def share_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` that stores equal initializers of the top-level graph once.

    Float vectors such as biases are not shared, because they are small and a quantizer gives each its own
    scale.
    """
    result = copy_model(model)
    first: dict[object, str] = {}
    replaced: dict[str, str] = {}
    for tensor in result.graph.initializer:
        if tensor.data_type in FLOAT_TYPES and len(tensor.dims) == 1:
            continue
        if tensor.data_type == TensorProto.STRING:
            continue
        raw = numpy_helper.to_array(tensor).tobytes()
        key = (tensor.data_type, tuple(tensor.dims), hashlib.sha256(raw).digest())
        shared = first.setdefault(key, tensor.name)
        if shared != tensor.name:
            replaced[tensor.name] = shared
    replaced = {name: shared for name, shared in replaced.items() if name not in _fixed_names(result.graph)}
    for graph in graphs(result.graph):
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = replaced.get(name, name)
    remove_unused_initializers(result.graph)
    return result


def _fixed_names(main: onnx.GraphProto) -> set[str]:
    """Names that must stay: outputs of all graphs, and names that an inner graph redefines."""
    inner = [graph for graph in graphs(main) if graph is not main]
    names = {value.name for graph in (main, *inner) for value in graph.output}
    for graph in inner:
        names |= {tensor.name for tensor in graph.initializer}
        names |= {name for node in graph.node for name in node.output}
    return names


def drop_unused(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` without unused nodes, unused initializers, doc strings and recorded shapes.

    Unused inputs are kept because callers pass them. Metadata is kept because applications read it.
    """
    result = copy_model(model)
    needed = {value.name for value in result.graph.output}
    nodes = []
    for node in reversed(result.graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(reads(node))
    set_items(result.graph.node, reversed(nodes))
    remove_unused_initializers(result.graph)
    result.ClearField("doc_string")
    for graph in graphs(result.graph):
        graph.ClearField("doc_string")
        graph.ClearField("value_info")  # engines infer shapes again
        for node in graph.node:
            node.ClearField("doc_string")
    return result
