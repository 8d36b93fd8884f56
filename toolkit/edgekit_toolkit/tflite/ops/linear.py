"""Matrix products: fully connected layers and products of two computed tensors."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.rules import as_onnx, flattening
from edgekit_toolkit.tflite.step import Step, fused
from edgekit_toolkit.tflite.view import NO_ACTIVATION


@writes("Gemm", rule=as_onnx, fuses=True)
def write_gemm(step: Step) -> None:
    """Write FULLY_CONNECTED for constant weights, else BATCH_MATMUL."""
    left = step.read(0)
    if step.attribute("transA", 0):
        left = step.builder.transpose(left, [1, 0])
    alpha, beta = np.float32(step.attribute("alpha", 1.0)), np.float32(step.attribute("beta", 1.0))
    weights = step.value(1)
    if weights is None:
        _write_computed_gemm(step, left, alpha, beta)
        return
    weights = (weights if step.attribute("transB", 0) else weights.T) * alpha
    addend = step.value(2)
    if not step.has(2) or (addend is not None and _is_bias(addend, weights.shape[0])):
        bias = None if addend is None else np.broadcast_to(addend.reshape(-1) * beta, weights.shape[:1])
        step.give(fully_connected(step, left, weights, bias, step.node.activation))
        return
    product = fully_connected(step, left, weights, None)
    step.give(step.binary("ADD", product, _scaled(step, step.read(2), beta), step.node.activation))


@writes("MatMul", rule=as_onnx, fuses=True)
def write_matmul(step: Step) -> None:
    """Write FULLY_CONNECTED where the second factor is a constant matrix, else BATCH_MATMUL."""
    weights = step.value(1)
    if weights is not None and weights.ndim == 2 and len(step.shape(0)) >= 2:
        step.give(fully_connected(step, step.read(0), weights.T, None, step.node.activation))
        return
    left, right = step.read(0), step.read(1)
    if len(left.shape) == 1:
        left = step.builder.reshape(left, (1, *left.shape))
    if len(right.shape) == 1:
        right = step.builder.reshape(right, (*right.shape, 1))
    product = _batch_matmul(step, left, right)
    step.give(_activated(step, step.builder.reshape(product, step.held())))


@writes("FusedLinear", rule=as_onnx, fuses=True)
def write_linear(step: Step) -> None:
    """Write a product with a constant matrix and a bias: inputs x, [K, N], [N]."""
    weights, bias = step.constant(1, "the weights"), step.constant(2, "the bias")
    step.give(fully_connected(step, step.read(0), weights.T, bias.reshape(-1), step.node.activation))


@writes("FusedFlattenLinear", rule=flattening, fuses=True)
def write_flatten_linear(step: Step) -> None:
    """Write a reshape to a matrix and a product with constant weights, whose rows follow the held form.

    Inputs x [N, ...], weights [K, M], bias [M]. So an image held as [N, H, W, C] is not transposed.
    """
    tensor, shape = step.read(0), step.shape(0)
    weights, bias = step.constant(1, "the weights"), step.constant(2, "the bias")
    order = [axis - 1 for axis in step.form if axis > 0]
    inner = weights.reshape(*shape[1:], weights.shape[1]).transpose(*order, len(order))
    flat = step.builder.reshape(tensor, (shape[0], weights.shape[0]))
    rows = inner.reshape(weights.shape)
    step.give(fully_connected(step, flat, rows.T, bias.reshape(-1), step.node.activation))


def fully_connected(
    step: Step,
    tensor: Tensor,
    weights: NDArray[Any],
    bias: NDArray[Any] | None,
    activation: str = NO_ACTIVATION,
) -> Tensor:
    """Add FULLY_CONNECTED.

    Args:
        step: being written.
        tensor: float32 [..., K].
        weights: float32 [N, K].
        bias: float32 [N], or None for zeros.
        activation: of the result.

    Returns:
        float32 [..., N].

    Raises:
        RefusedError: integers, for which TFLite's kernel means quantized numbers.
    """
    if tensor.dtype != np.float32 or weights.dtype != np.float32:
        raise RefusedError(f"a matrix product of {tensor.dtype} is not covered, of float32 it is")
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


def _is_bias(addend: NDArray[Any], columns: int) -> bool:
    """Whether a constant adds the same to every row."""
    return addend.size == 1 or (addend.size == columns and addend.shape[-1] == columns)


def _write_computed_gemm(step: Step, left: Tensor, alpha: np.float32, beta: np.float32) -> None:
    right = step.read(1)
    if step.attribute("transB", 0):
        right = step.builder.transpose(right, [1, 0])
    result = _scaled(step, _batch_matmul(step, left, right), alpha)
    if step.has(2):
        result = step.binary("ADD", result, _scaled(step, step.read(2), beta))
    step.give(_activated(step, result))


def _scaled(step: Step, tensor: Tensor, factor: np.float32) -> Tensor:
    return tensor if factor == 1 else step.binary("MUL", tensor, step.number(float(factor)))


def _activated(step: Step, tensor: Tensor) -> Tensor:
    """Return the tensor after the activation that BATCH_MATMUL cannot apply itself."""
    kind = step.node.activation
    return tensor if kind == NO_ACTIVATION else step.emit(kind, [tensor], tensor.shape)


def _batch_matmul(step: Step, left: Tensor, right: Tensor) -> Tensor:
    """Add a product [..., M, K] x [..., K, N] with broadcast leading axes."""
    if left.dtype != np.float32 or right.dtype != np.float32:
        raise RefusedError(f"a matrix product of {left.dtype} is not covered, of float32 it is")
    leading = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*leading, left.shape[-2], right.shape[-1])
    if len(shape) > 5:
        raise RefusedError(f"a product of {len(shape)} axes has no kernel in TFLite, at most 5 have")
    return step.emit("BATCH_MATMUL", [left, right], shape, Options("BatchMatMulOptions"), version=1)
