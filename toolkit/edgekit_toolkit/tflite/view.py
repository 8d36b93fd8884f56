"""A plain view of an ONNX graph: nodes, constants, shapes, dtypes. It is read-only, and free of protobuf."""

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
    """One operator of the graph.

    Attributes:
        op_type: operator type of ONNX, or our name for nodes that `fusion` joined.
        inputs: tensor names; an empty one is an input that is left out.
        outputs: tensor names; an empty one is an unused output.
        attributes: name -> value; texts are bytes.
        name: name in the file; may be empty.
        domain: empty for ONNX's own.
        activation: TFLite's fused activation, applied to the result.
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
        """How messages name the node: by its name, or by the tensors that it makes."""
        # What the converter adds behind a semicolon is no name of the model.
        outputs = ", ".join(name.partition(";")[0] for name in self.outputs if name)
        return f"node '{self.name}'" if self.name else f"the node that makes '{outputs}'"

    @property
    def operator(self) -> str:
        """The operator's type; `DOMAIN.TYPE` if the domain is not ONNX's own."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    def input(self, number: int) -> str:
        """Return the name of input `number`; empty if it is left out."""
        return self.inputs[number] if number < len(self.inputs) else ""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model as the writer sees it.

    Attributes:
        nodes: in an order in which they can run.
        inputs, outputs: names of the tensors that a caller of the model gives and gets.
        constants: name of a tensor -> its value.
        shapes, dtypes: sizes and element type of the tensors for which they are known.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, NDArray[Any]]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, "np.dtype[Any]"]

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Node]]:
        """Name of a tensor -> nodes that read it, listed for each input; no entry without a reader."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.inputs:
                readers.setdefault(name, []).append(node)
        return readers

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Name of a tensor -> the node that makes it; inputs and constants have no entry."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    def sole_reader(self, name: str) -> Node | None:
        """Return the only node that reads `name`; None if it is read more than once or is an output."""
        readers = self.readers.get(name, ())
        return readers[0] if len(readers) == 1 and name not in self.outputs else None

    def is_read(self, name: str) -> bool:
        """Whether a node reads a tensor, or it is an output of the graph."""
        return bool(name) and (name in self.readers or name in self.outputs)

    def shape(self, name: str) -> Shape:
        """Return the sizes of a tensor.

        Raises:
            UnknownTensorError: they depend on the data, or cannot be inferred.
        """
        if name not in self.shapes:
            raise UnknownTensorError(
                f"the shape of '{name}' depends on the data or cannot be inferred, and TFLite needs it fixed"
            )
        return self.shapes[name]

    def dtype(self, name: str) -> "np.dtype[Any]":
        """Return the element type of a tensor.

        Raises:
            UnknownTensorError: it is not known, or numpy has no such type.
        """
        if name not in self.dtypes:
            raise UnknownTensorError(f"the element type of '{name}' is not known, or no plain tensor's")
        return self.dtypes[name]

    def is_constant(self, name: str) -> bool:
        """Whether `constants` holds the value of a tensor."""
        return name in self.constants


def graph_of(model: onnx.ModelProto) -> Graph:
    """Return the view of a model, with the shapes and types that it records (see `prepare`)."""
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
    """Return an attribute that is a text; `default` where it is not set."""
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
