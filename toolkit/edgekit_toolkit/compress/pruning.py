"""Removes the channels with the least error for each saved multiply-add, and refits the next layers.

The channels of a group are removed in the order of the error that they cause in the layers that read them.
The rows of these layers adapt after each removal (block OBS): if H is the second moment of the patches,
removing the columns c of the rows W costs W_c (H^-1_cc)^-1 W_c^T. To compare groups, the noise of the model's
outputs is measured with several numbers of channels for each group. Finally, the layers are fitted one after
the other by least squares. Each layer gets its inputs from the pruned network, and its targets from the float
network.

A group is not pruned if it has few patches per column, such as after a global pooling, because its moments
are then unreliable.

Source: B. Hassibi and D. Stork, Second order derivatives for network pruning, 1992; E. Kurtic et al., ZipLM,
2023, section 3.2, for whole structures at once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_toolkit.compress.moments import Moments
from edgekit_toolkit.compress.twin_run import TwinRun
from edgekit_toolkit.costs.onnx_operators import node_costs
from edgekit_toolkit.onnx_graph.channels import (
    FOREIGN,
    ChannelGroup,
    Channels,
    find_groups,
    slice_channels,
)
from edgekit_toolkit.onnx_graph.index import copy_model
from edgekit_toolkit.onnx_graph.layers import Floats, Layer, LayerWeights, find_layers
from edgekit_toolkit.onnx_graph.specs import dimension, real_inputs
from edgekit_toolkit.passes.dead_channels import SlicedModel
from edgekit_toolkit.samples.generated import Feeds

PRUNED_SHARES: Final = (0.10, 0.25, 0.40)
"""The shares of the multiply-adds that the pruned candidates save."""
MAX_MULTIPLE: Final = 16
"""A group keeps a multiple of at most this number of channels. See `prune`."""
_MIN_CHANNELS: Final = 8
_MIN_SHARE: Final = 1 / 8  # share of a group's channels that stays
_MIN_PATCHES: Final = 2  # for each column
_STEPS: Final = 64  # steps to rank a group's channels. A large group ranks several per step
_POINTS: Final = 8  # numbers of channels at which the noise of a group is measured


def prune(
    model: onnx.ModelProto,
    samples: Sequence[Feeds],
    *,
    shares: Sequence[float],
    multiple: int,
    threads: int,
    measure_noise: Callable[[onnx.ModelProto], float],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[SlicedModel]:
    """Return models with fewer and fewer channels.

    For each share, the result contains the largest pruned model that saves at least this share. Several
    shares may have the same model. If a share cannot be saved, the result contains no model for it.

    Args:
        model: A float model without dead channels, see `remove_dead_channels`.
        samples: The inputs for measuring the moments.
        shares: The shares of the multiply-adds to save, in ascending order.
        multiple: The number of remaining channels of a group is a multiple of this number.
        threads: The number of threads of one inference.
        measure_noise: Returns the noise of the outputs of a model with other channels and weights.
        progress: Called with the number of the current layer and the number of layers.

    Raises:
        BackendError: onnxruntime cannot run a part of the model.
        ModelError: The multiply-adds of the model cannot be counted.
    """
    macs = count_macs(model, _dims(model, samples[0]))
    rankings = _rank(model, samples, threads=threads, measure_noise=measure_noise, progress=progress)
    results = []
    for channels in _choose(rankings, macs, shares, multiple):
        sliced = slice_channels(model, channels)
        repaired = _repair(model, sliced, channels, samples, threads=threads)
        results.append(SlicedModel(channels, repaired))
    return results


def count_macs(model: onnx.ModelProto, dims: Mapping[str, int]) -> dict[str, int]:
    """Return a dict from the first output of each layer to the number of its multiply-adds.

    `dims` is a dict from the name of a free dimension to its size.

    Raises:
        ModelError: The multiply-adds cannot be counted.
    """
    costs = {cost.name: cost.macs for cost in node_costs(model, dims)}
    return {layer.name: costs.get(layer.node.name or layer.name, 0) for layer in find_layers(model)}


def _dims(model: onnx.ModelProto, feeds: Feeds) -> dict[str, int]:
    return {
        name: feeds[value.name].shape[axis]
        for value in real_inputs(model.graph)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if isinstance(name := dimension(value.name, axis, dim), str)
    }


@dataclass(frozen=True, slots=True)
class _Ranking:
    """In which order the channels of a group go.

    Attributes:
        group: the group.
        order: channels, the first to go first.
        noise: noise of the outputs without the first n + 1 of them, estimated.
    """

    group: ChannelGroup
    order: NDArray[np.intp]
    noise: Floats

    def stays(self, removed: int) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.group.size)) - set(map(int, self.order[:removed]))))


def _rank(
    model: onnx.ModelProto,
    samples: Sequence[Feeds],
    *,
    threads: int,
    measure_noise: Callable[[onnx.ModelProto], float],
    progress: Callable[[int, int], None],
) -> list[_Ranking]:
    layers = find_layers(model)
    weights = LayerWeights(model)
    waiting = [
        group for group in find_groups(model) if group.consumers and group.size > find_least_channels(group)
    ]
    readers = {consumer.name for group in waiting for consumer in group.consumers}
    moments: dict[str, Moments] = {}
    rankings = []
    run = TwinRun(model, layers, samples, threads=threads, is_single=True)
    for number, (layer, inputs, _) in enumerate(run):
        progress(number + 1, len(layers))
        if layer.name in readers:
            patches = layer.gather(inputs)
            if len(patches) >= _MIN_PATCHES * layer.columns and np.isfinite(patches).all():
                moments[layer.name] = Moments.measure(patches, patches, centred=bool(layer.bias))
        ready = [group for group in waiting if group.consumers[-1].name == layer.name]
        for group in ready:
            waiting.remove(group)
            if all(consumer.name in moments for consumer in group.consumers):
                rows = {consumer.name: weights.rows(consumer) for consumer in group.consumers}
                if all(np.isfinite(row).all() for row in rows.values()):
                    rankings.append(_rank_group(model, group, rows, moments, measure_noise))
        still_read = {consumer.name for group in waiting for consumer in group.consumers}
        moments = {name: moment for name, moment in moments.items() if name in still_read}
    return rankings


def find_least_channels(group: ChannelGroup) -> int:
    return max(_MIN_CHANNELS, math.ceil(group.size * _MIN_SHARE))


def _rank_group(
    model: onnx.ModelProto,
    group: ChannelGroup,
    rows: Mapping[str, Floats],
    moments: Mapping[str, Moments],
    measure_noise: Callable[[onnx.ModelProto], float],
) -> _Ranking:
    readers = [
        _Reader(rows[layer.name][0], moments[layer.name].damped[0], group.columns(layer), group.size)
        for layer in group.consumers
    ]
    order, errors, total = [], [], 0.0
    alive = np.ones(group.size, bool)
    step = max(1, group.size // _STEPS)
    while alive.sum() > find_least_channels(group):
        costs = np.sum([reader.costs(alive) for reader in readers], axis=0)
        chosen = np.argsort(costs, kind="stable")[: min(step, int(alive.sum()) - find_least_channels(group))]
        for channel in chosen:
            total += costs[channel]
            order.append(channel)
            errors.append(total)
        for reader in readers:
            reader.remove(chosen)
        alive[chosen] = False
    ranking = _Ranking(group, np.array(order), np.array(errors))
    counts = sorted({math.ceil(len(order) * point / _POINTS) for point in range(1, _POINTS + 1)})
    scales = [
        measure_noise(_fit_consumers(model, group, ranking.stays(count), rows, moments))
        / max(errors[count - 1], 1e-30)
        for count in counts
    ]
    estimate = np.interp(np.arange(1, len(order) + 1), counts, scales) * ranking.noise
    return _Ranking(group, ranking.order, np.maximum.accumulate(estimate))


class _Reader:
    """The error of one layer, as a share of its output's power, while its input channels are removed."""

    def __init__(self, rows: Floats, moment: Floats, columns: NDArray[np.int64], size: int) -> None:
        self._rows = rows.copy()
        self._inverse = np.linalg.inv(moment)
        self._power = max(float(((rows @ moment) * rows).sum()), 1e-30)
        by_channel = np.argsort(columns, kind="stable")[np.count_nonzero(columns == FOREIGN) :]
        self._columns = by_channel.reshape(size, -1)

    def costs(self, alive: NDArray[np.bool_]) -> Floats:
        """Return the error that each channel's removal adds; infinite for those that are gone."""
        costs = np.full(len(alive), np.inf)
        columns = self._columns[alive]
        blocks = self._inverse[columns[:, :, None], columns[:, None]]
        rows = self._rows[:, columns].transpose(1, 2, 0)  # [channels, places, rows]
        costs[alive] = (rows * np.linalg.solve(blocks, rows)).sum(axis=(1, 2)) / self._power
        return costs

    def remove(self, channels: NDArray[np.intp]) -> None:
        """Set the columns of channels to 0; the other columns compensate as far as they can."""
        own = self._columns[channels].reshape(-1)
        spread = np.linalg.solve(self._inverse[own[:, None], own], self._inverse[own])
        self._rows -= self._rows[:, own] @ spread
        self._inverse -= self._inverse[:, own] @ spread


