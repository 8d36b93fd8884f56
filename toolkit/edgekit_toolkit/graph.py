"""An index over an ONNX graph: who makes a tensor, who reads it, which tensors are constant.

It does not change the graph; a pass that does builds a new index.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper


class GraphIndex:
    """Producers, consumers and constants of one graph (sub-graphs of control flow are seen as readers).

    Attributes:
        graph: the graph that was indexed.
        initializers: initializer by name.
        producers: node that makes a tensor, by tensor name.
        outputs: names of the graph's outputs.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.producers = {name: node for node in graph.node for name in node.output if name}
        self.outputs = {value.name for value in graph.output}
        self._consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in reads(node):
                self._consumers.setdefault(name, []).append(node)

    def consumers(self, name: str) -> list[onnx.NodeProto]:
        """Nodes that read tensor `name`, one entry a reading input."""
        return self._consumers.get(name, [])

    def only_feeds(self, name: str, node: onnx.NodeProto) -> bool:
        """Whether `node` is the only reader of tensor `name`, once, and the caller does not see it."""
        consumers = self.consumers(name)
        return name not in self.outputs and len(consumers) == 1 and consumers[0] is node

    def constant(self, name: str) -> NDArray[Any] | None:
        """Value of initializer `name`, or None where the tensor is not an initializer."""
        tensor = self.initializers.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)


def reads(node: onnx.NodeProto) -> Iterable[str]:
    """Tensor names that a node reads, those read by its sub-graphs included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else list(attribute.graphs)
        for graph in graphs:
            for inner in graph.node:
                yield from reads(inner)
            yield from (value.name for value in graph.output)


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Value of a node's attribute, or `default` where it is not set."""
    for item in node.attribute:
        if item.name == name:
            return helper.get_attribute_value(item)
    return default


def opset(model: onnx.ModelProto) -> int:
    """Version of the default operator set that a model imports."""
    return next((int(item.version) for item in model.opset_import if item.domain in {"", "ai.onnx"}), 0)


def remove_unused_initializers(graph: onnx.GraphProto) -> None:
    """Drop initializers that nothing reads, in place."""
    used = {name for node in graph.node for name in reads(node)} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    if len(kept) != len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(kept)


def replace_nodes(
    graph: onnx.GraphProto, old: Sequence[onnx.NodeProto], new: Sequence[onnx.NodeProto]
) -> None:
    """Put `new` in the place of the last of `old` (in topological order) and drop all of `old`, in place."""
    gone = {id(node) for node in old}
    nodes: list[onnx.NodeProto] = []
    left = len(gone)
    for node in list(graph.node):
        if id(node) not in gone:
            nodes.append(node)
            continue
        left -= 1
        if left == 0:
            nodes.extend(new)
    del graph.node[:]
    graph.node.extend(nodes)


def add_constant(index: GraphIndex, stem: str, value: NDArray[Any]) -> str:
    """Add an initializer under a fresh name that starts with `stem`; returns the name."""
    name = fresh_name(index, stem)
    tensor = numpy_helper.from_array(value, name)
    index.graph.initializer.append(tensor)
    index.initializers[name] = tensor
    return name


def fresh_name(index: GraphIndex, stem: str) -> str:
    """A tensor name that starts with `stem` and that the graph does not use yet."""
    taken = index.initializers.keys() | index.producers.keys() | {value.name for value in index.graph.input}
    name, count = stem, 0
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    return name
