"""Adds the backward pass to a float ONNX graph, as operators that onnxruntime runs.

The adjoint of a tensor t is J^T v, where J is the Jacobian of the model's outputs with respect to t and v is
a vector of weights of the outputs. Linear operators, products and operators that move values have exact
rules. Other element-wise operators use a difference quotient whose step is near a rounding step of 8-bit
codes. For an operator without a rule, such as a recurrent layer, the adjoint is approximated by white noise
with its estimated power. With `exact`, element-wise operators use exact derivatives, and operators without a
rule or derivative are refused. Then the adjoints can be used for training.

Example: y = Conv(x, W). If v is the adjoint of y, the adjoint of x is Conv(v, W flipped). An error e in x
changes the sum of v * y by the sum of e * adjoint(x).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.onnx_graph.index import (
    DEFAULT_DOMAINS,
    GraphIndex,
    add_constant,
    attribute,
    copy_model,
    copy_node,
    fresh_name,
)

Shapes = Mapping[str, tuple[int, ...]]

# From this opset on, ScatterElements can add. Operators of opset 13 to 15 have the same meaning in it.
_MIN_OPSET: Final = 16
# Before, each constant had to be an input too.
_MIN_IR: Final = 4
# Width of a difference as a share of the tensor's root mean square: near the step of 8-bit codes.
_STEP: Final = 0.01
_TINY: Final = 1e-6
# A float32 represents every integer up to this one. Larger tensors have no index of their values.
_MAX_INDEX: Final = 1 << 24
VIEWS: Final = frozenset({"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
MOVES: Final = frozenset(
    {"DepthToSpace", "Expand", "Gather", "GatherElements", "GatherND", "Pad", "Resize", "Slice"}
    | {"SpaceToDepth", "Split", "Tile", "Upsample"}
)
_POINTWISE: Final = frozenset(
    {"Abs", "BatchNormalization", "Celu", "Clip", "Cos", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid"}
    | {"HardSwish", "LeakyRelu", "Log", "Max", "Mean", "Min", "Mish", "Neg", "PRelu", "Pow", "Reciprocal"}
    | {"Relu", "Selu", "Sigmoid", "Sin", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh"}
    | {"ThresholdedRelu", "Where"}
)


def copy_for_adjoint(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose operator set is new enough for the operators of the backward pass."""
    copy = copy_model(model)
    copy.ir_version = max(copy.ir_version, _MIN_IR)
    for item in copy.opset_import:
        if item.domain in DEFAULT_DOMAINS:
            item.version = max(item.version, _MIN_OPSET)
    return copy


