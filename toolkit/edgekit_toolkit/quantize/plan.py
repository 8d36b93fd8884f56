"""The plan of a static int8 form. The search varies it, and a recipe stores it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute, float_tensors, reads
from edgekit_toolkit.quantize.precise import OperatorNode, Ranges, precise_operators
from edgekit_toolkit.quantize.scheme import Scheme

COMPUTE = frozenset({"Conv", "Gemm", "MatMul"})
# Operators that move or select codes and so keep the parameters of their input.
MOVEMENT = frozenset(
    {
        "DepthToSpace",
        "Flatten",
        "MaxPool",
        "Reshape",
        "Resize",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
_ACTIVATIONS = frozenset({"Relu", "Clip"})


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernels and ranges of a quantized form of a model.

    Attributes:
        scheme: A quantization scheme that the engine supports.
        kernels: The first outputs of the nodes that become integer kernels.
        ranges: The range (low, high) of each activation that kernels read or write, by name.
        per_channel: Whether weights have a scale for each channel. Otherwise each tensor has one scale.
        disabled_optimizers: The optimisations of onnxruntime to disable, because their results are wrong.
    """

    scheme: Scheme
    kernels: frozenset[str]
    ranges: Ranges
    per_channel: bool = True
    disabled_optimizers: tuple[str, ...] = ()


def kernel_names(model: onnx.ModelProto, scheme: Scheme, elementwise: bool) -> tuple[str, ...]:
    """Return the first outputs of the nodes that integer kernels can run, in the order of the graph.

    Args:
        model: A float model with inferred shapes.
        scheme: The quantization scheme of the engine.
        elementwise: Whether element-wise operators are included, or only matrix products.
    """
    index = GraphIndex(model.graph)
    types = float_tensors(model)
    precise = precise_operators(operator_nodes(index), index.outputs)
    names = []
    for node in model.graph.node:
        if node.domain not in {"", "ai.onnx"} or not node.output:
            continue
        if node.op_type in COMPUTE:
            if node.input[0] in types and _has_plain_weight(index, node, types):
                names.append(node.output[0])
        elif elementwise and node.op_type in scheme.elementwise and node.output[0] not in precise:
            inputs = [name for name in node.input if name]
            # Scalars and shapes are computed in float: only tensors with a batch axis are worth a kernel.
            floats = all(name in types or _is_plain_constant(index, name) for name in inputs)
            if floats and node.output[0] in types:
                names.append(node.output[0])
    return tuple(names)


def operator_nodes(index: GraphIndex) -> list[OperatorNode]:
    return [
        OperatorNode(
            node.op_type,
            [None if not name or name in index.initializers else name for name in _operands(node)],
            [name for name in node.output if name],
            node.op_type in COMPUTE,
        )
        for node in index.graph.node
    ]


def _operands(node: onnx.NodeProto) -> list[str]:
    """Return inputs by position, then the tensors that graphs inside the node read."""
    inputs = list(node.input)
    return [*inputs, *list(reads(node))[sum(map(bool, inputs)) :]]


def _has_plain_weight(index: GraphIndex, node: onnx.NodeProto, types: frozenset[str]) -> bool:
    weight = index.constant(node.input[1])
    if node.op_type == "MatMul":
        return (weight is not None and weight.dtype == np.float32 and weight.ndim == 2) or node.input[
            1
        ] in types
    bias = node.input[2] if len(node.input) > 2 else ""
    if weight is None or weight.dtype != np.float32 or (bias and index.constant(bias) is None):
        return False
    if node.op_type == "Gemm":
        plain = attribute(node, "alpha", 1.0) == 1.0 and attribute(node, "beta", 1.0) == 1.0
        return plain and not attribute(node, "transA", 0) and _is_vector(index, bias)
    return True


def _is_plain_constant(index: GraphIndex, name: str) -> bool:
    value = index.constant(name)
    return value is not None and value.dtype == np.float32 and value.size > 0 and np.isfinite(value).all()


def _is_vector(index: GraphIndex, bias: str) -> bool:
    value = index.constant(bias) if bias else None
    return value is None or value.ndim == 1


def touched_tensors(model: onnx.ModelProto, kernels: Sequence[str]) -> list[str]:
    """Return the sorted names of the float activations that the `kernels` read or write."""
    index, floats = GraphIndex(model.graph), float_tensors(model)
    names: set[str] = set()
    for kernel in kernels:
        node = index.producers[kernel]
        names.update(node.input)
        names.add(kernel_output(index, node))
        names.add(node.output[0])  # the channels of a convolution are balanced here, before its activation
    return sorted(names & floats)


def absorbed_activation(index: GraphIndex, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the Relu or Clip that an integer kernel fuses with a matrix product, or None.

    The Relu or Clip must be the only consumer of the product.
    """
    if node.op_type not in COMPUTE:
        return None
    readers = index.consumers(node.output[0])
    if len(readers) != 1 or node.output[0] in index.outputs or readers[0].op_type not in _ACTIVATIONS:
        return None
    return readers[0]


def kernel_output(index: GraphIndex, node: onnx.NodeProto) -> str:
    """Return the output of a kernel, which is that of the node or of its fused Relu or Clip."""
    name: str = (absorbed_activation(index, node) or node).output[0]
    return name


def weight_axis(node: onnx.NodeProto) -> int:
    """Return the axis of the output channels in the weights of a Conv, Gemm or MatMul."""
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    return 1 if node.op_type == "MatMul" else 0


def moves_codes(node: onnx.NodeProto) -> bool:
    """Return whether a node only moves or averages values of its first input, so that codes remain valid."""
    if node.op_type == "Resize":
        return attribute(node, "mode", b"nearest") in {b"nearest", b"linear"}
    return node.op_type in MOVEMENT and (node.op_type == "Split" or len(node.output) == 1)


def live_range(index: GraphIndex, name: str, low: float, high: float) -> tuple[float, float]:
    """Return the part of a tensor's range that affects the results of its consumers.

    Outside of its sloped part, a hard sigmoid is constant. Below the sloped part, x * HardSigmoid(x) is 0. So
    clipping values in these parts does not change the results.
    """
    readers = index.consumers(name)
    sigmoid = next((node for node in readers if node.op_type == "HardSigmoid"), None)
    if name in index.outputs or sigmoid is None:
        return low, high
    alpha, beta = attribute(sigmoid, "alpha", 0.2), attribute(sigmoid, "beta", 0.5)
    if alpha <= 0:
        return low, high
    if len(readers) == 1:
        return max(low, -beta / alpha), min(high, (1 - beta) / alpha)
    mul = next((node for node in readers if node.op_type == "Mul"), None)
    if len(readers) != 2 or mul is None or set(mul.input) != {name, sigmoid.output[0]}:
        return low, high
    return max(low, -beta / alpha), high
