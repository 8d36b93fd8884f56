"""Replaces each `If` with a constant condition by the branch that always runs.

A condition is constant if it depends only on constants, fixed inputs or known sizes. The weights of the other
branch are removed. Source: ONNX's operator `If`.
"""

import onnx

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    attribute,
    copy_model,
    fresh_name,
    remove_unused_initializers,
    replace_nodes,
)
from edgekit_toolkit.onnx_graph.traversal import bodies
from edgekit_toolkit.passes import fold_constants
from edgekit_toolkit.passes.foreign import simplify


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which each `If` with a constant condition is replaced by the chosen branch.

    This is repeated, because an inlined branch may make other conditions constant.

    Raises:
        Exception: onnxoptimizer or onnxruntime failed. Their exceptions have no common base class.
    """
    result = copy_model(model)
    while inline_branches(result.graph):
        inferred = onnx.shape_inference.infer_shapes(result, data_prop=True)
        result = fold_constants.run(simplify(inferred))
    return result


def inline_branches(graph: onnx.GraphProto) -> bool:
    """Replace each `If` with a constant condition by the chosen branch. Return whether any was replaced."""
    is_changed = False
    while _inline_first(graph):
        is_changed = True
    if is_changed:
        remove_unused_initializers(graph)
    return is_changed


def _inline_first(graph: onnx.GraphProto) -> bool:
    index = GraphIndex(graph)
    for node in graph.node:
        condition = index.constant(node.input[0]) if node.op_type == "If" else None
        if condition is not None:
            branch = attribute(node, "then_branch" if condition.all() else "else_branch")
            replace_nodes(graph, [node], _inlined(index, node, branch))
            return True
    return False


def _inlined(index: GraphIndex, node: onnx.NodeProto, branch: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the branch's nodes under names that the graph does not use; its weights become the graph's."""
    body = onnx.GraphProto()
    body.CopyFrom(branch)
    names = [tensor.name for tensor in body.initializer]
    names += [name for inner in body.node for name in inner.output if name]
    rename_tensors(body, {name: fresh_name(index, f"{name}_inlined") for name in names})
    index.graph.initializer.extend(body.initializer)
    pairs = zip(body.output, node.output, strict=True)
    return [
        *body.node,
        *(onnx.helper.make_node("Identity", [value.name], [output]) for value, output in pairs if output),
    ]


def rename_tensors(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Rename tensors in a graph and its sub-graphs, in place.

    Sub-graphs must not redefine a name of an outer graph.
    """
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for value in graph.output:
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for inner in bodies(node):
            rename_tensors(inner, names)