class Adjoint:
    """Adds the backward pass to a graph, in place.

    Args:
        graph: A float graph in topological order, from a model returned by `copy_for_adjoint`.
        shapes: The shapes of all tensors of the graph.
        floats: The names of the float32 tensors that get an adjoint. For training, these are the weights,
            which must be inputs of the graph, and the activations that depend on them. Otherwise, these are
            all activations.
        exact: Whether all adjoints must be exact. Otherwise some operators use an approximation.

    Attributes:
        tensors: A dict from the name of a tensor to the name of its adjoint.
        edges: A dict from an edge to the adjoint that flows back along it. An edge is the name of the first
            output of a node and the index of an input of the node.
    """

    def __init__(
        self, graph: onnx.GraphProto, shapes: Shapes, floats: frozenset[str], *, exact: bool = False
    ) -> None:
        self._graph = graph
        self._index = GraphIndex(graph)
        self._shapes = shapes
        self._floats = floats
        self._exact = exact
        self._random = np.random.default_rng(0)
        self.tensors: dict[str, str] = {}
        self.edges: dict[tuple[str, int], str] = {}

    def pass_back(self, seeds: Mapping[str, str]) -> None:
        """Add the adjoints of all float tensors that affect the seeds, and store their names in `tensors`.

        Args:
            seeds: A dict from the name of a tensor to the name of its given adjoint.

        Raises:
            ModelError: Adjoints must be exact, and an operator has no exact rule.
        """
        self.tensors.update(seeds)
        for node in reversed(list(self._graph.node)):
            if any(name in self.tensors for name in node.output):
                self._pass_through(node)

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Append a node with one output to the graph, and return the name of the output."""
        name = fresh_name(self._index, f"adjoint_{op}")
        self._graph.node.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: NDArray[Any] | float | list[int]) -> str:
        """Add a constant and return its name. A list is stored as int64, other values as float32."""
        array = np.asarray(value, np.int64 if isinstance(value, list) else np.float32)
        return self.store(array)

    def store(self, array: NDArray[Any]) -> str:
        return add_constant(self._index, "adjoint_constant", array)

    def again(self, node: onnx.NodeProto, inputs: Mapping[int, str]) -> onnx.NodeProto:
        """Append a copy of a node with new output names, and return the copy.

        Args:
            node: The node to copy.
            inputs: A dict from the index of an input to the tensor that replaces it.
        """
        copy = copy_node(node)
        for position, name in inputs.items():
            copy.input[position] = name
        copy.name = fresh_name(self._index, f"{node.name}_again")
        for number, name in enumerate(node.output):
            copy.output[number] = fresh_name(self._index, f"{name}_again") if name else ""
        self._graph.node.append(copy)
        added: onnx.NodeProto = self._graph.node[-1]
        return added

    def _pass_through(self, node: onnx.NodeProto) -> None:
        active = [number for number, name in enumerate(node.input) if name in self._floats]
        rule = self._rule(node) if node.domain in {"", "ai.onnx"} else self._white
        for position in active:
            grad = rule(node, position)
            if grad is None:
                if self._exact:
                    raise ModelError(f"{node.op_type} has no exact gradient here")
                continue
            name = node.input[position]
            self.edges[node.output[0], position] = grad
            self.tensors[name] = self.add("Add", [self.tensors[name], grad]) if name in self.tensors else grad

    def _rule(self, node: onnx.NodeProto) -> Callable[[onnx.NodeProto, int], str | None]:
        op = node.op_type
        if op in _RULES:
            return partial(_RULES[op], self)
        if op in VIEWS:
            return self._view
        if op in _POINTWISE:
            return self._pointwise
        sizes = [math.prod(self._shapes[name]) for name in node.input if name in self._floats]
        is_copy = op in MOVES and attribute(node, "mode", b"nearest") not in {b"linear", b"cubic"}
        return self._move if is_copy and max(sizes, default=0) < _MAX_INDEX else self._white

    def _grad(self, node: onnx.NodeProto) -> str:
        return self.tensors[node.output[0]]

    def _sum_to(self, grad: str, source: Sequence[int], shape: Sequence[int]) -> str:
        """Sum over the axes along which `shape` was repeated to make `source`."""
        padded = [1] * (len(source) - len(shape)) + list(shape)
        axes = [axis for axis, size in enumerate(padded) if size != source[axis]]
        if axes:
            grad = self.add("ReduceSum", [grad, self.constant(axes)], keepdims=1)
        return grad if len(source) == len(shape) else self.add("Reshape", [grad, self.constant(list(shape))])

    def _unsum(self, node: onnx.NodeProto, position: int, grad: str) -> str:
        return self._sum_to(grad, self._shapes[node.output[0]], self._shapes[node.input[position]])

    def _view(self, node: onnx.NodeProto, position: int) -> str:
        return self.add(
            "Reshape", [self._grad(node), self.constant(list(self._shapes[node.input[position]]))]
        )

    def _pointwise(self, node: onnx.NodeProto, position: int) -> str:
        slope = self._slope(node, position) if self._exact else self._difference_quotient(node, position)
        return self._unsum(node, position, self.add("Mul", [self._grad(node), slope]))

    def _slope(self, node: onnx.NodeProto, position: int) -> str:
        slope = _SLOPES.get(node.op_type)
        if slope is None or (position and node.op_type != "Div"):
            raise ModelError(f"{node.op_type} has no exact gradient here")
        return slope(self, node, position)

    def _difference_quotient(self, node: onnx.NodeProto, position: int) -> str:
        name = node.input[position]
        step = self._step(name)
        moved = self.again(node, {position: self.add("Add", [name, step])}).output[0]
        return self.add("Div", [self.add("Sub", [moved, node.output[0]]), step])

    def _within(self, name: str, low: str, high: str) -> str:
        """Return 1 where a tensor is between two bounds, which may be absent, and 0 elsewhere."""
        inside = [self.add(op, [name, bound]) for op, bound in (("Greater", low), ("Less", high)) if bound]
        both = self.add("And", inside) if len(inside) == 2 else inside[0]
        return self.add("Cast", [both], to=TensorProto.FLOAT)

    def _relu_slope(self, node: onnx.NodeProto, _position: int) -> str:
        return self._within(node.output[0], self.constant(0.0), "")

    def _leaky_slope(self, node: onnx.NodeProto, _position: int) -> str:
        below = node.input[1] if node.op_type == "PRelu" else self.constant(attribute(node, "alpha", 0.01))
        positive = self.add("Greater", [node.input[0], self.constant(0.0)])
        return self.add("Where", [positive, self.constant(1.0), below])

    def _clip_slope(self, node: onnx.NodeProto, _position: int) -> str:
        low, high = [*node.input[1:], "", ""][:2]
        return self._within(node.output[0], low, high) if low or high else self.constant(1.0)

    def _hard_sigmoid_slope(self, node: onnx.NodeProto, _position: int) -> str:
        inside = self._within(node.output[0], self.constant(0.0), self.constant(1.0))
        return self.add("Mul", [inside, self.constant(attribute(node, "alpha", 0.2))])

    def _hard_swish_slope(self, node: onnx.NodeProto, _position: int) -> str:
        gate = self.add("HardSigmoid", [node.input[0]], alpha=1 / 6, beta=0.5)
        inside = self._within(gate, self.constant(0.0), self.constant(1.0))
        own = self.add("Mul", [node.input[0], self.add("Mul", [inside, self.constant(1 / 6)])])
        return self.add("Add", [gate, own])

    def _sigmoid_slope(self, node: onnx.NodeProto, _position: int) -> str:
        result = node.output[0]
        return self.add("Mul", [result, self.add("Sub", [self.constant(1.0), result])])

    def _tanh_slope(self, node: onnx.NodeProto, _position: int) -> str:
        result = node.output[0]
        return self.add("Sub", [self.constant(1.0), self.add("Mul", [result, result])])

    def _erf_slope(self, node: onnx.NodeProto, _position: int) -> str:
        square = self.add("Mul", [node.input[0], node.input[0]])
        bell = self.add("Exp", [self.add("Neg", [square])])
        return self.add("Mul", [bell, self.constant(2 / math.sqrt(math.pi))])

    def _exp_slope(self, node: onnx.NodeProto, _position: int) -> str:
        return str(node.output[0])

    def _sqrt_slope(self, node: onnx.NodeProto, _position: int) -> str:
        return self.add("Div", [self.constant(0.5), node.output[0]])

    def _quotient_slope(self, node: onnx.NodeProto, position: int) -> str:
        divisor = node.input[1]
        if position:
            return self.add("Neg", [self.add("Div", [node.output[0], divisor])])
        return self.add("Reciprocal", [divisor])

    def _step(self, name: str) -> str:
        """Return a scalar of the width of a rounding step of a tensor."""
        mean_square = self.add("ReduceMean", [self.add("Mul", [name, name])], keepdims=0)
        width = self.add("Mul", [self.add("Sqrt", [mean_square]), self.constant(_STEP)])
        return self.add("Add", [width, self.constant(_TINY)])

    def _sum(self, node: onnx.NodeProto, position: int) -> str:
        return self._unsum(node, position, self._grad(node))

    def _difference(self, node: onnx.NodeProto, position: int) -> str:
        grad = self._grad(node)
        return self._unsum(node, position, self.add("Neg", [grad]) if position else grad)

    def _product(self, node: onnx.NodeProto, position: int) -> str:
        other = self.add("Mul", [self._grad(node), node.input[1 - position]])
        return self._unsum(node, position, other)

    def _transpose(self, node: onnx.NodeProto, _position: int) -> str:
        rank = len(self._shapes[node.output[0]])
        order = attribute(node, "perm", list(range(rank))[::-1])
        return self.add("Transpose", [self._grad(node)], perm=[int(axis) for axis in np.argsort(order)])

    def _concat(self, node: onnx.NodeProto, position: int) -> str:
        axis = attribute(node, "axis") % len(self._shapes[node.output[0]])
        begin = sum(self._shapes[name][axis] for name in node.input[:position])
        end = begin + self._shapes[node.input[position]][axis]
        limits = [self.constant([value]) for value in (begin, end, axis)]
        return self.add("Slice", [self._grad(node), *limits])

    def _move(self, node: onnx.NodeProto, position: int) -> str | None:
        """Run the operator on the places of its values, and add each adjoint where its value came from."""
        if position:
            return None
        shape = self._shapes[node.input[0]]
        positions = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)  # 0: padding
        inputs = {0: self.constant(positions)}
        if node.op_type == "Pad" and len(node.input) > 2:
            inputs[2] = ""
        repeated = self.again(node, inputs)
        flat = self.constant([-1])
        result = self.constant(np.zeros(positions.size + 1, np.float32))
        for name, moved in zip(node.output, repeated.output, strict=True):
            if name in self.tensors:
                index = self.add("Cast", [self.add("Reshape", [moved, flat])], to=TensorProto.INT64)
                grad = self.add("Reshape", [self.tensors[name], flat])
                result = self.add("ScatterElements", [result, index, grad], reduction="add")
        unpadded = self.add("Slice", [result, self.constant([1]), self.constant([positions.size + 1])])
        return self.add("Reshape", [unpadded, self.constant(list(shape))])

    def _max_pool(self, node: onnx.NodeProto, position: int) -> str:
        repeated = self.again(node, {})
        if len(repeated.output) == 1:
            repeated.output.append(fresh_name(self._index, f"{node.output[0]}_place"))
        shape, flat = self._shapes[node.input[position]], self.constant([-1])
        index = self.add("Reshape", [repeated.output[1], flat])
        grad = self.add("Reshape", [self._grad(node), flat])
        zeros = self.constant(np.zeros(math.prod(shape), np.float32))
        scattered = self.add("ScatterElements", [zeros, index, grad], reduction="add")
        return self.add("Reshape", [scattered, self.constant(list(shape))])

    def _mean(self, node: onnx.NodeProto, position: int) -> str | None:
        """Spread the adjoint of a mean or sum over the values that it was made of."""
        if position:
            return None
        shape, result = self._shapes[node.input[0]], self._shapes[node.output[0]]
        count = 1 if node.op_type == "ReduceSum" else math.prod(shape) / max(math.prod(result), 1)
        scaled = self.add("Mul", [self._grad(node), self.constant(1 / count)])
        axes = attribute(node, "axes")
        if len(node.input) > 1 and node.input[1]:
            value = self._index.constant(node.input[1])
            if value is None:
                return self._white(node, position)
            axes = value.tolist()
        if node.op_type == "GlobalAveragePool":
            axes = list(range(2, len(shape)))
        reduced = {axis % len(shape) for axis in (range(len(shape)) if axes is None else axes)}
        wide = [1 if axis in reduced else size for axis, size in enumerate(shape)]
        lined = self.add("Reshape", [scaled, self.constant(wide)])
        return self.add("Expand", [lined, self.constant(list(shape))])

    def _softmax(self, node: onnx.NodeProto, _position: int) -> str:
        grad, result = self._grad(node), node.output[0]
        axis = self.constant([int(attribute(node, "axis", -1))])
        total = self.add("ReduceSum", [self.add("Mul", [grad, result]), axis], keepdims=1)
        return self.add("Mul", [result, self.add("Sub", [grad, total])])

    def _matmul(self, node: onnx.NodeProto, position: int) -> str | None:
        shapes = [self._shapes[name] for name in node.input[:2]]
        if min(map(len, shapes)) < 2 or position > 1:
            return self._white(node, position)
        grad, other = self._grad(node), self._swap(node.input[1 - position])
        pair = [grad, other] if position == 0 else [other, grad]
        result = self._shapes[node.output[0]]
        batch = result[:-2]
        return self._sum_to(self.add("MatMul", pair), (*batch, *shapes[position][-2:]), shapes[position])

    def _swap(self, name: str) -> str:
        rank = len(self._shapes[name])
        return self.add("Transpose", [name], perm=[*range(rank - 2), rank - 1, rank - 2])

    def _gemm(self, node: onnx.NodeProto, position: int) -> str:
        grad = self._grad(node)
        if position == 2:
            scaled = self.add("Mul", [grad, self.constant(float(attribute(node, "beta", 1.0)))])
            return self._unsum(node, position, scaled)
        turn_a, turn_b = (int(attribute(node, name, 0)) for name in ("transA", "transB"))
        other = node.input[1 - position]
        if position == 0:
            inputs, turns = ([other, grad], (turn_b, 1)) if turn_a else ([grad, other], (0, 1 - turn_b))
        else:
            inputs, turns = ([grad, other], (1, turn_a)) if turn_b else ([other, grad], (1 - turn_a, 0))
        alpha = float(attribute(node, "alpha", 1.0))
        return self.add("Gemm", inputs, transA=turns[0], transB=turns[1], alpha=alpha)

    def _conv(self, node: onnx.NodeProto, position: int) -> str:
        if position == 0:
            weight = node.input[1]
            pair = [self._grad(node), weight]
            return self._convolve_back(node, pair, self._shapes[weight], int(attribute(node, "group", 1)))
        if position == 1:
            return self._conv_weight(node)
        axes = [0, *range(2, len(self._shapes[node.output[0]]))]
        return self.add("ReduceSum", [self._grad(node), self.constant(axes)], keepdims=0)

    def _conv_weight(self, node: onnx.NodeProto) -> str:
        """Convolve the input with the adjoint of the result: samples are channels, and strides dilate."""
        name, weight = node.input[:2]
        samples, channels, *shape = self._shapes[name]
        outputs, columns, *kernel = self._shapes[weight]
        result = self._shapes[node.output[0]][2:]
        group, space = channels // columns, list(range(2, 2 + len(kernel)))
        strides, dilations, reach = _steps(node, kernel)
        begin, end = self._pads(node, [*zip(shape, result, strides, reach, strict=True)])
        grad = self.add("Transpose", [self._grad(node)], perm=[1, 0, *space])
        if group == 1 and max(reach, default=0) == 0 and max(strides) == 1 and not any([*begin, *end]):
            rows = self.add("Reshape", [grad, self.constant([outputs, -1])])
            turned = self.add("Transpose", [name], perm=[1, 0, *space])
            patches = self.add("Reshape", [turned, self.constant([channels, -1])])
            product = self.add("Gemm", [rows, patches], transB=1)
            return self.add("Reshape", [product, self.constant([outputs, columns, *kernel])])
        split = self.add("Reshape", [name, self.constant([samples, group, columns, *shape])])
        turned = self.add("Transpose", [split], perm=[2, 1, 0, *(axis + 1 for axis in space)])
        inputs = self.add("Reshape", [turned, self.constant([columns, group * samples, *shape])])
        product = self.add(
            "Conv", [inputs, grad], group=group, pads=[*begin, *end], strides=dilations, dilations=strides
        )
        # Where strides do not reach the end of the input, there are more places than weights.
        limits = [self.constant(values) for values in ([0] * len(kernel), kernel, space)]
        weights = self.add("Slice", [product, *limits])
        return self.add("Transpose", [weights], perm=[1, 0, *space])

    def _average_pool(self, node: onnx.NodeProto, _position: int) -> str:
        """Pass back as through a convolution whose results are divided by the number of values."""
        kernel, channels = attribute(node, "kernel_shape"), self._shapes[node.input[0]][1]
        if attribute(node, "count_include_pad", 0):
            if self._exact and attribute(node, "ceil_mode", 0):
                raise ModelError(
                    "AveragePool with count_include_pad and ceil_mode has no exact gradient here"
                )
            counts: Any = np.full([1] * len(kernel), math.prod(kernel))
        else:
            counts = self._count_values(node, kernel)
        grad = self.add("Div", [self._grad(node), self.constant(counts.astype(np.float32))])
        weight = np.ones((channels, 1, *kernel), np.float32)
        return self._convolve_back(node, [grad, self.constant(weight)], weight.shape, channels)

    def _count_values(self, node: onnx.NodeProto, kernel: Sequence[int]) -> NDArray[np.int64]:
        """Return how many values of the input each window covers."""
        shape, result = self._shapes[node.input[0]][2:], self._shapes[node.output[0]][2:]
        strides, dilations, reach = _steps(node, kernel)
        begin, _ = self._pads(node, [*zip(shape, result, strides, reach, strict=True)])
        counts = np.ones((), np.int64)
        for axis, size in enumerate(shape):
            starts = np.arange(result[axis]) * strides[axis] - begin[axis]
            reads = starts[:, np.newaxis] + np.arange(kernel[axis]) * dilations[axis]
            counts = np.multiply.outer(counts, ((reads >= 0) & (reads < size)).sum(axis=1))
        return np.asarray(counts)

    def _convolve_back(
        self, node: onnx.NodeProto, inputs: list[str], weight_shape: Sequence[int], group: int
    ) -> str:
        """Add the convolution of an adjoint with a turned weight; `inputs` names both."""
        shape, result = self._shapes[node.input[0]][2:], self._shapes[node.output[0]][2:]
        outputs, columns, *kernel = weight_shape
        strides, dilations, reach = _steps(node, kernel)
        common = {"group": group, "dilations": dilations}
        begin, end = self._pads(node, [*zip(shape, result, strides, reach, strict=True)])
        mirrored = [far - pad for far, pad in zip(reach * 2, [*begin, *end], strict=True)]
        if max(strides) == 1 and min(mirrored) >= 0:
            # A convolution again, whose kernels are faster than those of ConvTranspose.
            sizes = [group, outputs // group, columns, *kernel]
            grouped = self.add("Reshape", [inputs[1], self.constant(sizes)])
            axes = list(range(3, len(sizes)))
            swapped = self.add("Transpose", [grouped], perm=[0, 2, 1, *axes])
            if max(kernel) > 1:
                backwards = [-1] * len(kernel)
                limits = [backwards, [-size - 1 for size in kernel], axes, backwards]
                swapped = self.add("Slice", [swapped, *map(self.constant, limits)])
            sizes = [group * columns, outputs // group, *kernel]
            turned = self.add("Reshape", [swapped, self.constant(sizes)])
            return self.add("Conv", [inputs[0], turned], pads=mirrored, **common)
        whole = zip(shape, result, strides, reach, begin, end, strict=True)
        summed_axes = [
            size - (length - 1) * stride - far - 1 + first + last
            for size, length, stride, far, first, last in whole
        ]
        # Where the last window begins beyond the input (`ceil_mode`), its values are cut off.
        pads = [*begin, *(last - min(size, 0) for last, size in zip(end, summed_axes, strict=True))]
        added = [max(size, 0) for size in summed_axes]
        return self.add("ConvTranspose", inputs, strides=strides, output_padding=added, pads=pads, **common)

    def _norm(self, node: onnx.NodeProto, position: int) -> str | None:
        """Pass back through (x - mean) / deviation over some axes, times a constant scale."""
        if position:
            return None
        shape, op = self._shapes[node.input[0]], node.op_type
        first = 2 if op == "InstanceNormalization" else int(attribute(node, "axis", -1)) % len(shape)
        axes = self.constant(list(range(first, len(shape))))
        share = self.constant(1 / math.prod(shape[first:]))

        def mean(name: str) -> str:
            return self.add("Mul", [self.add("ReduceSum", [name, axes], keepdims=1), share])

        def centre(name: str) -> str:
            return self.add("Sub", [name, mean(name)])

        channels = [1, shape[1], *[1] * (len(shape) - 2)]
        scale = node.input[1]
        if op == "InstanceNormalization":
            scale = self.add("Reshape", [scale, self.constant(channels)])
        grad = centre(self.add("Mul", [self._grad(node), scale]))
        middle = centre(node.input[0])
        power = mean(self.add("Mul", [middle, middle]))
        epsilon = self.constant(float(attribute(node, "epsilon", 1e-5)))
        deviation = self.add("Sqrt", [self.add("Add", [power, epsilon])])
        unit = self.add("Div", [middle, deviation])
        along = mean(self.add("Mul", [grad, unit]))
        return self.add("Div", [self.add("Sub", [grad, self.add("Mul", [unit, along])]), deviation])

    def _pads(
        self, node: onnx.NodeProto, axes: Sequence[tuple[int, int, int, int]]
    ) -> tuple[list[int], list[int]]:
        """Return the padding at both ends; `axes` has input, output, stride and reach of each axis."""
        pads = list(attribute(node, "pads", [0] * (2 * len(axes))))
        mode = attribute(node, "auto_pad", b"NOTSET")
        if mode not in {b"SAME_UPPER", b"SAME_LOWER"}:
            return pads[: len(axes)], pads[len(axes) :]
        whole = [max((length - 1) * stride + far + 1 - size, 0) for size, length, stride, far in axes]
        small, large = [pad // 2 for pad in whole], [pad - pad // 2 for pad in whole]
        return (small, large) if mode == b"SAME_UPPER" else (large, small)

    def _conv_transpose(self, node: onnx.NodeProto, position: int) -> str | None:
        weight = self._index.constant(node.input[1])
        is_plain = attribute(node, "auto_pad", b"NOTSET") == b"NOTSET" and not attribute(node, "output_shape")
        if position != 0 or weight is None or not is_plain:
            return self._white(node, position)
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        attributes.pop("output_padding", None)
        return self.add("Conv", [self._grad(node), node.input[1]], **attributes)

    def _white(self, node: onnx.NodeProto, position: int) -> str | None:
        """Return white noise with the power of the adjoint, estimated from a random change of the input."""
        if self._exact:
            raise ModelError(f"{node.op_type} has no exact gradient here")
        name = node.input[position]
        size = math.prod(self._shapes[name])
        if not size:
            return None
        step = self._step(name)
        change = self.add("Mul", [self._noise(name), step])
        moved = self.again(node, {position: self.add("Add", [name, change])})
        total = None
        for before, after in zip(node.output, moved.output, strict=True):
            if before in self.tensors:
                parts = self.add("Mul", [self.tensors[before], self.add("Sub", [after, before])])
                part = self.add("ReduceSum", [parts], keepdims=0)
                total = part if total is None else self.add("Add", [total, part])
        if total is None:
            return None
        power = self.add("Div", [total, self.add("Mul", [step, self.constant(math.sqrt(size))])])
        return self.add("Mul", [self._noise(name), power])

    def _noise(self, name: str) -> str:
        """Store white noise of the shape of a tensor."""
        return self.constant(self._random.normal(size=self._shapes[name]))


def _steps(node: onnx.NodeProto, kernel: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return strides, dilations and how far a window reaches beyond its first value."""
    strides, dilations = (list(attribute(node, name, [1] * len(kernel))) for name in ("strides", "dilations"))
    return strides, dilations, [step * (size - 1) for step, size in zip(dilations, kernel, strict=True)]


