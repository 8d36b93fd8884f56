"""An index over an ONNX graph: who makes a tensor, who reads it, which tensors are constant.

It does not change the graph; a pass that does builds a new index.
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

# Size of each axis; None if it is not a number.
Shape = tuple[int | None, ...]


class GraphIndex:
    """Producers, consumers and constants of one graph.

    A node with sub-graphs consumes what they read.

    Args:
        shapes: shapes of tensors by name; by default the recorded shapes.

    Attributes:
        producers: name of a tensor -> node that makes it.
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
        """Nodes that read tensor `name`, one entry for each reading input."""
        return self._consumers.get(name, [])

    def only_feeds(self, name: str, node: onnx.NodeProto) -> bool:
        """Whether `node` alone reads tensor `name`, with one input, and `name` is no output of the graph."""
        consumers = self.consumers(name)
        return name not in self.outputs and len(consumers) == 1 and consumers[0] is node

    def constant(self, name: str) -> NDArray[Any] | None:
        """Value of initializer `name`; None for other tensors, and for the default of a graph input."""
        tensor = None if name in self._replaceable else self.initializers.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes passed at construction or, if None, the shapes that the graph records."""
        return recorded_shapes(self.graph) if self._shapes is None else self._shapes

    @cached_property
    def names(self) -> set[str]:
        """All tensor names of the graph and its inner graphs, and the names reserved by `fresh_name`."""
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
    """Return the shape of each tensor whose rank the graph records, by name; free sizes are None."""
    return {
        value.name: tuple(
            int(dim.dim_value) if dim.HasField("dim_value") else None
            for dim in value.type.tensor_type.shape.dim
        )
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }


def inferred_shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """Return the shape of each tensor of the top-level graph whose rank can be inferred, by name."""
    return recorded_shapes(onnx.shape_inference.infer_shapes(model).graph)


def float_tensors(model: onnx.ModelProto) -> frozenset[str]:
    """Names of the float32 activations of the top-level graph that are known to have that type."""
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
    """Value of a node's attribute, or `default` where it is not set."""
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
    """Replace all items of a repeated field, such as `graph.node`, in place; they may be some of its own."""
    new = list(items)
    del field[:]
    field.extend(new)


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy whose outputs are these tensors, without types: the engine infers them."""
    copy = copy_model(model)
    set_items(copy.graph.output, (onnx.ValueInfoProto(name=name) for name in names))
    return copy


def opset(model: onnx.ModelProto) -> int:
    """Return the version of the default operator set that a model imports; 0 if it imports none."""
    return next((int(item.version) for item in model.opset_import if item.domain in DEFAULT_DOMAINS), 0)


def remove_unused_initializers(graph: onnx.GraphProto) -> None:
    """Drop initializers that nothing reads, in place; the default value of an input stays."""
    used = {name for node in graph.node for name in reads(node)}
    used |= {value.name for value in (*graph.input, *graph.output)}
    used_tensors = [tensor for tensor in graph.initializer if tensor.name in used]
    if len(used_tensors) != len(graph.initializer):
        set_items(graph.initializer, used_tensors)


def replace_nodes(
    graph: onnx.GraphProto, old: Sequence[onnx.NodeProto], new: Sequence[onnx.NodeProto]
) -> None:
    """Replace the nodes `old` by `new`, in place. The new nodes stand where the last old node stood."""
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
    """Add an initializer to the indexed graph under a fresh name that starts with `stem`; return the name."""
    name = fresh_name(index, stem)
    tensor = numpy_helper.from_array(value, name)
    index.graph.initializer.append(tensor)
    index.initializers[name] = tensor
    return name


def fresh_name(index: GraphIndex, stem: str) -> str:
    """Reserve and return a tensor name that starts with `stem` and that the graph does not use yet."""
    name, count = stem, 0
    while name in index.names:
        count += 1
        name = f"{stem}_{count}"
    index.names.add(name)
    return name


def rewrite_all(model: onnx.ModelProto, rewrite_one: Callable[[onnx.GraphProto], bool]) -> onnx.ModelProto:
    """Return a copy, rewritten until `rewrite_one` finds nothing more, without unused initializers.

    `rewrite_one`: changes one place of a graph; returns False if there is none to change.
    """
    result = copy_model(model)
    while rewrite_one(result.graph):
        pass
    remove_unused_initializers(result.graph)
    return result
