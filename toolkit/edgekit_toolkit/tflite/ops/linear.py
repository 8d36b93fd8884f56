"""Matrix products: fully connected layers, and products of two computed tensors."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import as_onnx, flattening
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step, fused
from edgekit_toolkit.tflite.view import NO_ACTIVATION, Graph, Node


def has_linear_weights(node: Node, graph: Graph) -> bool:
    """Return whether a node multiplies by a constant matrix, optionally with a constant row added."""
    weights = graph.constants.get(node.input(1))
    if node.domain or node.op_type not in {"Gemm", "MatMul", "FusedLinear"} or weights is None:
        return False
    if weights.ndim != 2 or node.attributes.get("transA", 0):
        return False
    columns = weights.shape[0 if node.attributes.get("transB", 0) else 1]
    addend = graph.constants.get(node.input(2))
    return not node.input(2) or (addend is not None and _is_row(addend, columns))


@writes("Gemm", rule=as_onnx, fuses=True)
def write_gemm(step: Step) -> None:
    """Write FULLY_CONNECTED if weights and bias are constant, else BATCH_MATMUL and ADD."""
    if has_linear_weights(step.node, step.graph):
        write_linear(step)
        return
    first, right = step.read(0), step.read(1)
    if step.attribute("transA", 0):
        first = step.builder.transpose(first, [1, 0])
    if step.attribute("transB", 0):
        right = step.builder.transpose(right, [1, 0])
    result = _scaled(step, _batch_matmul(step, first, right), step.attribute("alpha", 1.0))
    if step.has(2):
        result = step.binary("ADD", result, _scaled(step, step.read(2), step.attribute("beta", 1.0)))
    step.give(_activated(step, result))


@writes("MatMul", rule=as_onnx, fuses=True)
def write_matmul(step: Step) -> None:
    """Write FULLY_CONNECTED if the second factor is a constant matrix, else BATCH_MATMUL."""
    weights = step.value(1)
    if weights is not None and weights.ndim == 2 and len(step.shape(0)) >= 2:
        step.give(fully_connected(step, step.read(0), weights.T, None, step.node.activation))
        return
    first, right = step.read(0), step.read(1)
    if len(first.shape) == 1:
        first = step.builder.reshape(first, (1, *first.shape))
    if len(right.shape) == 1:
        right = step.builder.reshape(right, (*right.shape, 1))
    product = _batch_matmul(step, first, right)
    step.give(_activated(step, step.builder.reshape(product, step.held())))


@writes("FusedLinear", rule=as_onnx, fuses=True)
def write_linear(step: Step) -> None:
    """Write FULLY_CONNECTED for a product with a constant matrix [K, N] plus a constant row [N]."""
    weights, bias = _linear_weights(step)
    step.give(fully_connected(step, step.read(0), weights, bias, step.node.activation))


@writes("FusedFlattenLinear", rule=flattening, fuses=True)
def write_flatten_linear(step: Step) -> None:
    """Write a reshape from [N, ...] to [N, K], and FULLY_CONNECTED.

    The weights are reordered to match the stored input, so that an image [N, H, W, C] is not transposed.
    """
    weights, bias = _linear_weights(step)
    shape = step.shape(0)
    order = [axis - 1 for axis in step.form if axis > 0]
    columns = (
        weights.reshape(-1, *shape[1:]).transpose(0, *(1 + axis for axis in order)).reshape(weights.shape)
    )
    flat = step.builder.reshape(step.read(0), (shape[0], weights.shape[1]))
    step.give(fully_connected(step, flat, columns, bias, step.node.activation))


def _linear_weights(step: Step) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return weights [N, K] and bias [N] of a node that `has_linear_weights`."""
    weights = step.constant(1, "the weights")
    weights = weights if step.attribute("transB", 0) else weights.T
    if step.attribute("alpha", 1.0) != 1:
        weights = weights * np.float32(step.attribute("alpha"))
    if not step.has(2):
        return weights, None
    bias = step.constant(2, "the bias").reshape(-1) * np.float32(step.attribute("beta", 1.0))
    return weights, np.broadcast_to(bias, weights.shape[:1])


def fully_connected(
    step: Step,
    tensor: Tensor,
    weights: NDArray[Any],
    bias: NDArray[Any] | None,
    activation: str = NO_ACTIVATION,
) -> Tensor:
    """Add FULLY_CONNECTED, which returns float32 [..., N].

    `tensor` [..., K] is multiplied by the transposed `weights` [N, K]. Then `bias` [N] is added, and
    `activation` is applied.

    Raises:
        RefusedError: `tensor` or `weights` are not float32. TFLite treats integers as quantized codes.
    """
    _check_float32(tensor.dtype, weights.dtype)
    if bias is None:
        bias = np.zeros(len(weights), np.float32)
    inputs = [
        tensor,
        step.builder.constant(np.ascontiguousarray(weights, np.float32)),
        step.builder.constant(np.ascontiguousarray(bias, np.float32)),
    ]
    options = Options("FullyConnectedOptions", {"keepNumDims": True, **fused(activation)})
    shape = (*tensor.shape[:-1], len(weights))
    return step.emit("FULLY_CONNECTED", inputs, shape, options, version=5)


def _is_row(addend: NDArray[Any], columns: int) -> bool:
    """Whether a constant adds the same values to every row."""
    return addend.size == 1 or (addend.size == columns and addend.shape[-1] == columns)


def _scaled(step: Step, tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else step.binary("MUL", tensor, step.number(factor))


def _check_float32(*dtypes: np.dtype[Any]) -> None:
    for dtype in dtypes:
        if dtype != np.float32:
            raise RefusedError(f"a matrix product of {dtype} is not covered, of float32 it is")


def _activated(step: Step, tensor: Tensor) -> Tensor:
    """Return the tensor after the activation that BATCH_MATMUL cannot apply itself."""
    kind = step.node.activation
    return tensor if kind == NO_ACTIVATION else step.unary(kind, tensor)


def _batch_matmul(step: Step, first: Tensor, right: Tensor) -> Tensor:
    """Add a product [..., M, K] x [..., K, N] with broadcast leading axes."""
    _check_float32(first.dtype, right.dtype)
    leading = np.broadcast_shapes(first.shape[:-2], right.shape[:-2])
    shape = (*leading, first.shape[-2], right.shape[-1])
    if len(shape) > 5:
        raise RefusedError(f"a product of {len(shape)} axes has no kernel in TFLite, at most 5 have")
    return step.emit("BATCH_MATMUL", [first, right], shape, Options("BatchMatMulOptions"), version=1)
