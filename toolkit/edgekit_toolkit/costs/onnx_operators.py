"""Computes the work of each kernel of an ONNX model: arithmetic and bytes moved, after common fusions.

Nodes that engines fold or fuse are not counted as kernels. These are:

- constants, and nodes that depend only on constants and shapes
- views, such as Reshape
- biases, scales and activations after a convolution or matrix product
- QuantizeLinear and DequantizeLinear at int8 kernels

The body of a loop is counted as often as it runs. An If counts as its more expensive branch. Loops with a
data-dependent length and operators of other domains are not supported.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.costs.target_model import NodeCost
from edgekit_toolkit.onnx_graph.control_flow import (
    CONTROL_FLOW,
    body_model,
    captured,
    check_steady,
    find_steps,
)
from edgekit_toolkit.onnx_graph.functions import inline_functions, opaque_functions
from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute
from edgekit_toolkit.onnx_graph.shapes import with_shapes
from edgekit_toolkit.onnx_graph.traversal import bodies
from edgekit_toolkit.targets.spec import Precision

# Operand positions (data, weight) of the operators whose work is multiply-accumulates.
_PRODUCTS = {
    "Conv": (0, 1),
    "ConvInteger": (0, 1),
    "ConvTranspose": (0, 1),
    "Gemm": (0, 1),
    "MatMul": (0, 1),
    "MatMulInteger": (0, 1),
    "QLinearConv": (0, 3),
    "QLinearMatMul": (0, 3),
}
_INTEGER = {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
_RECURRENT = {"RNN", "GRU", "LSTM"}
_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"}
_ACTIVATIONS = {"Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "PRelu"}
# With a constant as the other operand, Add and Mul are biases and scales.
_FUSED = _ACTIVATIONS | {"Add", "BatchNormalization", "Mul"}
# These read as much of their first input as they write, not all of it.
_PICKS = {"Gather", "GatherElements", "GatherND", "Slice", "Split"}
# Multiply-accumulate work that is not counted here, so 0 would be wrong. Functions are written out.
_UNCOUNTED = {"Attention", "CausalConvWithState", "DeformConv", "Einsum", "LinearAttention"}


def node_costs(
    model: onnx.ModelProto, dims: Mapping[str, int] | None = None, *, float_outputs: bool = False
) -> list[NodeCost]:
    """Return the work of each kernel of `model`, in the order of its nodes.

    Args:
        model: An ONNX model. It is not changed.
        dims: A dict from the name of a free dimension (see `specs.free_dims`) to its size, such as `{"N":
            1}`.
        float_outputs: Whether the engine has int8 kernels with float outputs, as TensorRT does. If False, a
            convolution or matrix product counts as float unless a QuantizeLinear follows it.

    Raises:
        ModelError: A free dimension has no size, a shape cannot be inferred, or the work of an operator
            cannot be counted.
    """
    written_out = inline_functions(model, _UNCOUNTED | opaque_functions(model)) or model
    return _Counter(with_shapes(written_out, dims or {}), float_outputs=float_outputs).kernels()


def _work(costs: Sequence[NodeCost]) -> tuple[int, int, int]:
    """Key that orders branches by cost: multiply-accumulates, then bytes, then kernels."""
    return (
        sum(cost.repeats * cost.macs for cost in costs),
        sum(cost.repeats * cost.traffic_bytes for cost in costs),
        sum(cost.repeats for cost in costs),
    )


class _Counter:
    """Counts the kernels of one graph with known shapes."""

    def __init__(
        self, model: onnx.ModelProto, *, float_outputs: bool, static: Set[str] = frozenset()
    ) -> None:
        graph = model.graph
        self._model = model
        self._float_outputs = float_outputs
        self._graph = graph
        self._index = GraphIndex(graph)
        self._values = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
        self._types = {name: kind.tensor_type for name, kind in self._values.items()}
        self._static = self._static_tensors(static)
        self._fused: set[int] = set()
        for node in graph.node:
            if self._is_fused(node):
                self._fused.add(id(node))

    def kernels(self) -> list[NodeCost]:
        costs = []
        for node in self._graph.node:
            if all(name in self._static for name in node.output if name):
                continue
            if node.domain not in {"", "ai.onnx"} or node.op_type in _UNCOUNTED:
                raise ModelError(
                    f"node {_name(node)!r}: the work of operator {node.domain or 'ai.onnx'}::{node.op_type} "
                    "cannot be counted; measure on the device instead"
                )
            if node.op_type in CONTROL_FLOW:
                costs.extend(self._control_flow(node))
            elif node.op_type not in _VIEWS and id(node) not in self._fused and not self._is_absorbed(node):
                costs.append(self._cost(node))
        return costs

    def _control_flow(self, node: onnx.NodeProto) -> list[NodeCost]:
        """The kernels of a body, as often as it runs; of an If, those of the branch that runs or may run."""
        if node.op_type == "If":
            branches = [self._body(node, body)[1] for body in bodies(node)]
            return max(branches, key=_work)
        (body,) = bodies(node)
        inner, costs = self._body(node, body)
        check_steady(node, inner)
        steps = find_steps(node, inner, self._values, self._index.initializers)
        return [replace(cost, repeats=cost.repeats * steps) for cost in costs]

    def _body(self, node: onnx.NodeProto, body: onnx.GraphProto) -> tuple[onnx.ModelProto, list[NodeCost]]:
        """A body with known shapes, and the kernels of one run of it."""
        model = body_model(self._model, node, body, self._values, self._index.initializers)
        model = with_shapes(model, {})
        counter = _Counter(model, float_outputs=self._float_outputs, static=captured(body) & self._static)
        return model, counter.kernels()

    def _static_tensors(self, inputs: Set[str]) -> set[str]:
        """Tensors that an engine computes once, when it loads the model."""
        static = set(self._index.initializers) | inputs
        for node in self._graph.node:
            has_shape_only = node.op_type in {"Shape", "Size", "Constant"}
            read = [*node.input, *(name for body in bodies(node) for name in captured(body))]
            if has_shape_only or (read and all(name in static for name in read if name)):
                static.update(name for name in node.output if name)
        return static

    def _is_fused(self, node: onnx.NodeProto) -> bool:
        """Whether the engine computes `node` behind a product, in the same kernel (asked in graph order)."""
        before = self._before(node)
        return (
            node.op_type in _FUSED
            and before is not None
            and self._index.only_feeds(before.output[0], node)
            and (before.op_type in _PRODUCTS or id(before) in self._fused)
        )

    def _before(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The node that makes the only activation that `node` reads, if there is one."""
        inputs = [name for name in node.input if name and name not in self._static]
        return self._index.producers.get(inputs[0]) if len(inputs) == 1 else None

    def _is_absorbed(self, node: onnx.NodeProto) -> bool:
        """Whether `node` is a QuantizeLinear or DequantizeLinear that becomes part of an int8 kernel."""
        if node.op_type == "QuantizeLinear":
            before = self._index.producers.get(self._behind_views(node.input[0]))
            # A pair behind a DequantizeLinear only moves a scale, and engines fold it.
            return before is not None and (
                before.op_type == "DequantizeLinear" or self._is_int8(self._head(before))
            )
        if node.op_type == "DequantizeLinear":
            readers = self._readers(node.output[0])
            return bool(readers) and all(
                reader.op_type == "QuantizeLinear" or self._is_int8(reader) for reader in readers
            )
        return False

    def _is_int8(self, node: onnx.NodeProto) -> bool:
        if node.op_type in _INTEGER:
            return True
        if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
            return False
        # A third operand is a bias; TensorRT wants it in float.
        operands = node.input[:2] if node.op_type in _PRODUCTS else node.input
        inputs = [name for name in operands if name and self._is_data(name)]
        if not inputs or not all(self._producer_op(name) == "DequantizeLinear" for name in inputs):
            return False
        if self._float_outputs and node.op_type in _PRODUCTS:
            return True
        readers = self._readers(self._tail(node).output[0])
        return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)

    def _is_data(self, name: str) -> bool:
        """Whether a tensor holds values to quantize, and not indices, shapes or the limits of a Clip."""
        dtype = self._dtype(name)
        return np.issubdtype(dtype, np.floating) and (name not in self._static or self._elements(name) > 1)

    def _producer_op(self, name: str) -> str:
        node = self._index.producers.get(self._behind_views(name))
        return "" if node is None else node.op_type

    def _behind_views(self, name: str) -> str:
        node = self._index.producers.get(name)
        while node is not None and node.op_type in _VIEWS:
            name = node.input[0]
            node = self._index.producers.get(name)
        return name

    def _readers(self, name: str) -> list[onnx.NodeProto]:
        """Nodes that read a tensor, seen through views."""
        readers = []
        names = [name]
        while names:
            for node in self._index.consumers(names.pop()):
                if node.op_type in _VIEWS:
                    names.append(node.output[0])
                else:
                    readers.append(node)
        return readers

    def _tail(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """The last node that is fused behind `node`, or `node`."""
        while True:
            readers = self._index.consumers(node.output[0])
            if not readers or id(readers[0]) not in self._fused:
                return node
            node = readers[0]

    def _head(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """The kernel into which `node` is fused, or `node`."""
        while id(node) in self._fused:
            before = self._before(node)
            assert before is not None  # noqa: S101 - _is_fused saw it
            node = before
        return node

    def _cost(self, node: onnx.NodeProto) -> NodeCost:
        tail = self._tail(node)
        int8 = self._is_int8(node)
        written = sum(self._bytes(name, int8=int8) for name in tail.output if name)
        operands = [name for name in node.input if name]
        read = sum(self._bytes(name, int8=int8) for name in operands if name not in self._static)
        weights = sum(self._weight_bytes(name) for name in operands if name in self._static)
        if node.op_type in _PICKS:
            read, weights = (0, written) if node.input[0] in self._static else (written, 0)
        return NodeCost(
            name=_name(node),
            op=node.op_type,
            macs=self._macs(node),
            bytes_read=read,
            bytes_written=written,
            weight_bytes=weights,
            precision="int8" if int8 else self._precision(node),
            steps=self._steps(node),
        )

    def _steps(self, node: onnx.NodeProto) -> int:
        if node.op_type not in _RECURRENT:
            return 1
        # X [sequence, batch, input], or batch first; both directions take the same steps one after another.
        axis = 1 if attribute(node, "layout", 0) else 0
        return self._shape(node.input[0])[axis] * self._shape(node.input[1])[0]

    def _macs(self, node: onnx.NodeProto) -> int:
        if node.op_type in _RECURRENT:
            # X [sequence, batch, input] (or batch first), W [directions, gates * hidden, input], R alike.
            steps = math.prod(self._shape(node.input[0])[:2])
            return steps * (self._elements(node.input[1]) + self._elements(node.input[2]))
        if node.op_type not in _PRODUCTS:
            return 0
        data, weight = (node.input[position] for position in _PRODUCTS[node.op_type])
        if node.op_type == "ConvTranspose":
            # W [input channels, output channels / group, kernel]: each input element meets one such row.
            return self._elements(data) * math.prod(self._shape(weight)[1:])
        if node.op_type in {"Conv", "ConvInteger", "QLinearConv"}:
            # W [output channels, input channels / group, kernel]: each output element meets one such row.
            return self._elements(node.output[0]) * math.prod(self._shape(weight)[1:])
        shared = 0 if node.op_type == "Gemm" and attribute(node, "transA", 0) else -1
        return self._elements(node.output[0]) * self._shape(data)[shared]

    def _precision(self, node: onnx.NodeProto) -> Precision:
        dtype = self._types[node.output[0]].elem_type if node.output[0] in self._types else 0
        return "fp16" if dtype in {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16} else "fp32"

    def _bytes(self, name: str, *, int8: bool) -> int:
        """Bytes of an activation; at an int8 kernel it lies quantized in memory."""
        size = 1 if int8 and np.issubdtype(self._dtype(name), np.floating) else self._dtype(name).itemsize
        return self._elements(name) * size

    def _weight_bytes(self, name: str) -> int:
        """Bytes of a constant in the file; with a DequantizeLinear, bytes of the quantized constant."""
        node = self._index.producers.get(name)
        stored = node.input[0] if node is not None and node.op_type == "DequantizeLinear" else name
        return self._elements(stored) * self._dtype(stored).itemsize

    def _dtype(self, name: str) -> np.dtype:
        tensor = self._index.initializers.get(name)
        element = tensor.data_type if tensor is not None else self._tensor_type(name).elem_type
        return np.dtype(helper.tensor_dtype_to_np_dtype(element))

    def _elements(self, name: str) -> int:
        return math.prod(self._shape(name))

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._index.initializers.get(name)
        if tensor is not None:
            return tuple(tensor.dims)
        sizes = self._tensor_type(name).shape.dim
        if not all(dim.HasField("dim_value") for dim in sizes):
            raise ModelError(
                f"tensor {name!r}: expected a known shape, got a size that depends on the data; "
                "measure on the device instead"
            )
        return tuple(dim.dim_value for dim in sizes)

    def _tensor_type(self, name: str) -> onnx.TypeProto.Tensor:
        inferred: onnx.TypeProto.Tensor | None = self._types.get(name)
        if inferred is None or not inferred.HasField("shape"):
            raise ModelError(
                f"tensor {name!r}: expected a known shape, got none from shape inference; "
                "measure on the device instead"
            )
        return inferred


def _name(node: onnx.NodeProto) -> str:
    return node.name or node.output[0]
