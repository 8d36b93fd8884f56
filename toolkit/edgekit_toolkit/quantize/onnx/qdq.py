"""Writes a plan as an ONNX graph with QuantizeLinear and DequantizeLinear nodes.

onnxruntime.quantization is not used, because the search builds a hundred variants of a model. This module
writes one in milliseconds, while the library needs seconds (docs/adr/0005-own-qdq-placement.md).
"""

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    attribute,
    copy_model,
    copy_node,
    fresh_name,
    remove_unused_initializers,
    set_items,
)
from edgekit_toolkit.onnx_graph.ort_options import (
    disable_optimizers,
    disabled_optimizers,
    note_narrow_weights,
)
from edgekit_toolkit.passes.fold_affine import as_affine, keeps_shape
from edgekit_toolkit.quantize.onnx.emitter import Codes, Emitter
from edgekit_toolkit.quantize.onnx.reread import Reread, reread_hard_sigmoid, reread_shifted
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
from edgekit_toolkit.quantize.scheme import QuantizationParams, activation_params, quantize_weight

# Operators that onnxruntime's WeightBiasQuantization considers.
_REQUANTIZED = frozenset({"Conv", "ConvTranspose", "Gemm"})


def write_qdq(
    model: onnx.ModelProto, plan: Plan, scales: Mapping[str, NDArray[np.float32]] | None = None
) -> onnx.ModelProto:
    """Return `model` with the kernels of a plan quantized.

    Args:
        model: A float model with opset 13 or later, whose top-level graph is in topological order.
        plan: The kernels, and the ranges of all activations that they read or write.
        scales: A dict from initializers to float32 scales [channels], for weights that are exact multiples of
            them.

    Raises:
        KeyError: A range is missing, or the model has no such kernel.
    """
    strangers = plan.kernels - {name for node in model.graph.node for name in node.output[:1]}
    if strangers:
        raise KeyError(min(strangers))
    result = copy_model(model)
    _Writer(result.graph, plan, scales or {}).write()
    remove_unused_initializers(result.graph)
    if plan.scheme.is_narrow:
        result = note_narrow_weights(result)
    if plan.disabled_optimizers:
        result = disable_optimizers(result, (*disabled_optimizers(model), *plan.disabled_optimizers))
    return result


