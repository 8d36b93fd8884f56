"""Layers with constant weights, whose weights and inputs can be read as matrices.

A layer has G groups. In each group, R rows of the weight matrix produce R output channels from a patch of K
input values. The weights have the shape [G, R, K], and P patches have the shape [P, G, K]. A dense layer has
one group. A depthwise convolution has one group for each channel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute

Floats = NDArray[np.float64]
Patches = NDArray[np.float32]

# The most patches of a layer over all samples, and the most values in them. More change a moment little. A
# moment needs several patches for each column.
_MAX_PATCHES: Final = 12_000
_MAX_PATCH_VALUES: Final = 6_000_000
_MIN_PATCHES: Final = 2_000
_COLUMN_PATCHES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A Conv, Gemm or MatMul with constant weights.

    Attributes:
        name: The name of the output.
        input: The name of the input activation.
        weight, bias: The names of the initializers. `bias` is empty if there is none.
        shape: The shape of the weight.
        channel_axis: The axis of the output channels in the weight.
        node: The node in the graph. It must not be changed.
    """

    name: str
    input: str
    weight: str
    bias: str
    shape: tuple[int, ...]
    groups: int
    channel_axis: int
    node: onnx.NodeProto

    @property
    def channels(self) -> int:
        """The number of output channels."""
        return self.shape[self.channel_axis]

    @property
    def columns(self) -> int:
        """The number of input values that each output value depends on."""
        return math.prod(self.shape) // self.channels

    def to_rows(self, weight: NDArray[Any]) -> Floats:
        """Return a weight as a float64 array [groups, rows, columns], with a row for each output channel."""
        rows = np.moveaxis(weight, self.channel_axis, 0).astype(np.float64)
        return rows.reshape(self.groups, self.channels // self.groups, self.columns)

    def from_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Convert an array [groups, rows, columns] to the shape of the weight."""
        others = [size for axis, size in enumerate(self.shape) if axis != self.channel_axis]
        return np.ascontiguousarray(np.moveaxis(rows.reshape(self.channels, *others), 0, self.channel_axis))

    @property
    def max_patches(self) -> int:
        """The default of `max_patches` in `gather`."""
        affordable = _MAX_PATCH_VALUES // (self.groups * self.columns)
        return min(max(affordable, _COLUMN_PATCHES * self.columns, _MIN_PATCHES), _MAX_PATCHES)

    @property
    def pads_zeros(self) -> bool:
        """Whether patches at the border of the input contain padding."""
        is_same = attribute(self.node, "auto_pad", b"NOTSET") in {b"SAME_UPPER", b"SAME_LOWER"}
        return self.node.op_type == "Conv" and (is_same or any(attribute(self.node, "pads", [])))

    def gather(self, inputs: Sequence[NDArray[Any]], max_patches: int | None = None) -> Patches:
        """Sample patches from the inputs of several inferences, with the shape [patches, groups, columns].

        Args:
            inputs: The input of the layer in each inference. Inputs of the same shape are sampled at the same
                positions.
            max_patches: The approximate maximum number of patches.
        """
        rng, count = np.random.default_rng(0), max(1, (max_patches or self.max_patches) // len(inputs))
        is_stackable = self.node.op_type == "Conv" and len({values.shape[1:] for values in inputs}) == 1
        if not is_stackable:
            return np.concatenate([self.patches(values, count, rng) for values in inputs])
        windows = self._windows(np.concatenate(inputs))
        sizes = [len(values) * math.prod(windows.shape[2 : inputs[0].ndim]) for values in inputs]
        begins = np.cumsum([0, *sizes[:-1]])
        draws = [begin + _draw(size, count, rng) for begin, size in zip(begins, sizes, strict=True)]
        return self._take(windows, np.concatenate(draws))

    def patches(self, values: NDArray[Any], count: int, rng: np.random.Generator) -> Patches:
        """Sample patches from one input, with the shape [patches, groups, columns].

        Args:
            values: The input of the layer.
            count: The maximum number of patches. If there are more, they are chosen at random.
            rng: The random generator.
        """
        if self.node.op_type != "Conv":
            if self.node.op_type == "Gemm" and attribute(self.node, "transA", 0):
                values = values.T
            rows = values.reshape(-1, values.shape[-1])
            return rows[_draw(len(rows), count, rng)].astype(np.float32)[:, None]
        windows = self._windows(values)
        return self._take(windows, _draw(len(values) * math.prod(windows.shape[2 : values.ndim]), count, rng))

    def _windows(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the view [batch, channels, positions of the output, kernel] of a Conv's input."""
        kernel = self.shape[2:]
        strides = list(attribute(self.node, "strides", [1] * len(kernel)))
        dilations = list(attribute(self.node, "dilations", [1] * len(kernel)))
        spans = [dilation * (size - 1) + 1 for dilation, size in zip(dilations, kernel, strict=True)]
        padded = np.pad(values, [(0, 0), (0, 0), *self._pads(values.shape[2:], strides, spans)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, spans, tuple(range(2, values.ndim)))
        steps = [slice(None, None, step) for step in (1, 1, *strides, *dilations)]
        return windows[tuple(steps)]

    def _take(self, windows: NDArray[Any], positions: NDArray[np.int64]) -> Patches:
        batch, sizes = windows.shape[0], windows.shape[2 : len(self.shape)]
        picks = np.unravel_index(positions, (batch, *sizes))
        chosen: Any = (picks[0], slice(None), *picks[1:])
        chosen_patches = windows[chosen]  # [positions, channels, kernel]
        patches: Patches = chosen_patches.astype(np.float32, copy=False).reshape(
            len(chosen_patches), self.groups, -1
        )
        return patches

    def _pads(
        self, sizes: Sequence[int], strides: Sequence[int], spans: Sequence[int]
    ) -> list[tuple[int, int]]:
        mode = attribute(self.node, "auto_pad", b"NOTSET")
        if mode == b"VALID":
            return [(0, 0)] * len(sizes)
        if mode in {b"SAME_UPPER", b"SAME_LOWER"}:
            totals = [
                max((math.ceil(size / stride) - 1) * stride + span - size, 0)
                for size, stride, span in zip(sizes, strides, spans, strict=True)
            ]
            halves = [(total // 2, total - total // 2) for total in totals]
            return halves if mode == b"SAME_UPPER" else [half[::-1] for half in halves]
        pads = list(attribute(self.node, "pads", [0] * (2 * len(sizes))))
        return list(zip(pads[: len(sizes)], pads[len(sizes) :], strict=True))


class LayerWeights:
    """The weights and biases of a model's layers, by the names of initializers. `set` changes the model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._index = GraphIndex(model.graph)

    def is_own(self, name: str) -> bool:
        """Return whether only one layer reads a weight or bias. Return False for a missing bias."""
        return bool(name) and len(self._index.consumers(name)) == 1

    def value(self, name: str) -> NDArray[np.float32]:
        return numpy_helper.to_array(self._index.initializers[name])

    def rows(self, layer: Layer) -> Floats:
        return layer.to_rows(self.value(layer.weight))

    def set(self, name: str, value: NDArray[Any]) -> None:
        self._index.initializers[name].CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))


def _draw(total: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return np.arange(total) if total <= count else np.sort(rng.choice(total, count, replace=False))


def find_layers(model: onnx.ModelProto) -> list[Layer]:
    """Return the layers of the top-level graph, in order.

    Layers that share a weight but use different axes or groups of it are not included.
    """
    index = GraphIndex(model.graph)
    layers = [layer for node in model.graph.node if (layer := _as_layer(index, node)) is not None]
    views: dict[str, set[tuple[int, int]]] = {}
    for layer in layers:
        views.setdefault(layer.weight, set()).add((layer.channel_axis, layer.groups))
    return [layer for layer in layers if len(views[layer.weight]) == 1]


def _as_layer(index: GraphIndex, node: onnx.NodeProto) -> Layer | None:
    if node.op_type not in {"Conv", "Gemm", "MatMul"} or node.domain not in {"", "ai.onnx"}:
        return None
    weight = index.constant(node.input[1])
    if weight is None or weight.dtype != np.float32 or not weight.size or node.input[0] in index.initializers:
        return None
    is_conv = node.op_type == "Conv"
    if weight.ndim < 3 if is_conv else weight.ndim != 2:
        return None
    if node.op_type == "Gemm" and (attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1):
        return None
    is_turned = node.op_type == "MatMul" or (node.op_type == "Gemm" and not attribute(node, "transB", 0))
    channel_axis = int(is_turned)
    bias = node.input[2] if len(node.input) > 2 else ""
    value = index.constant(bias)
    if bias and (value is None or value.shape != (weight.shape[channel_axis],)):
        return None
    return Layer(
        name=node.output[0],
        input=node.input[0],
        weight=node.input[1],
        bias=bias,
        shape=weight.shape,
        groups=int(attribute(node, "group", 1)) if is_conv else 1,
        channel_axis=channel_axis,
        node=node,
    )