def _fit_consumers(
    model: onnx.ModelProto,
    group: ChannelGroup,
    stays: tuple[int, ...],
    rows: Mapping[str, Floats],
    moments: Mapping[str, Moments],
) -> onnx.ModelProto:
    """Return the model without some channels of one group, whose readers are fitted."""
    result = slice_channels(model, {group.name: stays})
    layers = {layer.name: layer for layer in find_layers(result)}
    weights = LayerWeights(result)
    for consumer in group.consumers:
        columns = np.flatnonzero(np.isin(group.columns(consumer), [*stays, FOREIGN]))
        restricted = moments[consumer.name].restrict(columns)
        _fit(weights, layers[consumer.name], rows[consumer.name], restricted)
    return result


def _fit(weights: LayerWeights, layer: Layer, rows: Floats, moments: Moments) -> None:
    """Fit a layer whose float network has some rows, and keep the means of its outputs."""
    fitted = moments.fit(rows)
    weights.set(layer.weight, layer.from_rows(fitted))
    if weights.is_own(layer.bias):
        weights.set(layer.bias, weights.value(layer.bias) + moments.bias_change(rows, fitted))


def _choose(
    rankings: Sequence[_Ranking],
    macs: Mapping[str, int],
    shares: Sequence[float],
    multiple: int,
) -> list[dict[str, tuple[int, ...]]]:
    """Return the channels that stay for each share that can be saved.

    Step by step, the group loses channels whose noise is least for each multiply-add saved.

    Args:
        rankings: groups that may lose channels.
        macs: of each layer.
        shares: in ascending order.
        multiple: of how many channels a group keeps a multiple.
    """
    removed, total = dict.fromkeys(range(len(rankings)), 0), sum(macs.values())

    def remaining(counts: Mapping[int, int]) -> float:
        layer_macs = {name: float(count) for name, count in macs.items()}
        for number, ranking in enumerate(rankings):
            share, tensors = counts[number] / ranking.group.size, ranking.group.tensors
            for layer in ranking.group.producers:
                layer_macs[layer.name] *= 1 - share
            for layer in (*ranking.group.depthwise, *ranking.group.consumers):
                layer_macs[layer.name] *= 1 - share * float((tensors[layer.input].channels != FOREIGN).mean())
        return sum(layer_macs.values())

    choices = []
    now = remaining(removed)
    targets = list(shares)
    while targets:
        best = (math.inf, -1, 0, now)
        for number, ranking in enumerate(rankings):
            size = ranking.group.size - removed[number]
            count = removed[number] + (size % multiple or multiple)
            if count > len(ranking.order):
                continue
            after = remaining({**removed, number: count})
            before = ranking.noise[removed[number] - 1] if removed[number] else 0.0
            cost = (ranking.noise[count - 1] - before) / max(now - after, 1e-9)
            best = min(best, (cost, number, count, after))
        if best[1] < 0:
            break
        _, number, removed[number], now = best
        if now <= (1 - targets[0]) * total:
            targets = [share for share in targets if now > (1 - share) * total]
            choices.append({rankings[i].group.name: rankings[i].stays(n) for i, n in removed.items() if n})
    return choices


