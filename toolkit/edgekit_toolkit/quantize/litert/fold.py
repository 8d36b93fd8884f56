"""Folds convolutions with few channels, so that they process several neighbouring pixels at a time.

XNNPACK's int8 kernels for AVX-512 multiply 8 input channels by 16 output channels per step. The first
convolution of an image model has 3 input channels and often 8 output channels, so most of each step is
wasted. A row of W pixels with C channels has the same bytes as a row of W / n pixels with n * C channels. So
the weights are repeated n times, each time shifted by one pixel and padded with 0. Each step then computes
several output pixels. The results are equal, because only products with 0 are added. A depthwise convolution
with few channels is first converted to a dense one.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.quantize.litert.prepare import add_like, operator_code, reshape
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.tflite.flatbuffer import (
    Model,
    Operator,
    SubGraph,
    Tensor,
    constant,
    operator_name,
    pack,
    parse,
    parsed,
    schema,
    shape_of,
    sizes_of,
    stored_bytes,
    tensor_name,
)

# Fits the times measured with AVX-512 VNNI. Kernels for AVX2 make eight output channels a step.
_INPUT_STEP: Final = 8
_OUTPUT_STEP: Final = 16
_FACTORS: Final = (1, 2, 4)
# Their depthwise kernels take sixteen channels a step: with half of them a dense convolution is faster.
_NARROW: Final = 8
# Folding is worth its reshapes if at most this share of the steps remains.
_MOST_STEPS: Final = 0.7


class _Fold(NamedTuple):
    """How a convolution is folded along the rows.

    Attributes:
        pixels: number of input pixels that become one.
        outputs: number of output pixels that become one.
        stride, padding: stride along a row and left padding of the original convolution, in pixels.
        before, groups: for the folded kernel: groups of pixels before its own group, and all groups.
    """

    pixels: int
    outputs: int
    stride: int
    padding: int
    before: int
    groups: int


def fold_pixels(prepared: bytes, plan: Plan) -> tuple[bytes, Plan]:
    """Return an equivalent model and its plan. Convolutions with few channels process groups of pixels.

    Args:
        prepared: A float model from `prepare.prepare`.
        plan: The plan of the model. Float layers are not folded, because that would make them slower.
    """
    unchanged = parsed(prepared)
    if not any(
        _fold(unchanged, unchanged.subgraphs[0], operator, plan)
        for operator in unchanged.subgraphs[0].operators
    ):
        return prepared, plan
    model = parse(prepared)
    graph = model.subgraphs[0]
    added: dict[str, str] = {}  # new tensor -> the tensor whose values it holds
    rewritten: list[Operator] = []
    for operator in graph.operators:
        fold = _fold(model, graph, operator, plan)
        rewritten += [operator] if fold is None else _rewrite(model, graph, operator, fold, added)
    graph.operators = rewritten
    ranges = {name: plan.ranges[old] for name, old in added.items() if old in plan.ranges}
    return pack(model), replace(plan, kernels=plan.kernels.union(added), ranges={**plan.ranges, **ranges})


def _fold(model: Model, graph: SubGraph, operator: Operator, plan: Plan) -> _Fold | None:
    """Return how to fold an operator; None if that is impossible or does not pay off."""
    options, kind = operator.builtinOptions, operator_name(model, operator)
    if (
        kind not in {"CONV_2D", "DEPTHWISE_CONV_2D"}
        or tensor_name(graph.tensors[operator.outputs[0]]) not in plan.kernels
        or options.padding != schema.Padding.SAME
        or options.dilationWFactor != 1
    ):
        return None
    source, filters, output = (graph.tensors[at] for at in (*operator.inputs[:2], operator.outputs[0]))
    out, _, width, channels = shape_of(filters)
    if kind == "DEPTHWISE_CONV_2D":
        out = channels  # as a dense convolution
        if channels > _NARROW:
            return None
    if any(min(sizes_of(tensor)[1:]) < 0 for tensor in (source, output)) or shape_of(source)[3] != channels:
        return None  # rows of a free length, or a convolution in groups
    if not all(stored_bytes(model, graph.tensors[at]) for at in operator.inputs[1:] if at >= 0):
        return None  # computed weights
    folds = [
        fold
        for made_at_once in _FACTORS
        if (fold := _along(shape_of(source)[2], width, options.strideW, made_at_once)) is not None
    ]
    if not folds:
        return None
    best = min(folds, key=lambda fold: (_steps(fold, out, channels), -fold.outputs))
    if kind == "DEPTHWISE_CONV_2D":
        return best
    as_it_is = width * -(-channels // _INPUT_STEP) * -(-out // _OUTPUT_STEP)
    return best if _steps(best, out, channels) <= _MOST_STEPS * as_it_is else None


def _along(row: int, width: int, stride: int, outputs: int) -> _Fold | None:
    """Return the folding of rows of `row` pixels; None if groups or padding do not divide evenly."""
    pixels = stride * outputs
    if row % pixels:
        return None
    padding = max(width - stride, 0) // 2  # SAME padding, for rows whose length the stride divides
    before = -(-padding // pixels)
    after = max(0, -(-(stride * (outputs - 1) + width - padding) // pixels) - 1)
    if (before + after) // 2 != before:  # the folded kernel is padded alike, half on each side
        return None
    return _Fold(pixels, outputs, stride, padding, before, before + 1 + after)


def _steps(fold: _Fold, out: int, channels: int) -> float:
    """Return the steps of the kernel for each row of weights and output pixel."""
    inputs, outputs = fold.pixels * channels, fold.outputs * out
    return fold.groups * -(-inputs // _INPUT_STEP) * -(-outputs // _OUTPUT_STEP) / fold.outputs


def _rewrite(
    model: Model, graph: SubGraph, operator: Operator, fold: _Fold, added: dict[str, str]
) -> Iterator[Operator]:
    """Yield the operators that replace a convolution, whose weights are changed."""
    if operator_name(model, operator) == "DEPTHWISE_CONV_2D":
        _make_dense(model, graph, operator)
    source, output = int(operator.inputs[0]), int(operator.outputs[0])
    folded = _add_folded(graph, source, fold.pixels, added)
    yield reshape(model, graph, source, folded)
    filters, *bias = (graph.tensors[at] for at in operator.inputs[1:] if at >= 0)
    _store(model, filters, _shifted(_values(model, filters), fold))
    for tensor in bias:
        _store(model, tensor, np.tile(_values(model, tensor), fold.outputs))
    operator.inputs = [folded, *operator.inputs[1:]]
    operator.builtinOptions.strideW = 1
    yield operator
    if fold.outputs > 1:
        operator.outputs = [_add_folded(graph, output, fold.outputs, added)]
        yield reshape(model, graph, operator.outputs[0], output)


def _make_dense(model: Model, graph: SubGraph, operator: Operator) -> None:
    """Turn a depthwise convolution into one that reads all channels, with weights of 0."""
    filters, depthwise_options = graph.tensors[operator.inputs[1]], operator.builtinOptions
    _, height, width, channels = shape_of(filters)
    dense = np.zeros((channels, height, width, channels), np.float32)
    diagonal = np.arange(channels)
    dense[diagonal, :, :, diagonal] = _values(model, filters)[0].transpose(2, 0, 1)
    _store(model, filters, dense)
    options = schema.Conv2DOptionsT()
    for name in ("padding", "strideH", "strideW", "dilationHFactor", "fusedActivationFunction"):
        setattr(options, name, getattr(depthwise_options, name))
    operator.opcodeIndex = operator_code(model, schema.BuiltinOperator.CONV_2D)
    operator.builtinOptionsType, operator.builtinOptions = schema.BuiltinOptions.Conv2DOptions, options


def _add_folded(graph: SubGraph, position: int, pixels: int, added: dict[str, str]) -> int:
    batch, rows, row, channels = sizes_of(graph.tensors[position])
    folded = add_like(graph, position, (batch, rows, row // pixels, channels * pixels))
    added[tensor_name(graph.tensors[folded])] = tensor_name(graph.tensors[position])
    return folded


def _shifted(filters: NDArray[np.float32], fold: _Fold) -> NDArray[np.float32]:
    """Weights [made * out, height, groups, pixels * channels] from [out, height, width, channels]."""
    out, height, width, channels = filters.shape
    row = np.zeros((fold.outputs, out, height, fold.groups * fold.pixels, channels), np.float32)
    for index in range(fold.outputs):
        begin = fold.before * fold.pixels + fold.stride * index - fold.padding
        row[index, :, :, begin : begin + width] = filters
    return row.reshape(fold.outputs * out, height, fold.groups, fold.pixels * channels)


def _values(model: Model, tensor: Tensor) -> NDArray[Any]:
    value = constant(model, tensor)
    if value is None:
        raise ValueError(f"tensor '{tensor_name(tensor)}' holds no values")
    return value


def _store(model: Model, tensor: Tensor, value: NDArray[Any]) -> None:
    """Replace the values of a tensor, whose buffer no other tensor uses after `prepare`."""
    tensor.shape = list(value.shape)
    model.buffers[tensor.buffer].data = np.frombuffer(value.tobytes(), np.uint8)
