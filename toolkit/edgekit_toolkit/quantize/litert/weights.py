"""Chooses ranges of weights so that the biases fit into 32 bits.

The scale of a bias is input scale x weight scale. If the weights of a channel are near 0, for example 1e-30
after batch normalization was folded into a dead channel, this scale is so small that the bias overflows. For
example, ai-edge-quantizer 0.10 then stores -2147483648 for a bias of +0.5. Such a channel gets a larger
weight scale, which does not reduce its accuracy.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.tflite.flatbuffer import (
    Model,
    Operator,
    SubGraph,
    constant,
    operator_name,
    operators,
    tensor_name,
)

_LARGEST_CODE: Final = 127
# A quarter of 2**31: sums of products are added to a bias, and the input's scale may be rounded.
_LARGEST_BIAS_CODE: Final = 2.0**29
_SMALLEST_SPAN: Final = 1e-9


class _Operands(NamedTuple):
    """Places of an operator's weight, activation and bias, and the weight's axis of output channels."""

    weight: int
    activation: int
    bias: int
    axis: int


_OPERANDS: Final[Mapping[str, _Operands]] = {
    "CONV_2D": _Operands(1, 0, 2, 0),
    "DEPTHWISE_CONV_2D": _Operands(1, 0, 2, 3),
    "FULLY_CONNECTED": _Operands(1, 0, 2, 0),
    "TRANSPOSE_CONV": _Operands(1, 2, 3, 0),
}


def weight_bounds(
    model: Model, plan: Plan, scales: Mapping[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """Return a dict from the names of weights to the magnitudes that the largest code must represent.

    Weights whose own largest magnitudes are sufficient are not in the result. A larger magnitude is needed if
    the bias would overflow, or if the scale would be smaller than in `scales`.

    Args:
        model: A float model from `prepare.prepare`.
        plan: The kernels and ranges.
        scales: A dict from the outputs of operators to the float32 scales [channels] of compressed weights.

    Returns:
        float32 arrays with the rank of the weight. They have one value per channel if `plan.per_channel`,
        else a single value.
    """
    weights: dict[str, NDArray[np.float32]] = {}
    for graph, _, operator in operators(model):
        inputs = _OPERANDS.get(operator_name(model, operator))
        output = tensor_name(graph.tensors[operator.outputs[0]])
        if inputs is None or output not in plan.kernels:
            continue
        bounds = _bounds(model, graph, operator, inputs, plan, scales.get(output))
        if bounds is not None:
            name = tensor_name(graph.tensors[operator.inputs[inputs.weight]])
            weights[name] = np.maximum(bounds, weights.get(name, np.float32(0)))
    return weights


def _bounds(
    model: Model,
    graph: SubGraph,
    operator: Operator,
    inputs: _Operands,
    plan: Plan,
    coded: NDArray[np.float32] | None,
) -> NDArray[np.float32] | None:
    weight = constant(model, graph.tensors[operator.inputs[inputs.weight]])
    bias = _constant_input(model, graph, operator, inputs.bias)
    span = plan.ranges.get(tensor_name(graph.tensors[operator.inputs[inputs.activation]]))
    if weight is None or bias is None or span is None:
        return None
    others: Any = tuple(axis for axis in range(weight.ndim) if axis != inputs.axis)
    peak = np.abs(weight.astype(np.float64)).max(axis=others, keepdims=True)
    scale = max(max(span[1], 0.0) - min(span[0], 0.0), _SMALLEST_SPAN) / 255
    least = np.abs(bias.astype(np.float64)).reshape(peak.shape) * _LARGEST_CODE / (_LARGEST_BIAS_CODE * scale)
    bounds = np.maximum(peak, least)
    if coded is not None and plan.per_channel and coded.size == peak.size:
        bounds = np.maximum(bounds, coded.reshape(peak.shape).astype(np.float64) * _LARGEST_CODE)
    if not plan.per_channel:
        bounds, peak = (np.full([1] * weight.ndim, value.max()) for value in (bounds, peak))
    return bounds.astype(np.float32) if (bounds > peak).any() else None


def _constant_input(model: Model, graph: SubGraph, operator: Operator, position: int) -> NDArray[Any] | None:
    if len(operator.inputs) <= position or operator.inputs[position] < 0:
        return None
    return constant(model, graph.tensors[operator.inputs[position]])
