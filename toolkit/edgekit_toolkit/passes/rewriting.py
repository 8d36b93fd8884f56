"""The loop of passes that rewrite one place of a graph at a time."""

from collections.abc import Callable

import onnx

from edgekit_toolkit.onnx_graph.index import copy_model, remove_unused_initializers


def rewrite_all(model: onnx.ModelProto, rewrite_one: Callable[[onnx.GraphProto], bool]) -> onnx.ModelProto:
    """Return a copy of `model` in which `rewrite_one` finds nothing more, without unused initializers.

    Args:
        model: model to copy.
        rewrite_one: changes one place of a graph; returns whether there was one.
    """
    result = copy_model(model)
    while rewrite_one(result.graph):
        pass
    remove_unused_initializers(result.graph)
    return result
