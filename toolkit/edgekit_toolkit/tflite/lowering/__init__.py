"""Replaces ONNX operators that TFLite lacks by other ONNX operators."""

import sys

import onnx
from onnx import helper

from edgekit_runtime.system.folder_modules import import_modules
from edgekit_toolkit.onnx_graph.index import opset, set_items
from edgekit_toolkit.tflite.lowering.body import LOWERINGS, Body
from edgekit_toolkit.tflite.refusal import REFUSED, RefusedError
from edgekit_toolkit.tflite.view import graph_of, node_of

import_modules(sys.modules[__name__])


def lower(model: onnx.ModelProto) -> bool:
    """Replace the nodes in `LOWERINGS` in place, and return whether any node was replaced.

    All shapes must be known. A node that cannot be replaced gets an attribute `REFUSED` with the reason.
    """
    graph, version = graph_of(model), opset(model)
    nodes, is_changed = list[onnx.NodeProto](), False
    for proto in model.graph.node:
        node = node_of(proto)
        nodes.append(proto)
        if node.op_type not in LOWERINGS or node.domain or REFUSED in node.attributes:
            continue
        body = Body(node, graph, version)
        try:
            values = LOWERINGS[node.op_type](body)
        except RefusedError as refused:
            proto.attribute.append(helper.make_attribute(REFUSED, str(refused)))
            continue
        if values is not None:
            body.give(values)
            nodes[-1:] = body.nodes
            model.graph.initializer.extend(body.constants)
            is_changed = True
    if is_changed:
        set_items(model.graph.node, nodes)
    return is_changed
