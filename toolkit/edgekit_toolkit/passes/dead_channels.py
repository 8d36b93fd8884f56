"""Removes channels that have no effect on the outputs. It finds these channels from the weights alone.

After training, some channels have weights near zero. Such a channel has the same value for every input, often
0 after a Relu. To find such channels, bounds of all channels are computed, layer by layer. When a channel is
removed, the effect of its constant value is added to the biases of the layers that read it. If one of these
layers pads with zeros, the value must be 0. A channel is also removed if all layers that read it have zero
weights for it.

Example: A channel with weights of 1e-30, bias -0.1 and a Relu is 0 for all inputs below 1e9. If a depthwise
filter with bias 0.2 follows, its output is the constant 0.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_toolkit.onnx_graph.channels import (
    ChannelAxis,
    ChannelGroup,
    compose_channels,
    find_groups,
    slice_channels,
)
from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute, copy_model
from edgekit_toolkit.onnx_graph.layers import Floats, Layer, LayerWeights, find_layers

# Kernels are fast for multiples of this number of channels.
_MULTIPLE: Final = 8
# The largest activation that is expected. The next larger float32 value is 64 away.
_MAX_ACTIVATION: Final = 1e9
# Relative errors that float32 makes anyway: of a sum, and of an output.
_SUM_ERROR: Final = 1e-6
_OUTPUT_ERROR: Final = 1e-7


@dataclass(frozen=True, slots=True)
class SlicedModel:
    """A float model from which channels were removed.

    `channels` contains the remaining channels of each changed `ChannelGroup`, by the name of the group.
    """

    channels: Mapping[str, tuple[int, ...]]
    model: onnx.ModelProto


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without channels that have no effect, or the model itself if there are none."""
    sliced = remove_dead_channels(model, multiple=_MULTIPLE)
    return model if sliced is None else sliced.model


def remove_dead_channels(model: onnx.ModelProto, *, multiple: int = 1) -> SlicedModel | None:
    """Return the model without channels that have no effect, or None if there are none.

    The outputs change only by rounding, unless an activation exceeds 1e9.

    Args:
        model: A float model.
        multiple: The number of remaining channels in each `ChannelGroup` must be a multiple of this number.
    """
    channels: dict[str, tuple[int, ...]] = {}
    remaining = model
    while (step := _remove_once(remaining, multiple)) is not None:
        channels, remaining = compose_channels(channels, step.channels), step.model
    return SlicedModel(channels, remaining) if channels else None


