"""Access to the attributes of a node and to the shapes, types and constants of its inputs and outputs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.layout.forms import Shape
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.view import Graph, Node


class NodeFacts:
    def __init__(self, node: Node, graph: Graph) -> None:
        self.node, self.graph = node, graph

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the node, or `default` if it is not set. Strings are returned as `str`."""
        value = self.node.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def has(self, number: int) -> bool:
        return bool(self.node.input(number))

    def shape(self, number: int) -> Shape:
        """Return the ONNX shape of input `number`. Raises UnknownTensorError if it is unknown."""
        return self.graph.shape(self.node.input(number))

    def dtype(self, number: int) -> "np.dtype[Any]":
        return self.graph.dtype(self.node.input(number))

    def out_shape(self, number: int = 0) -> Shape:
        """Return the ONNX shape of output `number`. Raises UnknownTensorError if it is unknown."""
        return self.graph.shape(self.node.outputs[number])

    def require(self, *dtypes: str) -> None:
        """Raise RefusedError unless the first input has one of `dtypes`, such as `float32`."""
        if self.dtype(0).name not in dtypes:
            names = ", ".join(sorted(dtypes))
            raise RefusedError(f"it has no TFLite kernel for {self.dtype(0)}, only for {names}")

    def out_dtype(self) -> "np.dtype[Any]":
        return self.graph.dtype(self.node.outputs[0])

    def value(self, number: int) -> NDArray[Any] | None:
        """Return the value of input `number`, or None if it is omitted or not constant."""
        return self.graph.constants.get(self.node.input(number))

    def constant(self, number: int, role: str) -> NDArray[Any]:
        """Return the value of input `number`, which must be constant. `role` is its name in the message.

        Raises:
            RefusedError: The input is omitted or not constant.
        """
        value = self.value(number)
        if value is None:
            raise RefusedError(
                f"{role} ('{self.node.input(number)}') must be constant, and is computed in the graph"
            )
        return value

    def option(self, name: str, number: int) -> list[int] | None:
        """Return the integers of the attribute `name`, or of input `number` if the attribute is not set.

        Return None if the node has neither.

        Raises:
            RefusedError: The input is not constant.
        """
        if name in self.node.attributes:
            return [int(item) for item in np.atleast_1d(self.node.attributes[name])]
        return [int(item) for item in self.constant(number, name).reshape(-1)] if self.has(number) else None
