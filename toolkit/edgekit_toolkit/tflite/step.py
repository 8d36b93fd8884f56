"""The interface for functions that write a node: access to its inputs, and methods to add operators."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekit_toolkit.tflite.builder import Builder, Options, Tensor
from edgekit_toolkit.tflite.layout.forms import Form, Shape, held_shape
from edgekit_toolkit.tflite.layout.rules import Rule
from edgekit_toolkit.tflite.layout.values import Values
from edgekit_toolkit.tflite.node_facts import NodeFacts
from edgekit_toolkit.tflite.view import NO_ACTIVATION, Graph, Node


class Step(NodeFacts):
    def __init__(
        self, node: Node, graph: Graph, builder: Builder, values: Values, planned: tuple[Rule, Form]
    ) -> None:
        super().__init__(node, graph)
        self.builder = builder
        self._values = values
        rule, self.form = planned
        self._reads, self._writes = rule.reads(self.form), rule.writes(self.form)

    # Held axes and sizes.

    def axis(self, axis: int) -> int:
        """Return the position of an ONNX axis in the node's layout. Negative axes count from the end."""
        rank = sum(1 for axis in self.form if axis >= 0)
        return self.form.index(axis % rank)

    def held(self, number: int = 0) -> Shape:
        """Return the shape in which output `number` is stored."""
        return held_shape(self._writes[number], self.out_shape(number))

    # Reading and writing tensors.

    def read(self, number: int, form: Form | None = None) -> Tensor:
        """Return input `number` as a tensor in the layout `form`, by default in the node's layout."""
        return self._values.read(self.node.input(number), self._reads[number] if form is None else form)

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
        """Add an operator with one output, which has `dtype` or else the type of the first input."""
        if dtype is None:
            first = next(tensor for tensor in inputs if tensor is not None)
            dtype = first.dtype
        return self.builder.operator(kind, inputs, [(shape, dtype)], options, version)[0]

    def unary(self, kind: str, tensor: Tensor, options: Options | None = None) -> Tensor:
        """Add an operator on one tensor. Its result has the same shape and type."""
        return self.emit(kind, [tensor], tensor.shape, options)

    def binary(self, kind: str, first: Tensor, right: Tensor, activation: str = NO_ACTIVATION) -> Tensor:
        """Add an operator on two tensors, which are broadcast.

        `activation` is the fused activation. It is only used by ADD, SUB, MUL and DIV.
        """
        table = {"ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions", "DIV": "DivOptions"}.get(kind)
        options = Options(table, fused(activation)) if table else None
        return self.emit(kind, [first, right], np.broadcast_shapes(first.shape, right.shape), options)

    def gathered(self, tensor: Tensor, axis: int, positions: Sequence[int]) -> Tensor:
        """Return a GATHER along an axis of a stored tensor, or `tensor` itself if nothing changes."""
        if list(positions) == list(range(tensor.shape[axis])):
            return tensor
        shape = (*tensor.shape[:axis], len(positions), *tensor.shape[axis + 1 :])
        inputs = [tensor, self.numbers(positions)]
        return self.emit("GATHER", inputs, shape, Options("GatherOptions", {"axis": axis}))

    def number(self, value: float, dtype: "np.dtype[Any] | None" = None) -> Tensor:
        """Return a constant scalar, float32 by default."""
        return self.builder.constant(np.array(value, dtype or np.float32))

    def numbers(self, values: Sequence[int]) -> Tensor:
        """Return a constant int32 [count], for example for axes or sizes."""
        return self.builder.constant(np.array(values, np.int32))

    def give(self, tensor: Tensor, number: int = 0) -> None:
        """Set the tensor of output `number`. Raises RefusedError if ONNX inferred another shape."""
        self._values.give(self.node.outputs[number], self._writes[number], tensor)


def fused(activation: str) -> dict[str, Any]:
    """Return the option field for a fused activation, such as `RELU6`."""
    codes = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}
    return {"fusedActivationFunction": codes[activation]}
