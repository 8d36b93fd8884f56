"""An index of an ONNX graph: the producer and the consumers of each tensor, and the constants.

Changes to the graph do not update the index.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Final

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgekit_toolkit.onnx_graph.traversal import bodies, graphs

DEFAULT_DOMAINS: Final = frozenset({"", "ai.onnx"})
STANDARD_DOMAINS: Final = DEFAULT_DOMAINS | {"ai.onnx.ml"}

# The size of each axis, or None if it is not a number.
Shape = tuple[int | None, ...]


class GraphIndex:
    """The producers, consumers and constants of one graph.

    A node with sub-graphs is a consumer of the tensors that its sub-graphs read.

    Args:
        graph: The graph.
        shapes: The shapes of tensors by name, or None to use the shapes recorded in the graph.

    Attributes:
        producers: A dict from the name of a tensor to the node that produces it.
    """

    def __init__(self, graph: onnx.GraphProto, shapes: Mapping[str, Shape] | None = None) -> None:
        self.graph = graph
        self._shapes = shapes
        self._replaceable = {value.name for value in graph.input}
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.producers = {name: node for node in graph.node for name in node.output if name}
        self.outputs = {value.name for value in graph.output}
        self._consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in reads(node):
                self._consumers.setdefault(name, []).append(node)

    def consumers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read tensor `name`. A node that reads it twice is included twice."""
        return self._consumers.get(name, [])

    def only_feeds(self, name: str, node: onnx.NodeProto) -> bool:
        """Return whether tensor `name` is used once, as an input of `node`, and is not a graph output."""
        consumers = self.consumers(name)
        return name not in self.outputs and len(consumers) == 1 and consumers[0] is node

    def constant(self, name: str) -> NDArray[Any] | None:
        """Return the value of initializer `name`, or None for other tensors and for graph inputs."""
        tensor = None if name in self._replaceable else self.initializers.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes passed to the constructor or, if None, the shapes recorded in the graph."""
        return recorded_shapes(self.graph) if self._shapes is None else self._shapes

    @cached_property
    def names(self) -> set[str]:
        """The names of all tensors in the graph and its sub-graphs, and those reserved by `fresh_name`."""
        names = self._consumers.keys() | self.producers.keys() | self.initializers.keys()
        names |= {value.name for value in (*self.graph.input, *self.graph.output)}
        for inner in islice(graphs(self.graph), 1, None):  # what they read is among the consumers
            names |= {tensor.name for tensor in inner.initializer}
            names |= {name for node in inner.node for name in node.output}
        return names


def reads(node: onnx.NodeProto) -> Iterable[str]:
    """Yield the names of the tensors that a node and its sub-graphs read."""
    yield from (name for name in node.input if name)
    for graph in bodies(node):
        for inner in graph.node:
            yield from reads(inner)
        yield from (value.name for value in graph.output)


def recorded_shapes(graph: onnx.GraphProto) -> dict[str, Shape]:
    """Return the shapes recorded in the graph, by tensor name. Free sizes are None."""
    return {
        value.name: tuple(
            int(dim.dim_value) if dim.HasField("dim_value") else None
            for dim in value.type.tensor_type.shape.dim
        )
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }


def inferred_shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """Return the inferred shapes of the top-level tensors, by name. Free sizes are None."""
    return recorded_shapes(onnx.shape_inference.infer_shapes(model).graph)


def float_tensors(model: onnx.ModelProto) -> frozenset[str]:
    """Return the names of the top-level activations that are known to be float32."""
    values = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    exist = {name for node in model.graph.node for name in node.output} | {
        value.name for value in model.graph.input
    }
    exist -= {tensor.name for tensor in model.graph.initializer}
    return frozenset(
        value.name
        for value in values
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT and value.name in exist
    )


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Return the value of a node's attribute, or `default` if it is not set."""
    for item in node.attribute:
        if item.name == name:
            return helper.get_attribute_value(item)
    return default


def copy_model(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def copy_node(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def set_items(field: Any, items: Iterable[Any]) -> None:
    """Replace all items of a repeated field such as `graph.node`. `items` may include current items."""
    new = list(items)
    del field[:]
    field.extend(new)


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy of the model with these outputs. Their types are not set."""
    copy = copy_model(model)
    set_items(copy.graph.output, (onnx.ValueInfoProto(name=name) for name in names))
    return copy


def opset(model: onnx.ModelProto) -> int:
    """Return the version of the default operator set that a model imports, or 0 if it imports none."""
    return next((int(item.version) for item in model.opset_import if item.domain in DEFAULT_DOMAINS), 0)


def remove_unused_initializers(graph: onnx.GraphProto) -> None:
    """Remove unused initializers in place. Default values of graph inputs are kept."""
    used = {name for node in graph.node for name in reads(node)}
    used |= {value.name for value in (*graph.input, *graph.output)}
    used_tensors = [tensor for tensor in graph.initializer if tensor.name in used]
    if len(used_tensors) != len(graph.initializer):
        set_items(graph.initializer, used_tensors)


def replace_nodes(
    graph: onnx.GraphProto, old: Sequence[onnx.NodeProto], new: Sequence[onnx.NodeProto]
) -> None:
    """Replace the nodes `old` by `new`, in place. The new nodes take the place of the last old node."""
    gone = {id(node) for node in old}
    nodes: list[onnx.NodeProto] = []
    remaining = len(gone)
    for node in list(graph.node):
        if id(node) not in gone:
            nodes.append(node)
            continue
        remaining -= 1
        if remaining == 0:
            nodes.extend(new)
    set_items(graph.node, nodes)


def add_constant(index: GraphIndex, stem: str, value: NDArray[Any]) -> str:
    """Add an initializer to the graph under a new name that starts with `stem`, and return the name."""
    name = fresh_name(index, stem)
    tensor = numpy_helper.from_array(value, name)
    index.graph.initializer.append(tensor)
    index.initializers[name] = tensor
    return name


def fresh_name(index: GraphIndex, stem: str) -> str:
    """Reserve and return an unused tensor name that starts with `stem`."""
    name, count = stem, 0
    while name in index.names:
        count += 1
        name = f"{stem}_{count}"
    index.names.add(name)
    return name


def rewrite_all(model: onnx.ModelProto, rewrite_one: Callable[[onnx.GraphProto], bool]) -> onnx.ModelProto:
    """Apply `rewrite_one` to a copy of the model until it returns False. Then remove unused initializers.

    Args:
        model: The model.
        rewrite_one: Changes one place of a graph in place. Returns False if there is nothing to change.
    """
    result = copy_model(model)
    while rewrite_one(result.graph):
        pass
    remove_unused_initializers(result.graph)
    return result