def _repair(
    model: onnx.ModelProto,
    pruned: onnx.ModelProto,
    channels: Channels,
    samples: Sequence[Feeds],
    *,
    threads: int,
) -> onnx.ModelProto:
    """Return the pruned model, with layers fitted to the outputs of the layers of `model`."""
    result = copy_model(pruned)
    weights, source = LayerWeights(result), LayerWeights(model)
    layers = find_layers(model)
    parts = _remaining_parts(model, channels)
    run = TwinRun(model, layers, samples, threads=threads, compressed=pruned)
    for (layer, float_inputs, inputs), new_layer in zip(run, find_layers(result), strict=True):
        rows_stay, columns = parts[layer.name]
        rows = source.rows(layer)
        patches, float_patches = (
            new_layer.gather(inputs, layer.max_patches),
            layer.gather(float_inputs),
        )
        if not len(patches) or np.array_equal(patches, float_patches) or not weights.is_own(new_layer.weight):
            continue
        if layer.groups == 1:
            rows = rows[:, rows_stay]
        elif layer.groups != new_layer.groups:
            groups = rows_stay[:: rows.shape[1]] // rows.shape[1]
            rows, float_patches = rows[groups], float_patches[:, groups]
        if not np.isfinite(rows).all():
            continue
        moments = Moments.measure(
            patches, float_patches, centred=weights.is_own(new_layer.bias), columns=columns
        )
        _fit(weights, new_layer, rows, moments)
        for name in filter(None, (new_layer.weight, new_layer.bias)):
            run.weights[name] = weights.value(name)
    return result


def _remaining_parts(
    model: onnx.ModelProto, channels: Channels
) -> dict[str, tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Return the rows (over all groups of a layer) and the columns of each layer that stay."""
    layers = find_layers(model)
    rows = {layer.name: np.ones(layer.channels, bool) for layer in layers}
    columns = {layer.name: np.ones(layer.columns, bool) for layer in layers}
    for group in find_groups(model):
        if group.name in channels:
            stays = np.isin(range(group.size), channels[group.name])
            for layer in (*group.producers, *group.depthwise):
                rows[layer.name] &= group.tensors[layer.name].mask(stays)
            for layer in group.consumers:
                own = group.columns(layer)
                columns[layer.name] &= (own == FOREIGN) | stays[own]
    return {name: (np.flatnonzero(rows[name]), np.flatnonzero(columns[name])) for name in rows}
