"""Write a plan as an ONNX graph with QuantizeLinear and DequantizeLinear.

Placement is ours and not that of onnxruntime.quantization: the search builds a hundred variants of a model, and
this writes one in milliseconds where the library takes seconds (docs/adr/0005-own-qdq-placement.md).
"""

import math

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgekit_toolkit.graph import GraphIndex, attribute, remove_unused_initializers
from edgekit_toolkit.passes.fold_affine import as_affine
from edgekit_toolkit.quantize.plan import (
    COMPUTE,
    MOVEMENT,
    Plan,
    absorbed_activation,
    kernel_output,
    live_range,
    moves_codes,
    weight_axis,
)
from edgekit_toolkit.quantize.scheme import Affine, activation_params, quantize_weight

# What onnxruntime's WeightBiasQuantization looks at.
_REQUANTIZED = frozenset({"Conv", "ConvTranspose", "Gemm"})
# A shift of fewer steps than this would change the scale by more than a few percent.
_MIN_STEPS = 8


def write_qdq(model: onnx.ModelProto, plan: Plan) -> onnx.ModelProto:
    """Return the quantized form of `model`.

    Args:
        model: float model, opset >= 13, top-level graph in topological order.
        plan: kernels and ranges; a range must be there for every activation that a kernel reads or writes.

    Raises:
        KeyError: a range is missing.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    _Writer(result.graph, plan).write()
    remove_unused_initializers(result.graph)
    return result


class _Writer:
    """Rewrites one graph in place; a tensor's parameters are computed once."""

    def __init__(self, graph: onnx.GraphProto, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        self.index = GraphIndex(graph)
        self.params: dict[str, Affine] = {}
        self.kernels: list[onnx.NodeProto] = []
        self.produced: set[str] = set()  # tensors that leave an integer kernel
        self.rereads: dict[str, str] = {}  # shifted tensor -> tensor whose codes it shares
        self.nodes: list[onnx.NodeProto] = []
        self.pairs: dict[str, str] = {}
        self.stored: set[str] = set()

    def write(self) -> None:
        """Decide which tensors carry codes, then write the nodes with their pairs."""
        self._decide()
        kernels = {id(node) for node in self.kernels}
        absorbed = {}
        for node in self.kernels:
            activation = absorbed_activation(self.index, node)
            if activation is not None:
                absorbed[id(activation)] = node
        for node in list(self.graph.node):
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            if id(node) in kernels:
                self._write_kernel(node, copy)
            elif node.output and node.output[0] in self.rereads:
                continue
            elif id(node) not in absorbed:
                self._read_codes(node, copy)
            self.nodes.append(copy)
            for position, name in enumerate(node.output):
                if name in self.produced:
                    self._write_output(copy, position, name)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)

    def _decide(self) -> None:
        """Find kernels (movement operators that continue one included) and the parameters of their tensors."""
        for node in self.graph.node:
            if self._reread(node):
                continue
            if node.output and node.output[0] in self.plan.kernels:
                self.kernels.append(node)
                for name in self._activations(node):
                    self._param(name)
                output = kernel_output(self.index, node)
                if self.plan.scheme.quantized_outputs:
                    self._param(output)
                    self.produced.add(output)
            elif moves_codes(node) and node.input[0] in self.produced:
                self.kernels.append(node)
                for name in node.output:
                    self.params[name] = self.params[node.input[0]]
                    self.produced.add(name)

    def _reread(self, node: onnx.NodeProto) -> bool:
        """Let a shift or scaling by a scalar after a kernel be free: the same codes, read with other parameters.

        scale (q - zero) + shift = scale (q - (zero - shift / scale)), exact where shift / scale is a whole
        number; the kernel's scale is enlarged a little so that it is.
        """
        affine = as_affine(self.index, node)
        if affine is None or affine.scale.ndim or affine.shift.ndim or affine.scale <= 0:
            return False
        source, output = affine.source, node.output[0]
        if source not in self.produced or source in self.rereads or output in self.index.outputs:
            return False
        params = self.params[source]
        if not self.index.only_feeds(source, node) or params.zero_point.dtype != np.uint8:
            return False
        shift, scale, steps = float(affine.shift / affine.scale), float(params.scale), 0
        if shift:
            steps = math.floor(abs(shift) / scale)
            if steps < _MIN_STEPS:
                return False
            scale = abs(shift) / steps
            steps = int(math.copysign(steps, shift))
        # With the larger scale the kernel's own zero point can only come closer to the middle; keep the low end.
        zero = round(int(params.zero_point) * float(params.scale) / scale)
        if not 0 <= zero - steps <= 255:
            return False
        self.params[source] = Affine(np.asarray(np.float32(scale)), np.asarray(zero, np.uint8))
        shifted = np.asarray(np.float32(scale * float(affine.scale)))
        self.params[output] = Affine(shifted, np.asarray(zero - steps, np.uint8))
        self.rereads[output] = source
        self.produced.add(output)
        return True

    def _param(self, name: str) -> Affine:
        if name not in self.params:
            low, high = live_range(self.index, name, *self.plan.ranges[name])
            self.params[name] = activation_params(low, high, self.plan.scheme)
        return self.params[name]

    def _activations(self, node: onnx.NodeProto) -> list[str]:
        """Inputs of a kernel that are activations: not weights, biases, shapes."""
        names = (
            node.input[:1]
            if node.op_type in MOVEMENT
            else node.input[:2]
            if node.op_type in COMPUTE
            else node.input
        )
        return [name for name in names if name and name not in self.index.initializers]

    def _write_kernel(self, node: onnx.NodeProto, copy: onnx.NodeProto) -> None:
        activations = set(self._activations(node))
        for position, name in enumerate(node.input):
            if name in activations:
                copy.input[position] = self._pair(name, node)
        if node.op_type in MOVEMENT:
            return
        if node.op_type in COMPUTE:
            if node.input[1] in self.index.initializers:
                self._write_weights(node, copy)
            return
        for position, name in enumerate(node.input):
            if name in self.index.initializers:
                copy.input[position] = self._constant(name)

    def _read_codes(self, node: onnx.NodeProto, copy: onnx.NodeProto) -> None:
        """A float node reads what an integer kernel made through the pair, so that the kernel can fuse."""
        for position, name in enumerate(copy.input):
            if name not in self.produced:
                continue
            channels = self._shield_channels(node) if position == 0 else None
            copy.input[position] = self._pair(name, None) if channels is None else self._shield(name, channels)

    def _shield_channels(self, node: onnx.NodeProto) -> int | None:
        """Input channels of a float product with constant weights that would read codes; None for other nodes."""
        weight = self.index.constant(node.input[1]) if node.op_type in _REQUANTIZED else None
        if weight is None:
            return None
        if node.op_type == "Conv":
            return int(weight.shape[1] * attribute(node, "group", 1))
        return int(weight.shape[1 if node.op_type == "Gemm" and attribute(node, "transB", 0) else 0])

    def _shield(self, name: str, channels: int) -> str:
        """Dequantized side of tensor `name` with the same scale written once a channel.

        onnxruntime quantizes float weights per tensor, unasked, where such a node stands between a
        DequantizeLinear with one scale and a QuantizeLinear (its optimiser WeightBiasQuantization); on a
        depthwise convolution that we keep in float for its accuracy this costs more than quantizing it well.
        """
        floats = f"{name}_dq{channels}"
        if floats not in self.stored:
            self.stored.add(floats)
            self._pair(name, None)
            params = self._param(name)
            wide = Affine(np.full(channels, params.scale), np.full(channels, params.zero_point))
            scale, zero = self._store(floats, wide)
            inputs = [f"{self.rereads.get(name, name)}_q", scale, zero]
            self.nodes.append(helper.make_node("DequantizeLinear", inputs, [floats], name=floats, axis=1))
        return floats

    def _write_output(self, copy: onnx.NodeProto, position: int, name: str) -> None:
        """Pair behind a kernel that makes a graph's output, which keeps its name on the float side."""
        if name not in self.index.outputs:
            return
        raw, codes = f"{name}_raw", f"{name}_q"
        copy.output[position] = raw
        scale, zero = self._store(name, self.params[name])
        self.nodes.append(helper.make_node("QuantizeLinear", [raw, scale, zero], [codes], name=codes))
        self.nodes.append(
            helper.make_node("DequantizeLinear", [codes, scale, zero], [name], name=f"{name}_dq")
        )
        self.pairs[name] = name

    def _pair(self, name: str, reader: onnx.NodeProto | None) -> str:
        """Name of the dequantized side of tensor `name`, writing Q and DQ where they are not there yet."""
        key = (
            f"{name}_{reader.output[0]}" if self.plan.scheme.dedicated_pairs and reader is not None else name
        )
        if key not in self.pairs:
            scale, zero = self._store(key, self._param(name))
            codes, floats = f"{key}_q", f"{key}_dq"
            if name in self.rereads:
                self._pair(self.rereads[name], None)
                codes = f"{self.rereads[name]}_q"
            else:
                self.nodes.append(
                    helper.make_node("QuantizeLinear", [name, scale, zero], [codes], name=codes)
                )
            self.nodes.append(
                helper.make_node("DequantizeLinear", [codes, scale, zero], [floats], name=floats)
            )
            self.pairs[key] = floats
        return self.pairs[key]

    def _store(self, stem: str, params: Affine) -> tuple[str, str]:
        scale, zero = f"{stem}_scale", f"{stem}_zero_point"
        self._add(scale, params.scale)
        self._add(zero, params.zero_point)
        return scale, zero

    def _add(self, name: str, value: NDArray[np.generic]) -> None:
        if name not in self.stored:
            self.stored.add(name)
            self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))

    def _constant(self, name: str) -> str:
        """A constant operand of an element-wise kernel, as codes."""
        value = np.asarray(self.index.constant(name), np.float32)
        params = activation_params(float(value.min()), float(value.max()), self.plan.scheme)
        info = np.iinfo(params.zero_point.dtype)
        codes = np.clip(np.rint(value / params.scale) + params.zero_point, info.min, info.max)
        return self._dequantize(f"{name}_const", codes.astype(params.zero_point.dtype), params, None)

    def _write_weights(self, node: onnx.NodeProto, copy: onnx.NodeProto) -> None:
        weight = np.asarray(self.index.constant(node.input[1]), np.float32)
        axis = weight_axis(node) if self.plan.per_channel else None
        bias = self._bias(node)
        input_scale = float(self._param(node.input[0]).scale)
        with_int32 = bias is not None and self.plan.scheme.int32_bias
        # An int32 bias must fit: |bias| <= 2^30 x input scale x weight scale.
        floor = (
            np.abs(bias.astype(np.float64)) / (2.0**30 * input_scale)
            if bias is not None and with_int32
            else 0.0
        )
        codes, params = quantize_weight(weight, axis, floor)
        stem = f"{node.input[1]}_{node.output[0]}"
        copy.input[1] = self._dequantize(stem, codes, params, axis)
        if bias is None:
            return
        if with_int32:
            scale = (params.scale.astype(np.float64) * input_scale).astype(np.float32)
            values = np.rint(bias.astype(np.float64) / scale).astype(np.int32)
            shared = Affine(np.asarray(scale), np.zeros(scale.shape, np.int32))
            name = self._dequantize(f"{stem}_bias", values, shared, 0 if scale.ndim else None)
        else:
            name = f"{stem}_bias"
            self._add(name, bias)
        del copy.input[2:]
        copy.input.append(name)

    def _bias(self, node: onnx.NodeProto) -> NDArray[np.float32] | None:
        value = self.index.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        return None if value is None else np.asarray(value, np.float32)

    def _dequantize(self, stem: str, codes: NDArray[np.generic], params: Affine, axis: int | None) -> str:
        floats = f"{stem}_dq"
        if floats not in self.stored:
            self.stored.add(floats)
            self._add(f"{stem}_codes", codes)
            self._add(f"{stem}_scale", params.scale)
            inputs = [f"{stem}_codes", f"{stem}_scale"]
            if params.zero_point.any():  # left out, it is 0
                self._add(f"{stem}_zero_point", params.zero_point)
                inputs.append(f"{stem}_zero_point")
            extra = {} if axis is None else {"axis": axis}
            self.nodes.append(helper.make_node("DequantizeLinear", inputs, [floats], name=floats, **extra))
        return floats
