"""Drop everything that does not contribute to an output: nodes, initializers, remarks, recorded shapes.

Inputs stay, used or not, because callers pass them; so does the metadata, which applications read.
"""

import onnx

from edgekit_toolkit.onnx_graph.index import copy_model, reads, remove_unused_initializers
from edgekit_toolkit.onnx_graph.traversal import graphs


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with only the parts that its outputs need."""
    result = copy_model(model)
    needed = {value.name for value in result.graph.output}
    nodes = []
    for node in reversed(result.graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(reads(node))
    if len(nodes) != len(result.graph.node):
        del result.graph.node[:]
        result.graph.node.extend(reversed(nodes))
    remove_unused_initializers(result.graph)
    result.ClearField("doc_string")
    for graph in graphs(result.graph):
        graph.ClearField("doc_string")
        graph.ClearField("value_info")  # engines infer shapes again
        for node in graph.node:
            node.ClearField("doc_string")
    return result
