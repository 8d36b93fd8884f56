"""A node while it is written: the view of an operator family on the model, and the way to return results."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.builder import Builder, Options, Tensor
from edgekit_toolkit.tflite.layout.forms import Form, Shape, held_shape
from edgekit_toolkit.tflite.layout.rules import Rule
from edgekit_toolkit.tflite.layout.values import Values
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.view import NO_ACTIVATION, Graph, Node


class Step:
    """A node, its planned form and the growing graph.

    Attributes:
        node: node of the ONNX model.
        graph: graph of the ONNX model.
        builder: the TFLite graph.
        form: the node's work form.
    """

    def __init__(
        self, node: Node, graph: Graph, builder: Builder, values: Values, planned: tuple[Rule, Form]
    ) -> None:
        self.node, self.graph, self.builder = node, graph, builder
        self._values = values
        rule, self.form = planned
        self._reads, self._writes = rule.reads(self.form), rule.writes(self.form)

    # Facts of the model.

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or `default` where it is not set."""
        return self.node.attributes.get(name, default)

    def text(self, name: str, default: str) -> str:
        """Return an attribute of text."""
        value = self.node.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def has(self, place: int) -> bool:
        """Whether an input is given."""
        return bool(self.node.input(place))

    def shape(self, place: int) -> Shape:
        """Return the ONNX sizes of an input."""
        return self.graph.shape(self.node.input(place))

    def dtype(self, place: int) -> "np.dtype[Any]":
        """Return the element type of an input."""
        return self.graph.dtype(self.node.input(place))

    def out_shape(self, place: int = 0) -> Shape:
        """Return the ONNX sizes of an output."""
        return self.graph.shape(self.node.outputs[place])

    def out_dtype(self) -> "np.dtype[Any]":
        """Return the element type of the first output."""
        return self.graph.dtype(self.node.outputs[0])

    def value(self, place: int) -> NDArray[Any] | None:
        """Return the value of a constant input; None if it is left out or not constant."""
        return self.graph.constants.get(self.node.input(place))

    def constant(self, place: int, what: str) -> NDArray[Any]:
        """Return the value of an input that must be constant.

        Raises:
            RefusedError: it is not constant.
        """
        value = self.value(place)
        if value is None:
            raise RefusedError(
                f"{what} ('{self.node.input(place)}') must be constant, and is computed in the graph"
            )
        return value

    def option(self, name: str, place: int) -> list[int] | None:
        """Return integers that older operator sets hold in an attribute and newer ones in an input.

        Raises:
            RefusedError: the input is not constant.
        """
        if name in self.node.attributes:
            return [int(item) for item in np.atleast_1d(self.node.attributes[name])]
        return [int(item) for item in self.constant(place, name).reshape(-1)] if self.has(place) else None

    # Held axes and sizes.

    def axis(self, axis: int) -> int:
        """Return the held place of an axis of the work form's tensor; negative axes count from the end."""
        rank = sum(1 for place in self.form if place >= 0)
        return self.form.index(axis % rank)

    def held(self, place: int = 0) -> Shape:
        """Return the held sizes of an output."""
        return held_shape(self._writes[place], self.out_shape(place))

    # Reading and writing tensors.

    def read(self, place: int, form: Form | None = None) -> Tensor:
        """Return an input as a tensor in the form of the node's rule, or in `form`."""
        return self._values.read(self.node.input(place), self._reads[place] if form is None else form)

    def emit(
        self,
        kind: str,
        inputs: Sequence[Tensor | None],
        shape: Sequence[int],
        options: Options | None = None,
        *,
        dtype: "np.dtype[Any] | None" = None,
        version: int = 1,
    ) -> Tensor:
        """Add an operator with one result, by default of the element type of its first input."""
        if dtype is None:
            first = next(tensor for tensor in inputs if tensor is not None)
            dtype = first.dtype
        return self.builder.operator(kind, inputs, [(shape, dtype)], options, version)[0]

    def binary(self, kind: str, left: Tensor, right: Tensor, activation: str = NO_ACTIVATION) -> Tensor:
        """Add arithmetic on two tensors that are broadcast to each other."""
        table = {"ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions", "DIV": "DivOptions"}.get(kind)
        options = Options(table, fused(activation)) if table else None
        return self.emit(kind, [left, right], np.broadcast_shapes(left.shape, right.shape), options)

    def number(self, value: float, dtype: "np.dtype[Any] | None" = None) -> Tensor:
        """Return a constant scalar, by default float32."""
        return self.builder.constant(np.array(value, dtype or np.float32))

    def numbers(self, values: Sequence[int]) -> Tensor:
        """Return a constant list of int32: axes, sizes and the like."""
        return self.builder.constant(np.array(values, np.int32))

    def give(self, tensor: Tensor, place: int = 0) -> None:
        """Set the tensor that holds an output in the form of the node's rule."""
        self._values.give(self.node.outputs[place], self._writes[place], tensor)


def fused(activation: str) -> dict[str, Any]:
    """Return the option field of a fused activation, by the schema's numbers."""
    codes = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}
    return {"fusedActivationFunction": codes[activation]}