class _Writer:
    """Rewrites one graph in place; a tensor's parameters are computed once."""

    def __init__(self, graph: onnx.GraphProto, plan: Plan, scales: Mapping[str, NDArray[np.float32]]) -> None:
        self.graph = graph
        self.plan = plan
        self.scales = scales
        self.index = GraphIndex(graph)
        self.params: dict[str, QuantizationParams] = {}
        self.kernels: list[onnx.NodeProto] = []
        self.produced: set[str] = set()  # tensors that leave an integer kernel
        # Tensor -> the tensor whose codes it shares, and how they are read.
        self.rereads: dict[str, tuple[str, Reread]] = {}
        self.settled: set[str] = set()  # tensors whose parameters determine those of others
        self.emitter = Emitter(self.index)
        # (tensor, reader if pairs are dedicated) -> codes, and their dequantized side.
        self.codes: dict[tuple[str, str], Codes] = {}
        self.pairs: dict[tuple[str, str], str] = {}

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
            copy = copy_node(node)
            if id(node) in kernels:
                self._write_kernel(node, copy)
            elif node.output and node.output[0] in self.rereads:
                continue
            elif id(node) not in absorbed:
                self._read_codes(node, copy)
            self.emitter.nodes.append(copy)
            for position, name in enumerate(node.output):
                if name in self.produced:
                    self._write_output(copy, position, name)
        set_items(self.graph.node, self.emitter.nodes)

    def _decide(self) -> None:
        """Find kernels, with movement operators that continue one, and the parameters of their tensors."""
        for node in self.graph.node:
            if self._reread(node):
                continue
            if node.output and node.output[0] in self.plan.kernels:
                self.kernels.append(node)
                for name in self._activations(node):
                    self._param(name)
                output = kernel_output(self.index, node)
                if self.plan.scheme.quantizes_outputs:
                    self._param(output)
                    self.produced.add(output)
            elif self._moves(node):
                self.kernels.append(node)
                self.settled.add(node.input[0])
                for name in node.output:
                    self.params[name] = self.params[node.input[0]]
                    self.produced.add(name)

    def _moves(self, node: onnx.NodeProto) -> bool:
        """Whether a node continues a kernel with its codes; a reread's codes are too coarse for means."""
        if not moves_codes(node) or node.input[0] not in self.produced:
            return False
        return node.op_type != "Resize" or node.input[0] not in self.rereads

    def _reread(self, node: onnx.NodeProto) -> bool:
        """Record an operator that only reinterprets a kernel's codes; return whether it is one."""
        source_and_reread = self._reread_shifted(node) or self._reread_hard_sigmoid(node)
        if source_and_reread is None:
            return False
        source, reread = source_and_reread
        output = node.output[0]
        self.params[source], self.params[output] = reread.source, reread.output
        self.rereads[output] = (source, reread)
        self.settled.add(source)
        self.produced.add(output)
        return True

    def _reread_shifted(self, node: onnx.NodeProto) -> tuple[str, Reread] | None:
        """Do so for a shift or scaling by a scalar."""
        affine = as_affine(self.index, node)
        if affine is None or affine.scale.ndim or affine.shift.ndim or affine.scale <= 0:
            return None
        if not self._can_reread(node, affine.source) or not self.index.only_feeds(affine.source, node):
            return None
        if not keeps_shape(self.index, affine):
            return None
        reread = reread_shifted(self.params[affine.source], float(affine.scale), float(affine.shift))
        return None if reread is None else (affine.source, reread)

    def _reread_hard_sigmoid(self, node: onnx.NodeProto) -> tuple[str, Reread] | None:
        if node.op_type != "HardSigmoid" or not self._can_reread(node, node.input[0]):
            return None
        alpha, beta = attribute(node, "alpha", 0.2), attribute(node, "beta", 0.5)
        if not (alpha > 0 and 0 < beta < 1):
            return None
        reread = reread_hard_sigmoid(self.params[node.input[0]], alpha, beta)
        return None if reread is None else (node.input[0], reread)

    def _can_reread(self, node: onnx.NodeProto, source: str) -> bool:
        if source not in self.produced or source in self.settled or node.output[0] in self.index.outputs:
            return False
        # Parameters that a movement operator has taken over cannot change; a second shift has no own codes.
        if source in self.rereads or self.index.producers[source].op_type in MOVEMENT:
            return False
        if self.params[source].zero_point.dtype != np.uint8:
            return False
        # The shifted tensor will not exist: graphs inside a node read it by its name.
        output = node.output[0]
        readers = {id(reader): reader for reader in self.index.consumers(output)}
        direct = sum(list(reader.input).count(output) for reader in readers.values())
        return direct == len(self.index.consumers(output))

    def _param(self, name: str) -> QuantizationParams:
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

    def _read_codes(self, node: onnx.NodeProto, copy: onnx.NodeProto) -> None:
        """Let a float node read the output of an integer kernel through a Q/DQ pair, for fusion."""
        for position, name in enumerate(copy.input):
            if name not in self.produced:
                continue
            channels = self._shield_channels(node) if position == 0 else None
            copy.input[position] = (
                self._pair(name, None) if channels is None else self._shield(name, channels)
            )

    def _shield_channels(self, node: onnx.NodeProto) -> int | None:
        """Return the input channels of a float product whose weights would become codes, or None."""
        weight = self.index.constant(node.input[1]) if node.op_type in _REQUANTIZED else None
        if weight is None or not self._leads_to_codes(node):
            return None
        if node.op_type == "Conv":
            return int(weight.shape[1] * attribute(node, "group", 1))
        return int(weight.shape[1 if node.op_type == "Gemm" and attribute(node, "transB", 0) else 0])

    def _leads_to_codes(self, node: onnx.NodeProto) -> bool:
        """Whether only one QuantizeLinear will read a float node, behind its Relu or Clip if any."""
        name = node.output[0]
        while name not in self.index.outputs:
            readers = self.index.consumers(name)
            if all(reader.output[0] in self.plan.kernels for reader in readers):
                return bool(readers)
            if len(readers) != 1 or readers[0].op_type not in {"Relu", "Clip"}:
                return False
            name = readers[0].output[0]
        return False

    def _shield(self, name: str, channels: int) -> str:
        """Return the dequantized side of tensor `name`, with its one scale repeated for each channel.

        onnxruntime's optimiser WeightBiasQuantization quantizes float weights per tensor, unasked, if such a
        node is between a DequantizeLinear with one scale and a QuantizeLinear. For a depthwise convolution
        that we keep in float for its accuracy, this loses more than quantizing it well.
        """
        key = (name, f"{channels} channels")
        if key not in self.pairs:
            params = self._param(name)
            wide = QuantizationParams(np.full(channels, params.scale), np.full(channels, params.zero_point))
            stem = f"{name}_wide"
            codes = Codes(self._codes(name, "").codes, *self.emitter.params(stem, wide))
            self.pairs[key] = self.emitter.dequantize(codes, stem, axis=1)
        return self.pairs[key]

    def _write_output(self, copy: onnx.NodeProto, position: int, name: str) -> None:
        """Write Q and DQ after a kernel that makes a graph's output; its float side keeps the name."""
        if name not in self.index.outputs:
            return
        copy.output[position] = fresh_name(self.index, f"{name}_raw")
        codes = self.emitter.quantize(copy.output[position], name, self.params[name])
        self.emitter.dequantize(codes, name, output=name)
        self.codes[name, ""] = codes
        self.pairs[name, ""] = name

    def _pair(self, name: str, reader: onnx.NodeProto | None) -> str:
        """Return the name of the dequantized side of tensor `name`; writes Q and DQ if they are missing."""
        dedicated = reader.output[0] if self.plan.scheme.symmetric and reader is not None else ""
        if (name, dedicated) not in self.pairs:
            codes = self._codes(name, dedicated)
            self.pairs[name, dedicated] = self.emitter.dequantize(
                codes, f"{name}{dedicated and '_'}{dedicated}"
            )
        return self.pairs[name, dedicated]

    def _codes(self, name: str, dedicated: str) -> Codes:
        """Return the codes of tensor `name`; a shifted tensor shares its source's, with other parameters."""
        if (name, dedicated) not in self.codes:
            stem = f"{name}{dedicated and '_'}{dedicated}"
            if name in self.rereads:
                source, reread = self.rereads[name]
                clipped = self.emitter.clip(self._codes(source, "").codes, stem, reread.low, reread.high)
                codes = Codes(clipped, *self.emitter.params(stem, self._param(name)))
            else:
                codes = self.emitter.quantize(name, stem, self._param(name))
            self.codes[name, dedicated] = codes
        return self.codes[name, dedicated]

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
                copy.input[position] = self._operand(name)

    def _operand(self, name: str) -> str:
        """Return a constant operand of an element-wise kernel, as codes."""
        # TensorRT takes no quantized scalars.
        value = np.atleast_1d(np.asarray(self.index.constant(name), np.float32))
        params = activation_params(float(value.min()), float(value.max()), self.plan.scheme)
        info = np.iinfo(params.zero_point.dtype)
        codes = np.clip(np.rint(value / params.scale) + params.zero_point, info.min, info.max)
        return self.emitter.constant(name, codes.astype(params.zero_point.dtype), params)

    def _write_weights(self, node: onnx.NodeProto, copy: onnx.NodeProto) -> None:
        weight = np.asarray(self.index.constant(node.input[1]), np.float32)
        axis = weight_axis(node) if self.plan.per_channel else None
        bias = self.index.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        input_scale = float(self._param(node.input[0]).scale)
        # An int32 bias must fit: |bias| <= 2^30 x input scale x weight scale. So must one that stays float:
        # onnxruntime, which judges such models too, makes it an int32 unasked, and does not check whether it
        # fits.
        floor = 0.0 if bias is None else np.abs(bias.astype(np.float64)) / (2.0**30 * input_scale)
        codes, params = quantize_weight(
            weight, axis, floor, self.plan.scheme.weight_peak, self.scales.get(node.input[1])
        )
        copy.input[1] = self.emitter.constant(node.input[1], codes, params, axis=axis)
        if bias is None or self.plan.scheme.symmetric:  # a float bias stays unchanged
            return
        scale = (params.scale.astype(np.float64) * input_scale).astype(np.float32)
        values = np.rint(bias.astype(np.float64) / scale).astype(np.int32)
        shared = QuantizationParams(np.asarray(scale), np.zeros(scale.shape, np.int32))
        copy.input[2] = self.emitter.constant(node.input[2], values, shared, axis=0 if scale.ndim else None)
