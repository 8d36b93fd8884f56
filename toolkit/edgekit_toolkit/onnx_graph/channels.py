"""Finds the channels of a network that can be removed together, and removes some of them.

The output channels of a layer pass through activations, pooling and depthwise convolutions to the layers that
consume them. For example, to remove channel 3 from the sequence Conv, Relu, depthwise Conv, Conv, the module
removes row 3 of the first weight, filter 3 of the second weight and column 3 of the third weight. If the
outputs of two layers are added, the same channels are removed from both layers. Channels are kept if an
output of the model or an operator without a rule in this module uses them. Such operators are control flow,
grouped convolutions and a softmax over channels.

The result depends only on the model and on the channels, so a recipe can repeat it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_toolkit.onnx_graph.index import (
    DEFAULT_DOMAINS,
    GraphIndex,
    add_constant,
    attribute,
    copy_model,
    inferred_shapes,
    remove_unused_initializers,
)
from edgekit_toolkit.onnx_graph.layers import Layer, find_layers

Channels = Mapping[str, tuple[int, ...]]
"""A dict from names of groups to the channels that stay, in ascending order."""

FOREIGN: Final = -1
"""Stands for a channel of another group. A Concat can join channels of several groups."""


@dataclass(frozen=True, slots=True)
class ChannelAxis:
    """The axis of a tensor that contains the channels of a group.

    Attributes:
        channels: The channel at each index of `axis`, or `FOREIGN` if the index is no channel of the group.
    """

    axis: int
    channels: NDArray[np.int64]

    def mask(self, stays: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a bool mask of the indices of the axis that remain.

        `stays` states whether each channel of the group remains. `FOREIGN` indices always remain.
        """
        return np.asarray((self.channels == FOREIGN) | stays[self.channels])

    def equals(self, other: "ChannelAxis") -> bool:
        return self.axis == other.axis and np.array_equal(self.channels, other.channels)