def _remove_once(model: onnx.ModelProto, multiple: int) -> SlicedModel | None:
    """Remove the channels that are dead now; then others may be dead."""
    groups, weights = find_groups(model), LayerWeights(model)
    bounds = _bounds(model, weights, groups)
    result = copy_model(model)
    changed = LayerWeights(result)  # has what groups before have moved
    channels = {}
    for group in groups:
        readings = [_ChannelReading(consumer, group, weights, bounds) for consumer in group.consumers]
        is_dead = np.logical_and.reduce([reading.is_constant for reading in readings])
        count = max(multiple, -(-int((~is_dead).sum()) // multiple) * multiple)
        if not readings or count >= group.size:
            continue
        stays = np.sort(np.argsort(is_dead, kind="stable")[:count])
        channels[group.name] = tuple(map(int, stays))
        for reading in readings:
            if reading.own_bias:
                name = reading.layer.bias
                moved = reading.constant(np.setdiff1d(range(group.size), stays))
                changed.set(name, changed.value(name) + moved)
    return SlicedModel(channels, slice_channels(result, channels)) if channels else None


def _bias(weights: LayerWeights, layer: Layer) -> Floats:
    return weights.value(layer.bias).astype(np.float64) if layer.bias else np.zeros(layer.channels)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Bounds of the values of each channel, [channels]."""

    low: Floats
    high: Floats

    def clip(self, low: float, high: float) -> "_Bounds":
        return _Bounds(np.clip(self.low, low, high), np.clip(self.high, low, high))

    def with_zero(self) -> "_Bounds":
        return _Bounds(np.minimum(self.low, 0), np.maximum(self.high, 0))


class _ChannelReading:
    """What a layer makes of each channel of a group.

    Attributes:
        layer: the layer.
        own_bias: whether its bias can take up constants.
        is_constant: whether each channel adds a constant to its outputs, bool [channels].
    """

    def __init__(
        self, layer: Layer, group: ChannelGroup, weights: LayerWeights, bounds: Mapping[str, _Bounds]
    ) -> None:
        self.layer, self.own_bias = layer, weights.is_own(layer.bias)
        self._columns, self._rows = group.columns(layer), weights.rows(layer)[0]
        inputs = len(group.tensors[layer.input].channels)
        values = bounds.get(layer.input) or _unbounded(inputs)
        values = values.with_zero() if layer.pads_zeros else values
        low, high = (np.repeat(side, layer.columns // inputs) for side in (values.low, values.high))
        self._center = (low + high) / 2
        error = np.abs(self._rows) * ((high - low) / 2 if self.own_bias else np.maximum(-low, high))
        peak = min(float(np.maximum(-low, high).max()), 1.0)  # of inputs that are all small
        allowed = _OUTPUT_ERROR * np.maximum(
            peak * np.abs(self._rows).max(axis=1), np.abs(_bias(weights, layer))
        )
        errors = [error[:, self._columns == channel].sum(axis=1) for channel in range(group.size)]
        self.is_constant = np.array([bool((error <= allowed).all()) for error in errors])

    def constant(self, channels: NDArray[np.intp]) -> Floats:
        """Return what some channels add to the outputs, [rows]."""
        own = np.isin(self._columns, channels)
        return np.asarray(self._rows[:, own] @ self._center[own])


def _bounds(model: onnx.ModelProto, weights: LayerWeights, groups: list[ChannelGroup]) -> dict[str, _Bounds]:
    """Return bounds of the activations in groups, from the weights alone."""
    index, layers = GraphIndex(model.graph), {layer.name: layer for layer in find_layers(model)}
    axes = {name: axis for group in groups for name, axis in group.tensors.items()}
    bounds: dict[str, _Bounds] = {}
    for node in model.graph.node:
        name = node.output[0] if node.output else ""
        if name not in axes:
            continue
        layer, source = layers.get(name), bounds.get(node.input[0])
        bound = None
        if layer is not None:
            bound = _of_layer(layer, weights, source)
        elif source is not None:
            bound = _of_operator(index, node, source, axes)
        if bound is not None and np.isfinite(bound.low).all() and np.isfinite(bound.high).all():
            bounds[name] = bound.clip(-_MAX_ACTIVATION, _MAX_ACTIVATION)
    return bounds


def _of_layer(layer: Layer, weights: LayerWeights, source: _Bounds | None) -> _Bounds:
    rows = weights.rows(layer)
    inputs = layer.shape[1] * layer.groups if layer.node.op_type == "Conv" else layer.columns
    if source is None:
        source = _unbounded(inputs)
    if layer.pads_zeros:
        source = source.with_zero()
    per_group = (layer.groups, inputs // layer.groups)
    low, high = (
        np.repeat(side.reshape(per_group), layer.columns // per_group[1], axis=1)[:, None]
        for side in (source.low, source.high)
    )
    smallest, largest = np.minimum(rows * low, rows * high), np.maximum(rows * low, rows * high)
    smallest, largest = smallest - _SUM_ERROR * np.abs(smallest), largest + _SUM_ERROR * np.abs(largest)
    bias = _bias(weights, layer)
    return _Bounds(*(bias + products.sum(axis=2).reshape(-1) for products in (smallest, largest)))


def _of_operator(
    index: GraphIndex, node: onnx.NodeProto, source: _Bounds, axes: Mapping[str, ChannelAxis]
) -> _Bounds | None:
    if node.op_type == "Relu":
        return source.clip(0, np.inf)
    if node.op_type == "Clip":
        limits = [index.constant(name) for name in node.input[1:]]
        if len(limits) != 2 or limits[0] is None or limits[1] is None:
            return None
        return source.clip(float(limits[0]), float(limits[1]))
    if node.op_type == "AveragePool" and (any(attribute(node, "pads", [])) or attribute(node, "auto_pad")):
        return source.with_zero()
    if node.op_type in {
        "AveragePool",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "Identity",
        "MaxPool",
        "ReduceMean",
    }:
        return source
    if node.op_type in {"Reshape", "Flatten"}:
        before, after = axes[node.input[0]].channels, axes[node.output[0]].channels
        count = len(after) // len(before)
        return _Bounds(np.repeat(source.low, count), np.repeat(source.high, count))
    return None


def _unbounded(count: int) -> _Bounds:
    return _Bounds(np.full(count, -_MAX_ACTIVATION), np.full(count, _MAX_ACTIVATION))
