"""A simple, read-only view of an ONNX graph without protobuf: nodes, constants, shapes and dtypes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgekit_toolkit.onnx_graph.specs import real_inputs
from edgekit_toolkit.tflite.layout.forms import Shape
from edgekit_toolkit.tflite.refusal import UnknownTensorError

# The activation that an operator applies to its result, by TFLite's names.
NO_ACTIVATION: Final = "NONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An operator of the graph.

    Attributes:
        op_type: The ONNX operator type, or our name for nodes that `fusion` joined.
        inputs: The names of the input tensors, empty for an omitted input.
        outputs: The names of the output tensors, empty for an unused output.
        attributes: A dict from name to value. Texts are bytes.
        name: The name in the file, possibly empty.
        domain: The domain, empty for ONNX's own.
        activation: The activation that TFLite applies to the result.
    """

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    domain: str = ""
    activation: str = NO_ACTIVATION

    @property
    def place(self) -> str:
        """A text for messages that contains the name of the node, or else the names of its outputs."""
        # What the converter adds behind a semicolon is no name of the model.
        outputs = ", ".join(name.partition(";")[0] for name in self.outputs if name)
        return f"node '{self.name}'" if self.name else f"the node that makes '{outputs}'"

    @property
    def operator(self) -> str:
        """The operator type, or `DOMAIN.TYPE` if the domain is not ONNX's own."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    def input(self, number: int) -> str:
        """Return the name of input `number`, empty if it is omitted."""
        return self.inputs[number] if number < len(self.inputs) else ""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model for the conversion.

    Attributes:
        nodes: The nodes in an order in which they can run.
        inputs, outputs: The names of the model's inputs and outputs.
        constants: A dict from the name of a tensor to its value.
        shapes, dtypes: The known shapes and element types of tensors, by name.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, NDArray[Any]]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, "np.dtype[Any]"]

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Node]]:
        """A dict from a tensor to the nodes that read it. A node that reads it twice is listed twice."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.inputs:
                readers.setdefault(name, []).append(node)
        return readers

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """A dict from a tensor to the node that makes it. Inputs and constants have no entry."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    def sole_reader(self, name: str) -> Node | None:
        """Return the only reader of a tensor, or None if it is read more than once or is an output."""
        readers = self.readers.get(name, ())
        return readers[0] if len(readers) == 1 and name not in self.outputs else None

    def is_read(self, name: str) -> bool:
        """Return whether a tensor is read by a node or is an output of the graph."""
        return bool(name) and (name in self.readers or name in self.outputs)

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor.

        Raises:
            UnknownTensorError: The shape depends on the data or cannot be inferred.
        """
        if name not in self.shapes:
            raise UnknownTensorError(
                f"the shape of '{name}' depends on the data or cannot be inferred, and TFLite needs it fixed"
            )
        return self.shapes[name]

    def dtype(self, name: str) -> "np.dtype[Any]":
        """Return the element type of a tensor.

        Raises:
            UnknownTensorError: The type is unknown or does not exist in numpy.
        """
        if name not in self.dtypes:
            raise UnknownTensorError(f"the element type of '{name}' is not known, or no plain tensor's")
        return self.dtypes[name]

    def is_constant(self, name: str) -> bool:
        """Return whether a tensor is a constant."""
        return name in self.constants


def graph_of(model: onnx.ModelProto) -> Graph:
    """Return the view of a model. Shapes and types are taken from the model (see `prepare`)."""
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    shapes: dict[str, Shape] = {name: array.shape for name, array in constants.items()}
    dtypes = {name: array.dtype for name, array in constants.items()}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if value.type.WhichOneof("value") != "tensor_type" or value.name in constants:
            continue
        if kind.HasField("shape") and all(size.HasField("dim_value") for size in kind.shape.dim):
            shapes[value.name] = tuple(int(size.dim_value) for size in kind.shape.dim)
        if kind.elem_type and kind.elem_type != onnx.TensorProto.STRING:
            dtypes[value.name] = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return Graph(
        nodes=tuple(node_of(node) for node in graph.node),
        inputs=tuple(value.name for value in real_inputs(graph)),
        outputs=tuple(value.name for value in graph.output),
        constants=constants,
        shapes=shapes,
        dtypes=dtypes,
    )


def text_of(node: Node, name: str, default: str) -> str:
    """Return the value of a text attribute, or `default` if it is not set."""
    value = node.attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def node_of(node: onnx.NodeProto) -> Node:
    return Node(
        op_type=node.op_type,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes={item.name: helper.get_attribute_value(item) for item in node.attribute},
        name=node.name,
        domain="" if node.domain == "ai.onnx" else node.domain,
    )