_SLOPES: Final[Mapping[str, Callable[[Adjoint, onnx.NodeProto, int], str]]] = {
    "Clip": Adjoint._clip_slope,
    "Div": Adjoint._quotient_slope,
    "Erf": Adjoint._erf_slope,
    "Exp": Adjoint._exp_slope,
    "HardSigmoid": Adjoint._hard_sigmoid_slope,
    "HardSwish": Adjoint._hard_swish_slope,
    "LeakyRelu": Adjoint._leaky_slope,
    "PRelu": Adjoint._leaky_slope,
    "Relu": Adjoint._relu_slope,
    "Sigmoid": Adjoint._sigmoid_slope,
    "Sqrt": Adjoint._sqrt_slope,
    "Tanh": Adjoint._tanh_slope,
}
_RULES: Final[Mapping[str, Callable[[Adjoint, onnx.NodeProto, int], str | None]]] = {
    "Add": Adjoint._sum,
    "AveragePool": Adjoint._average_pool,
    "Concat": Adjoint._concat,
    "Conv": Adjoint._conv,
    "ConvTranspose": Adjoint._conv_transpose,
    "Gemm": Adjoint._gemm,
    "GlobalAveragePool": Adjoint._mean,
    "InstanceNormalization": Adjoint._norm,
    "LayerNormalization": Adjoint._norm,
    "MatMul": Adjoint._matmul,
    "MaxPool": Adjoint._max_pool,
    "Mul": Adjoint._product,
    "ReduceMean": Adjoint._mean,
    "ReduceSum": Adjoint._mean,
    "Softmax": Adjoint._softmax,
    "Sub": Adjoint._difference,
    "Sum": Adjoint._sum,
    "Transpose": Adjoint._transpose,
}
