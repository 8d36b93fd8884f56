from edgekit_toolkit.tflite.view import Graph
FUSED_OPERATORS = frozenset()
def fuse(graph: Graph) -> Graph:
    return graph
