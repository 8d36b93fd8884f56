"""Builds the nodes that replace an ONNX node. Arithmetic on `Value` objects adds nodes.

    @lowers("Swish")
    def _swish(body: Body) -> Value:
        x, alpha = body.input(0), float(body.attribute("alpha", 1.0))
        return x * (x * alpha).op("Sigmoid")

Such a function returns None if the node need not be replaced, and raises `RefusedError` if the node is not
supported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, Union

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgekit_toolkit.tflite.node_facts import NodeFacts
from edgekit_toolkit.tflite.view import Graph, Node

Operand: TypeAlias = Union["Value", NDArray[Any], np.generic, float]
Lower: TypeAlias = Callable[["Body"], "Value | Sequence[Value] | None"]
LOWERINGS: Final[dict[str, Lower]] = {}


LowerT = TypeVar("LowerT", bound=Lower)


def lowers(*names: str) -> Callable[[LowerT], LowerT]:
    """Return a decorator that registers a function in `LOWERINGS` for the ONNX operators `names`."""

    def register(lower: LowerT) -> LowerT:
        LOWERINGS.update(dict.fromkeys(names, lower))
        return lower

    return register


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the body. The operators `+`, `-`, `*` and `/` add nodes and also accept numbers."""

    name: str
    body: "Body"
    dtype: "np.dtype[Any]"

    def op(self, kind: str, *operands: Operand, **attributes: Any) -> "Value":
        """Add a node with this value as its first input, and return its first output. See `Body.op`."""
        return self.body.op(kind, self, *operands, **attributes)

    def cast(self, dtype: Any) -> "Value":
        if self.dtype == dtype:
            return self
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.body.op("Cast", self, dtype=dtype, to=code)

    def reshape(self, *sizes: int) -> "Value":
        return self.op("Reshape", np.array(sizes, np.int64))

    def transpose(self, order: Sequence[int]) -> "Value":
        return self.op("Transpose", perm=list(order))

    def slice(self, axis: int, start: int, stop: int, step: int = 1) -> "Value":
        bounds = ([start], [stop], [axis], [step])
        return self.op("Slice", *(np.array(bound, np.int64) for bound in bounds))

    def sum(self, *axes: int) -> "Value":
        return self.op("ReduceSum", np.array(axes, np.int64), keepdims=1, noop_with_empty_axes=1)

    def mean(self, *axes: int) -> "Value":
        return self._reduced("ReduceMean", axes)

    def max(self, *axes: int) -> "Value":
        return self._reduced("ReduceMax", axes)

    def _reduced(self, kind: str, axes: Sequence[int]) -> "Value":
        """Reduce over axes that operator sets below 18 hold in an attribute."""
        if self.body.opset < 18:
            return self.op(kind, axes=list(axes), keepdims=1)
        return self.op(kind, np.array(axes, np.int64), keepdims=1)

    def less(self, other: Operand) -> "Value":
        return self.body.op("Less", self, other, dtype=np.bool_)

    def equals(self, other: Operand) -> "Value":
        return self.body.op("Equal", self, other, dtype=np.bool_)

    def where(self, yes: Operand, no: Operand) -> "Value":
        """Add a Where that selects `yes` where this value is true, else `no`. At least one is a `Value`."""
        example = yes if isinstance(yes, Value) else no
        assert isinstance(example, Value)  # noqa: S101 - for the type checker
        return self.body.op("Where", self, example.like(yes), example.like(no), dtype=example.dtype)

    def like(self, operand: Operand) -> "Value | NDArray[Any]":
        """Convert a number to an array of this value's element type. A `Value` is returned unchanged."""
        return operand if isinstance(operand, Value) else np.asarray(operand, self.dtype)

    def __add__(self, other: Operand) -> "Value":
        return self.op("Add", other)

    def __sub__(self, other: Operand) -> "Value":
        return self.op("Sub", other)

    def __mul__(self, other: Operand) -> "Value":
        return self.op("Mul", other)

    def __truediv__(self, other: Operand) -> "Value":
        return self.op("Div", other)

    def __neg__(self) -> "Value":
        return self.op("Neg")


class Body(NodeFacts):
    """The nodes and constants that replace an ONNX node.

    The name of each new node output and constant starts with the name of the replaced node's first output.
    """

    def __init__(self, node: Node, graph: Graph, opset: int) -> None:
        super().__init__(node, graph)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._stem = next(name for name in node.outputs if name)

    def input(self, number: int) -> Value:
        name = self.node.input(number)
        return Value(name, self, self.graph.dtype(name))

    def is_read(self, number: int) -> bool:
        """Return whether output `number` of the replaced node is used by a node or returned by the model."""
        return number < len(self.node.outputs) and self.graph.is_read(self.node.outputs[number])

    def axis(self, default: int, number: int = 0) -> int:
        return int(self.attribute("axis", default)) % max(len(self.shape(number)), 1)

    def stored(self, array: NDArray[Any]) -> Value:
        """Add a constant and return it."""
        array = np.asarray(array)
        name = f"{self._stem};{len(self.nodes)}c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return Value(name, self, array.dtype)

    def op(self, kind: str, first: Value, *operands: Operand, dtype: Any = None, **attributes: Any) -> Value:
        """Add an ONNX node, and return its first output.

        Numbers in `operands` become constants with the element type of `first`. `dtype` is the type of the
        output, by default that of `first`.
        """
        result = Value(f"{self._stem};{len(self.nodes)}", self, np.dtype(dtype or first.dtype))
        others = [
            operand
            if isinstance(operand, Value)
            else self.stored(operand if isinstance(operand, np.ndarray) else np.asarray(operand, first.dtype))
            for operand in operands
        ]
        inputs = [value.name for value in (first, *others)]
        self.nodes.append(helper.make_node(kind, inputs, [result.name], self.node.name, **attributes))
        return result

    def give(self, values: "Value | Sequence[Value]") -> None:
        """Connect `values` to the outputs of the replaced node, in order."""
        values = [values] if isinstance(values, Value) else values
        for value, name in zip(values, self.node.outputs, strict=False):
            if name:
                self.nodes.append(helper.make_node("Identity", [value.name], [name]))