@dataclass(slots=True)
class ChannelGroup:
    """Channels that must be removed from several layers together.

    Attributes:
        name: The output of the first layer that produces the channels.
        producers: The layers that produce the channels, in the order of the graph.
        depthwise: The layers that filter each channel separately.
        consumers: The layers that mix the channels.
        tensors: A dict from the name of each activation with these channels to the axis of the channels.
        constants: A dict from (node index, input index, axis) to the axis of the channels, for constant
            inputs with these channels.
        reshapes: A dict from the index of a Reshape node to the axis of the channels in its output.
    """

    name: str
    size: int
    producers: list[Layer] = field(default_factory=list)
    depthwise: list[Layer] = field(default_factory=list)
    consumers: list[Layer] = field(default_factory=list)
    tensors: dict[str, ChannelAxis] = field(default_factory=dict)
    constants: dict[tuple[int, int, int], ChannelAxis] = field(default_factory=dict)
    reshapes: dict[int, int] = field(default_factory=dict)

    def columns(self, consumer: Layer) -> NDArray[np.int64]:
        """Return the channel that each column of a consumer's weight belongs to, or `FOREIGN`."""
        channels = self.tensors[consumer.input].channels
        return np.repeat(channels, consumer.columns // len(channels))


def find_groups(model: onnx.ModelProto) -> list[ChannelGroup]:
    """Return the groups of channels that can be removed, in the order of the graph."""
    index = GraphIndex(model.graph, inferred_shapes(model))
    layers = {layer.name: layer for layer in find_layers(model)}
    positions = {id(node): position for position, node in enumerate(model.graph.node)}
    groups: list[ChannelGroup] = []
    members: set[str] = set()
    for layer in layers.values():
        if layer.name in members or layer.groups > 1 or layer.channels == 1:
            continue
        try:
            group = _ChannelSearch(index, layers, positions).follow(layer)
        except _ChannelsStayError:
            continue
        members.update(producer.name for producer in group.producers)
        groups.append(group)
    return groups


def slice_channels(model: onnx.ModelProto, channels: Channels) -> onnx.ModelProto:
    """Return a copy of the model that has only some of the channels. The order and the names are unchanged.

    Args:
        model: The model.
        channels: A dict from the name of a group to the channels that remain, in ascending order. Groups that
            are missing in the dict are not changed.

    Raises:
        ValueError: There is no such group or channel, or the channels are not in ascending order.
    """
    check_channels(channels)
    groups = {group.name: group for group in find_groups(model)}
    for name, indices in channels.items():
        if name not in groups:
            raise ValueError(f"channels of {name!r} cannot be removed")
        if indices[-1] >= groups[name].size:
            raise ValueError(f"{name!r} has {groups[name].size} channels, got index {indices[-1]}")
    result = copy_model(model)
    _slice(result, [group for group in groups.values() if group.name in channels], channels)
    remove_unused_initializers(result.graph)
    return result


def check_channels(channels: Channels) -> None:
    """Raise ValueError if a group has no channels, or its channels are not in ascending order."""
    for name, indices in channels.items():
        ascending = all(low < high for low, high in itertools.pairwise(indices))
        if not indices or indices[0] < 0 or not ascending:
            raise ValueError(f"channels of {name!r} are not indices in ascending order")


def compose_channels(first: Channels, second: Channels) -> dict[str, tuple[int, ...]]:
    """Return the channels of the original model that remain after slicing it by `first` and then by `second`.

    `second` uses the channel indices of the model that was sliced by `first`.
    """
    composed = dict(first)
    for name, indices in second.items():
        composed[name] = tuple(first[name][i] for i in indices) if name in first else indices
    return composed


def _slice(model: onnx.ModelProto, groups: Sequence[ChannelGroup], channels: Channels) -> None:
    """Slice all tensors of some groups, in place; behind a Concat, several groups lie in one tensor."""
    constants: dict[tuple[int, int, int], NDArray[np.bool_]] = {}
    tensors: dict[str, tuple[int, NDArray[np.bool_]]] = {}
    for group in groups:
        stays = np.isin(range(group.size), channels[group.name])
        for key, where in group.constants.items():
            constants[key] = where.mask(stays) & constants.get(key, True)
        for name, where in group.tensors.items():
            tensors[name] = where.axis, where.mask(stays) & tensors.get(name, (0, True))[1]
    index = GraphIndex(model.graph)
    nodes = model.graph.node
    for (position, operand, axis), mask in constants.items():
        node = nodes[position]
        name = node.input[operand]
        sliced = np.compress(mask, numpy_helper.to_array(index.initializers[name]), axis)
        if len(index.consumers(name)) > 1:
            node.input[operand] = add_constant(index, f"{name}_sliced", sliced)
        else:
            index.initializers[name].CopyFrom(numpy_helper.from_array(sliced, name))
    for layer in {layer.name: layer for group in groups for layer in group.depthwise}.values():
        node = index.producers[layer.name]
        count = int(tensors[layer.input][1].sum())
        next(item for item in node.attribute if item.name == "group").i = count
    reshapes = dict(item for group in groups for item in group.reshapes.items())
    for position, axis in reshapes.items():
        node = nodes[position]
        sizes = numpy_helper.to_array(index.initializers[node.input[1]]).copy()
        if sizes[axis] > 0:
            sizes[axis] = tensors[node.output[0]][1].sum()
            node.input[1] = add_constant(index, f"{node.input[1]}_sliced", sizes)
    for value in model.graph.value_info:
        if value.name in tensors and value.type.tensor_type.HasField("shape"):
            axis, mask = tensors[value.name]
            value.type.tensor_type.shape.dim[axis].dim_value = int(mask.sum())


class _ChannelsStayError(Exception):
    """The channels of a tensor cannot go."""


class _ChannelSearch:
    """Follows the channels of one layer through the graph, in both directions."""

    def __init__(self, index: GraphIndex, layers: Mapping[str, Layer], positions: Mapping[int, int]) -> None:
        self.index, self._layers, self._positions = index, layers, positions
        self._open: list[str] = []
        self._passed: set[str] = set()

    def follow(self, layer: Layer) -> ChannelGroup:
        self._group = ChannelGroup(layer.name, layer.channels)
        self.reach(layer.name, ChannelAxis(self._output_axis(layer), np.arange(layer.channels)))
        while self._open:
            name = self._open.pop()
            for node in [self.index.producers[name], *self.index.consumers(name)]:
                self._pass(node, name)
        for members in (self._group.producers, self._group.depthwise, self._group.consumers):
            members.sort(key=lambda member: self._positions[id(member.node)])
        self._group.name = self._group.producers[0].name
        return self._group

    def reach(self, name: str, where: ChannelAxis) -> None:
        """Note that the channels of the group lie in a tensor."""
        previous = self._group.tensors.get(name)
        if previous is None and name in self.index.producers and name not in self.index.outputs:
            self._group.tensors[name] = where
            self._open.append(name)
        elif previous is None or not previous.equals(where):
            raise _ChannelsStayError

    def cut(self, node: onnx.NodeProto, operand: int, where: ChannelAxis) -> None:
        """Note that the channels of the group lie in a constant."""
        name = node.input[operand]
        value = self.index.constant(name)
        if value is None or value.shape[where.axis] != len(where.channels) or name in self.index.outputs:
            raise _ChannelsStayError
        self._group.constants[self._positions[id(node)], operand, where.axis] = where

    def where(self, name: str) -> ChannelAxis:
        return self._group.tensors[name]

    def shape(self, name: str) -> tuple[int | None, ...]:
        tensor = self.index.initializers.get(name)
        shape = self.index.shapes.get(name) if tensor is None else tuple(tensor.dims)
        if shape is None:
            raise _ChannelsStayError
        return shape

    def through_reshape(self, node: onnx.NodeProto, axis: int) -> None:
        """Note the axis whose size a Reshape states."""
        self._group.reshapes[self._positions[id(node)]] = axis

    def _pass(self, node: onnx.NodeProto, name: str) -> None:
        layer = self._layers.get(node.output[0])
        if layer is not None and len(self.index.consumers(layer.weight)) > 1:
            raise _ChannelsStayError
        if layer is not None and layer.groups == 1:
            self._pass_layer(layer, name)
            return
        if (
            name in node.output and name in self._passed
        ):  # seen from the input, with all that follows for the output
            return
        self._passed.update(node.output)
        if layer is not None and layer.shape[1] == 1:
            self._pass_depthwise(layer, name)
        elif layer is None and node.domain in DEFAULT_DOMAINS and node.op_type in _RULES:
            _RULES[node.op_type](self, node, name)
        else:
            raise _ChannelsStayError

    def _pass_depthwise(self, layer: Layer, name: str) -> None:
        where, multiplier = self.where(name), layer.channels // layer.groups
        if where.axis != 1 or (name == layer.name and multiplier > 1):
            raise _ChannelsStayError
        _add(self._group.depthwise, layer)
        self.reach(layer.input, where)
        where = ChannelAxis(1, np.repeat(where.channels, multiplier))
        self.reach(layer.name, where)
        self._cut_outputs(layer, where)

    def _pass_layer(self, layer: Layer, name: str) -> None:
        node, where = layer.node, self.where(name)
        if attribute(node, "transA", 0):
            raise _ChannelsStayError
        if name == layer.name:
            if not where.equals(ChannelAxis(self._output_axis(layer), np.arange(self._group.size))):
                raise _ChannelsStayError
            _add(self._group.producers, layer)
            self._cut_outputs(layer, where)
        else:
            is_last = node.op_type == "Conv" or where.axis == len(self.shape(name)) - 1
            if (node.op_type == "Conv" and where.axis != 1) or not is_last:
                raise _ChannelsStayError
            _add(self._group.consumers, layer)
            self.cut(node, 1, ChannelAxis(1 - layer.channel_axis, where.channels))

    def _cut_outputs(self, layer: Layer, where: ChannelAxis) -> None:
        self.cut(layer.node, 1, ChannelAxis(layer.channel_axis, where.channels))
        if layer.bias:
            self.cut(layer.node, 2, ChannelAxis(0, where.channels))

    def _output_axis(self, layer: Layer) -> int:
        return 1 if layer.node.op_type != "MatMul" else len(self.shape(layer.name)) - 1


def _add(layers: list[Layer], layer: Layer) -> None:
    if layer not in layers:
        layers.append(layer)


def _elementwise(search: _ChannelSearch, node: onnx.NodeProto, name: str) -> None:
    """Operands are aligned at their last axes; those of size 1 hold for all channels."""
    where = search.where(name)
    behind = len(search.shape(name)) - where.axis
    for operand, other in enumerate(node.input):
        shape = search.shape(other) if other else ()
        if len(shape) < behind or shape[-behind] == 1:
            continue
        at = ChannelAxis(len(shape) - behind, where.channels)
        if search.index.constant(other) is not None:
            search.cut(node, operand, at)
        elif shape[-behind] == len(where.channels):
            search.reach(other, at)
        else:
            raise _ChannelsStayError
    search.reach(node.output[0], ChannelAxis(len(search.shape(node.output[0])) - behind, where.channels))


def _normalise(search: _ChannelSearch, node: onnx.NodeProto, name: str) -> None:
    """All operands but the first are constants with a value for each channel."""
    where = search.where(name)
    if where.axis != 1 or len([output for output in node.output if output]) > 1:
        raise _ChannelsStayError
    for operand in range(1, len(node.input)):
        search.cut(node, operand, ChannelAxis(0, where.channels))
    search.reach(node.input[0], where)
    search.reach(node.output[0], where)


def _concat(search: _ChannelSearch, node: onnx.NodeProto, name: str) -> None:
    where = search.where(name)
    axis = attribute(node, "axis") % len(search.shape(name))
    if axis != where.axis:
        for other in (*node.input, node.output[0]):
            search.reach(other, where)
        return
    if name == node.output[0]:
        raise _ChannelsStayError
    parts = []
    for other in node.input:
        size = search.shape(other)[axis]
        if size is None:
            raise _ChannelsStayError
        parts.append(where.channels if other == name else np.full(size, FOREIGN))
    search.reach(node.output[0], ChannelAxis(axis, np.concatenate(parts)))


def _reshape(search: _ChannelSearch, node: onnx.NodeProto, name: str) -> None:
    """Axes behind the channels may become part of their axis: each channel then has several places."""
    where = search.where(name)
    before, after = search.shape(node.input[0]), search.shape(node.output[0])
    behind = before[where.axis :]
    is_stated = node.op_type == "Flatten" or search.index.constant(node.input[1]) is not None
    if name != node.input[0] or not is_stated or None in behind:
        raise _ChannelsStayError
    total = np.prod([size or 0 for size in behind])
    tails = [axis for axis in range(len(after)) if np.prod([size or 0 for size in after[axis:]]) == total]
    if not tails:
        raise _ChannelsStayError
    axis = tails[-1]
    tail, repeats = after[axis + 1 :], (after[axis] or 0) // len(where.channels)
    if (
        repeats < 1
        or behind[len(behind) - len(tail) :] != tail
        or repeats * len(where.channels) != after[axis]
    ):
        raise _ChannelsStayError
    if node.op_type == "Reshape":
        search.through_reshape(node, axis)
    search.reach(node.output[0], ChannelAxis(axis, np.repeat(where.channels, repeats)))


def _move(moved: Callable[[GraphIndex, onnx.NodeProto, int], Sequence[int | None]]) -> "_Rule":
    """Return the rule of an operator that moves axes; `moved` has the new place of each, or None."""

    def rule(search: _ChannelSearch, node: onnx.NodeProto, name: str) -> None:
        where = search.where(name)
        source, result = node.input[0], node.output[0]
        axes = moved(search.index, node, len(search.shape(source)))
        if name == source:
            axis = axes[where.axis]
            if axis is None:
                raise _ChannelsStayError
            search.reach(result, ChannelAxis(axis, where.channels))
        elif name == result and where.axis in axes:
            search.reach(source, ChannelAxis(axes.index(where.axis), where.channels))
        else:
            raise _ChannelsStayError

    return rule


def _pooled(_index: GraphIndex, node: onnx.NodeProto, rank: int) -> list[int | None]:
    """Batch and channels stay; a second output would hold indices into the whole tensor."""
    return [0, 1] + [None] * (rank - 2) if len(node.output) == 1 else [None] * rank


def _transposed(_index: GraphIndex, node: onnx.NodeProto, rank: int) -> list[int | None]:
    order = list(attribute(node, "perm", range(rank)[::-1]))
    return [order.index(axis) for axis in range(rank)]


def _reduced(index: GraphIndex, node: onnx.NodeProto, rank: int) -> list[int | None]:
    gone = _axes(index, node, rank)
    if attribute(node, "keepdims", 1):
        return [None if axis in gone else axis for axis in range(rank)]
    return _without(gone, rank)


def _squeezed(index: GraphIndex, node: onnx.NodeProto, rank: int) -> list[int | None]:
    return _without(_axes(index, node, rank), rank)


def _unsqueezed(index: GraphIndex, node: onnx.NodeProto, rank: int) -> list[int | None]:
    total = rank + len(_axes(index, node, 0))
    added = _axes(index, node, total)
    return [axis for axis in range(total) if axis not in added]


def _padded(index: GraphIndex, node: onnx.NodeProto, rank: int) -> list[int | None]:
    pads = index.constant(node.input[1]) if len(node.input) > 1 else None
    has_axes = len(node.input) > 3 and node.input[3]
    if pads is None or pads.size != 2 * rank or has_axes:
        return [None] * rank
    return [None if pads[axis] or pads[axis + rank] else axis for axis in range(rank)]


def _resized(index: GraphIndex, node: onnx.NodeProto, rank: int) -> list[int | None]:
    scales = index.constant(node.input[2]) if len(node.input) == 3 else None
    if scales is None or scales.size != rank or attribute(node, "axes"):
        return [None] * rank
    return [axis if scales[axis] == 1 else None for axis in range(rank)]


def _without(gone: Iterable[int], rank: int) -> list[int | None]:
    remaining = [axis for axis in range(rank) if axis not in set(gone)]
    return [remaining.index(axis) if axis in remaining else None for axis in range(rank)]


def _axes(index: GraphIndex, node: onnx.NodeProto, rank: int) -> list[int]:
    """Return the axes that a node states as an attribute or a constant, or all of them."""
    axes = attribute(node, "axes")
    if axes is None and len(node.input) > 1:
        axes = index.constant(node.input[1])
        if axes is None:
            raise _ChannelsStayError
    if axes is None or not len(axes):
        return list(range(rank))
    return [int(axis) % rank if rank else int(axis) for axis in axes]


_Rule = Callable[[_ChannelSearch, onnx.NodeProto, str], None]
_ELEMENTWISE: Final = (
    "Add",
    "Clip",
    "Div",
    "Elu",
    "Erf",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "Max",
    "Min",
    "Mul",
    "PRelu",
    "Pow",
    "Relu",
    "Selu",
    "Sigmoid",
    "Softplus",
    "Sub",
    "Sum",
    "Tanh",
)
_POOLS: Final = ["AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"]
_REDUCTIONS: Final = ["ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"]
_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_POOLS, _move(_pooled)),
    **dict.fromkeys(_REDUCTIONS, _move(_reduced)),
    "BatchNormalization": _normalise,
    "Concat": _concat,
    "Flatten": _reshape,
    "InstanceNormalization": _normalise,
    "Pad": _move(_padded),
    "Reshape": _reshape,
    "Resize": _move(_resized),
    "Squeeze": _move(_squeezed),
    "Transpose": _move(_transposed),
    "Unsqueeze": _move(_unsqueezed),
}
