"""Computes everything that does not depend on the inputs, and stores the results as initializers.

Control flow, random operators, quantization and dequantization are not folded. Folding a DequantizeLinear
would replace int8 weights by float32. Large results that need more space than their sources are not folded.
"""

import math
from collections.abc import Set
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, shape_inference

from edgekit_runtime.sessions.ort import OrtOptions
from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    attribute,
    copy_model,
    reads,
    remove_unused_initializers,
    set_items,
)
from edgekit_toolkit.onnx_graph.traversal import RANDOM_OPERATORS, graphs
from edgekit_toolkit.openings.sessions import open_ort

MAX_GROWN_BYTES: Final = 64 << 10
KEPT_OPERATORS: Final = frozenset(
    RANDOM_OPERATORS
    | {"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"}
    | {"If", "Loop", "Scan"}
)
VALUE_DTYPES: Final = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def run(model: onnx.ModelProto, max_grown_bytes: int = MAX_GROWN_BYTES) -> onnx.ModelProto:
    """Return a copy of `model` with an initializer for each result that does not depend on the inputs.

    Results of up to `max_grown_bytes` are stored even if they are larger than their sources.
    """
    result = copy_model(model)
    for graph in reversed(list(graphs(result.graph))):  # writing a graph copies the ones inside
        _store_constant_nodes(graph)
    folded = _foldable(result, max_grown_bytes)
    if folded:
        values = _evaluate(result, folded)
        nodes = enumerate(result.graph.node)
        set_items(result.graph.node, (node for position, node in nodes if position not in folded))
        result.graph.initializer.extend(
            numpy_helper.from_array(array, name) for name, array in values.items()
        )
    remove_unused_initializers(result.graph)
    return result


def _store_constant_nodes(graph: onnx.GraphProto) -> None:
    outputs = {value.name for value in graph.output}
    remaining = []
    for node in graph.node:
        tensor = _constant(node) if node.op_type == "Constant" and node.output[0] not in outputs else None
        if tensor is None:
            remaining.append(node)
        else:
            graph.initializer.append(tensor)
    set_items(graph.node, remaining)


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the value of a Constant node as an initializer; None for sparse values and strings."""
    tensor = attribute(node, "value")
    if tensor is None:
        for name, dtype in VALUE_DTYPES.items():
            value = attribute(node, name)
            if value is not None:
                return numpy_helper.from_array(np.asarray(value, dtype), node.output[0])
        return None
    stored = onnx.TensorProto()
    stored.CopyFrom(tensor)
    stored.name = node.output[0]
    return stored


def _foldable(model: onnx.ModelProto, max_grown_bytes: int) -> set[int]:
    """Return the places of the nodes whose results can be stored."""
    index = GraphIndex(model.graph)
    # Constant tensor -> the stored bytes of its sources.
    sources = {name: frozenset([name]) for name in index.initializers}
    stored_bytes = {name: tensor.ByteSize() for name, tensor in index.initializers.items()}
    sizes = _known_bytes(model)
    folded = set()
    for position, node in enumerate(model.graph.node):
        names = list(reads(node))
        outputs = [name for name in node.output if name]
        if node.op_type in KEPT_OPERATORS or not names or not all(name in sources for name in names):
            continue
        if any(name in index.outputs for name in outputs):
            continue
        origin = frozenset[str]().union(*(sources[name] for name in names))
        allowed = max(max_grown_bytes, sum(stored_bytes[name] for name in origin))
        if any(sizes.get(name, 0) > allowed for name in outputs):
            continue
        folded.add(position)
        sources.update(dict.fromkeys(outputs, origin))
    return folded


def _known_bytes(model: onnx.ModelProto) -> dict[str, int]:
    """Return the sizes of the tensors whose shapes can be inferred."""
    inferred = shape_inference.infer_shapes(model, data_prop=True)
    sizes = {}
    for value in inferred.graph.value_info:
        tensor = value.type.tensor_type
        dims = tensor.shape.dim
        if tensor.HasField("shape") and all(size.HasField("dim_value") for size in dims):
            itemsize = helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
            sizes[value.name] = math.prod(size.dim_value for size in dims) * itemsize
    return sizes


def _evaluate(model: onnx.ModelProto, folded: Set[int]) -> dict[str, NDArray[Any]]:
    """Return the results of the folded nodes that the rest of the graph reads."""
    constant = [node for position, node in enumerate(model.graph.node) if position in folded]
    others = [node for position, node in enumerate(model.graph.node) if position not in folded]
    computed = {name for node in constant for name in node.output if name}
    results = sorted(computed & {name for node in others for name in reads(node)})
    if not results:
        return {}
    graph = helper.make_graph(
        constant, "constants", [], [helper.make_empty_tensor_value_info(name) for name in results]
    )
    used = {name for node in constant for name in node.input}
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in used)
    constants = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    session = open_ort(constants.SerializeToString(), OrtOptions(threads=1, optimise=False))
    return session.run({})
