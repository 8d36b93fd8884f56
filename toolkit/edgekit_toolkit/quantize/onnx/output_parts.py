"""Finds the parts of outputs that concatenate several tensors.

For example, the output of a detector contains boxes in pixels and scores from 0 to 1. A `Concat` joins them,
and the operators after it only move values. To find the positions of the parts, each joined tensor is
replaced by a tensor that is filled with its number, and the same operators are applied.
"""

from collections.abc import Iterator

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.onnx_graph.adjoint import MOVES, VIEWS
from edgekit_toolkit.onnx_graph.index import GraphIndex, copy_model, copy_node, fresh_name, set_items
from edgekit_toolkit.samples.generated import Feeds

# Not `Pad`, whose own values come from no tensor, nor `Resize`, which may mix values.
_CARRIES = (MOVES | VIEWS | {"Concat", "Transpose"}) - {"Pad", "Resize", "Upsample"}


def output_parts(model: onnx.ModelProto, feeds: Feeds, *, threads: int) -> list[NDArray[np.int64] | None]:
    """Return the origin of each value in outputs that join several tensors.

    The joined tensors are numbered from 0. For each output, the result is an int64 array with the shape of
    the output for `feeds`, which contains the tensor number of each value. It is None for an output that
    joins no tensors, or if onnxruntime cannot run the modified model.
    """
    program = copy_model(model)
    index = GraphIndex(program.graph)
    numbered: dict[str, str] = {}
    positions, sources = [], []
    for position, output in enumerate(model.graph.output):
        parts = list(dict.fromkeys(_sources(index, output.name)))
        if len(parts) > 1 and output.type.tensor_type.elem_type == TensorProto.FLOAT:
            positions.append(position)
            sources.append(parts)
    for parts in sources:
        for number, name in enumerate(parts):
            numbered[name] = _fill(program.graph, index, name, number)
    names = [
        _repeat(program.graph, index, model.graph.output[position].name, numbered) for position in positions
    ]
    if not names:
        return [None] * len(model.graph.output)
    outputs = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    set_items(program.graph.output, outputs)
    try:
        values = run_session(session_for(program, threads=threads), feeds, names)
    except BackendError:
        return [None] * len(model.graph.output)
    numbers = dict(zip(positions, (value.astype(np.int64) for value in values), strict=True))
    return [numbers.get(position) for position in range(len(model.graph.output))]


def _moves(index: GraphIndex, name: str) -> onnx.NodeProto | None:
    node = index.producers.get(name)
    return node if node is not None and node.op_type in _CARRIES else None


def _moved(node: onnx.NodeProto) -> list[str]:
    return list(node.input if node.op_type == "Concat" else node.input[:1])


def _sources(index: GraphIndex, name: str) -> Iterator[str]:
    node = _moves(index, name)
    if node is None:
        yield name
        return
    for part in _moved(node):
        yield from _sources(index, part)


def _fill(graph: onnx.GraphProto, index: GraphIndex, name: str, number: int) -> str:
    """Add a tensor of the shape of `name` whose values are all `number`."""
    shape, filled = fresh_name(index, f"{name}_shape"), fresh_name(index, f"{name}_number")
    value = helper.make_tensor("number", TensorProto.FLOAT, [1], [float(number)])
    graph.node.append(helper.make_node("Shape", [name], [shape]))
    graph.node.append(helper.make_node("ConstantOfShape", [shape], [filled], value=value))
    return filled


def _repeat(graph: onnx.GraphProto, index: GraphIndex, name: str, numbered: dict[str, str]) -> str:
    """Repeat the moves that make `name`, of numbered tensors; returns the name of the result."""
    if name in numbered:
        return numbered[name]
    node = index.producers[name]
    copy = copy_node(node)
    for position, part in enumerate(_moved(node)):
        copy.input[position] = _repeat(graph, index, part, numbered)
    copy.name = fresh_name(index, f"{name}_numbers")
    for position, output in enumerate(node.output):
        copy.output[position] = fresh_name(index, f"{output}_numbers") if output else ""
        if output:
            numbered[output] = copy.output[position]
    graph.node.append(copy)
    return numbered[name]
