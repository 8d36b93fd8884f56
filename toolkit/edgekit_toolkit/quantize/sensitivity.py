"""Measures how sensitive layers are to quantization, and derives mixed-precision forms.

The noise of a block is measured with only this block quantized, because such noises are nearly additive. The
opposite measurement, with all blocks but one quantized, shows little if many blocks cause the same loss.
Blocks are moved to float one after the other. After each step the noise of the whole model is measured again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.row_sets import align_rows, row_axes
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute
from edgekit_toolkit.openings.model_opening import check_opening
from edgekit_toolkit.quantize.forms import FLOAT16_WEIGHTS, INT8_WEIGHTS, Form
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.precise import UNLIKE, Block
from edgekit_toolkit.quantize.search_work import SearchWork
from edgekit_toolkit.samples.generated import Feeds

Parts = NDArray[np.int64]

# No decision depends on smaller probabilities.
_LEAST_PROBABILITY = 1e-6


def softmax_axes(model: onnx.ModelProto) -> list[int | None]:
    """Return the axis of the softmax that computes each output, or None for an output without softmax."""
    index = GraphIndex(model.graph)
    producers = [index.producers.get(value.name) for value in model.graph.output]
    return [
        attribute(node, "axis", -1) if node is not None and node.op_type == "Softmax" else None
        for node in producers
    ]


class Fidelity:
    """Measures the output noise of variants of a model on a few samples.

    The noise is the power of the error divided by the power of the output. If an output joins tensors of
    different power, such as boxes and scores, each tensor is treated as an output, so that large values do
    not hide errors in small ones.

    Args:
        model: The float model.
        samples: The inputs. Inputs and outputs are kept in memory.
        threads: The number of threads of one inference.
        softmax_axes: The axis of the softmax that computes each output, or None.
        parts: The result of `Quantizer.output_parts`, or None if no output has parts.
        work: Counts inferences and opened models, or None.
    """

    def __init__(
        self,
        model: Model,
        samples: Sequence[Feeds],
        *,
        threads: int,
        softmax_axes: Sequence[int | None],
        parts: Sequence[Parts | None] | None = None,
        work: SearchWork | None = None,
    ) -> None:
        self.work = work
        self.model = model
        self.samples = samples
        self._threads = threads
        self.softmax_axes = list(softmax_axes)
        run = model.open(threads=threads)
        self.reference = [run(feeds) for feeds in samples]
        self._axes = row_axes(samples, [_numbered(outputs) for outputs in self.reference])
        sizes = [[output.size for output in outputs] for outputs in self.reference]
        fewest = {int(np.argmin([size[int(name)] for size in sizes])) for name in self._axes}
        self._fewest_rows = [samples[index] for index in sorted(fewest)]
        self.float_outputs = [
            position
            for position, output in enumerate(self.reference[0])
            if np.issubdtype(output.dtype, np.floating)
        ]
        self._groups = {
            index: _group(parts[index] if parts is not None else None, self._wanted(index))
            for index in self.float_outputs
        }
        self._power = {
            index: np.sum([self._sums(index, value**2) for value in self._wanted(index)], axis=0)
            for index in self.float_outputs
        }

    def _wanted(self, index: int) -> list[NDArray[np.float64]]:
        axis = self.softmax_axes[index]
        return [_comparable(outputs[index], axis) for outputs in self.reference]

    def _sums(self, index: int, squares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each group of an output's values the sum of a sample's squares."""
        groups = self._groups[index]
        if groups is None or groups.shape != squares.shape:
            return np.atleast_1d(squares.sum())
        counts = np.bincount(groups.reshape(-1), squares.reshape(-1), minlength=int(groups.max()) + 1)
        return counts.astype(np.float64)

    def noise(self, variant: Model) -> float:
        """Run a variant on all samples and return its noise, or infinity if an output is not finite.

        The noise is the mean over all float outputs. Outputs whose number of rows depends on the data are
        compared as sets. A missing row or an output with a different shape has an error of 100 %.

        Raises:
            BackendError: The variant does not run.
        """
        self.count(inferences=len(self.samples), models=1)
        if self._fewest_rows:  # engines have ended the process over tensors without elements
            check_opening(variant.engine, variant.content, variant.options, self._fewest_rows)
        run = variant.open(threads=self._threads)
        error = {index: np.zeros_like(power) for index, power in self._power.items()}
        for feeds, expected in zip(self.samples, self.reference, strict=True):
            results = _numbered(run(feeds))
            rows = align_rows(results, _numbered(expected), self._axes).outputs
            for index in self.float_outputs:
                axis, name = self.softmax_axes[index], str(index)
                want, output = (
                    _comparable(expected[index], axis),
                    _comparable(rows.get(name, results[name]), axis),
                )
                with np.errstate(invalid="ignore"):  # infinity minus infinity
                    squares = (output - want) ** 2 if output.shape == want.shape else want**2
                if name in rows:
                    squares = np.where(np.isnan(squares), want**2, squares)
                error[index] += self._sums(index, squares)
        ratios = [(error[index] / np.maximum(power, 1e-30)).mean() for index, power in self._power.items()]
        noise = float(np.mean(ratios)) if ratios else 0.0
        return noise if np.isfinite(noise) else np.inf

    def count(self, *, inferences: float, models: float) -> None:
        if self.work is not None:
            self.work.count(inferences=inferences, models=models)

    def probes(self, sample: int, number: int) -> list[NDArray[np.float32]]:
        """Return random float32 weights for the errors of each float output on a sample.

        If the errors are multiplied by these weights and added up, the expected square of the sum is the
        contribution of the errors to `noise`. The weights of a softmax output are for the errors of its
        logits.

        `sample` is the index of the sample. `number` is the seed.
        """
        signs = np.random.default_rng([sample, number])
        errors = []
        for index in self.float_outputs:
            value, groups, power = self.reference[sample][index], self._groups[index], self._power[index]
            weights = 1 / (np.maximum(power, 1e-30) * len(power) * len(self.float_outputs))
            weight = weights[groups] if groups is not None and groups.shape == value.shape else weights[0]
            probe = signs.choice([-1.0, 1.0], value.shape) * np.sqrt(weight)
            axis = self.softmax_axes[index]
            errors.append(np.asarray(probe if axis is None else _to_logits(probe, value, axis), np.float32))
        return errors


def _numbered(outputs: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {str(position): value for position, value in enumerate(outputs)}


def _to_logits(probe: NDArray[Any], softmax: NDArray[Any], axis: int) -> NDArray[Any]:
    """Return weights of the logits that change as `_comparable` weighted by `probe` does."""
    centred = probe - probe.mean(axis=axis, keepdims=True)
    visible = centred * (softmax > _LEAST_PROBABILITY)
    return np.asarray(visible - softmax * visible.sum(axis=axis, keepdims=True))


def _group(parts: Parts | None, values: Sequence[NDArray[np.float64]]) -> Parts | None:
    """Return the group number of each value: parts with similar mean power form a group."""
    if parts is None or any(value.shape != parts.shape for value in values):
        return None
    count = np.maximum(np.bincount(parts.reshape(-1)), 1)  # a part may be empty
    power = sum(np.bincount(parts.reshape(-1), (value**2).reshape(-1)) for value in values) / count
    group, first = np.zeros(len(count), np.int64), np.inf
    number = -1
    for part in np.argsort(-power, kind="stable"):
        if power[part] * UNLIKE**2 < first:
            number, first = number + 1, power[part]
        group[part] = number
    return group[parts] if number else None


def _comparable(value: NDArray[Any], softmax_axis: int | None) -> NDArray[np.float64]:
    """Return values whose squared error is comparable; for a softmax its logits, up to a constant.

    Probabilities near 0 and 1 hide errors that decide between classes, and hide all of them once the class
    flips.
    """
    values = value.astype(np.float64)
    if softmax_axis is None:
        return values
    logits = np.log(np.maximum(values, _LEAST_PROBABILITY))
    result: NDArray[np.float64] = logits - logits.mean(axis=softmax_axis, keepdims=True)
    return result


def decibel(noise: float) -> float:
    """Return the signal-to-noise ratio in dB, at most 200, or -200 if `noise` is not finite."""
    return min(200.0, -10 * float(np.log10(max(noise, 1e-20)))) if np.isfinite(noise) else -200.0


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """The output noise if only one block is quantized, or infinity if that model fails."""

    block: Block
    noise: float


def measure_blocks(
    write: Callable[[Plan], Model],
    plan: Plan,
    parts: Sequence[Block],
    fidelity: Fidelity,
    expired: Callable[[], bool],
) -> Iterator[BlockNoise]:
    """Measure and yield the noise of each block alone, until `expired` returns True."""
    for block in parts:
        if expired():
            return
        yield BlockNoise(block, _noise(write, replace(plan, kernels=frozenset(block)), fidelity))


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The effects of int8 weights in one layer, if all other layers have float16 weights.

    Attributes:
        layer: The first output of the layer.
        noise: The output noise of the model, as a ratio of powers.
        saved_bytes: The difference between the sizes of the float16 and int8 weights of the layer.
    """

    layer: str
    noise: float
    saved_bytes: int


def measure_weights(
    build: Callable[[Form], Model | None],
    layers: Sequence[str],
    fidelity: Fidelity,
    expired: Callable[[], bool],
) -> Iterator[LayerCost]:
    """Measure and yield the cost of int8 weights in each layer alone, until `expired` returns True.

    Raises:
        ValueError: A layer cannot have int8 weights.
        BackendError: A model does not run.
    """
    half = build(Form(FLOAT16_WEIGHTS)) or fidelity.model
    for layer in layers:
        if expired():
            return
        built = build(Form(INT8_WEIGHTS, layers=frozenset({layer})))
        if built is None:
            raise ValueError(f"layer {layer!r} has no int8 weights")
        yield LayerCost(layer, fidelity.noise(built), half.size_bytes - built.size_bytes)


def _noise(write: Callable[[Plan], Model], plan: Plan, fidelity: Fidelity) -> float:
    """Return the noise of a plan; infinite if it cannot be made or run."""
    try:
        return fidelity.noise(write(plan))
    except BackendError:
        return np.inf


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A plan with `blocks` in float, and the noise of the model with this plan."""

    plan: Plan
    blocks: tuple[Block, ...]
    noise: float


# The blocks with the largest noise that each greedy step measures again.
_RECHECKED = 3
# A step that removes a smaller share of the noise is not worth a kernel in float.
_MIN_GAIN = 0.01


def mixed_plans(
    write: Callable[[Plan], Model],
    plan: Plan,
    noises: Sequence[BlockNoise],
    fidelity: Fidelity,
    *,
    max_blocks: int,
    expired: Callable[[], bool],
) -> Iterator[MixedPlan]:
    """Measure and yield plans, each with one more block in float than the plan before.

    Each step tries the three blocks with the most noise, and moves the best of them to float. The iteration
    ends after `max_blocks` steps, when a step reduces the noise of the model by less than 1 %, or when
    `expired` returns True.

    `noises` contains the noise of each block alone.
    """
    total = sum(item.noise for item in noises if np.isfinite(item.noise))
    remaining = sorted(
        (item for item in noises if item.noise > _MIN_GAIN * total), key=lambda item: -item.noise
    )
    gone: tuple[Block, ...] = ()
    current = _noise(write, plan, fidelity)
    while remaining and len(gone) < max_blocks and not expired():
        trials = []
        for item in remaining[:_RECHECKED]:
            trial = replace(plan, kernels=plan.kernels - set(item.block))
            trials.append((_noise(write, trial, fidelity), item, trial))
        noise, item, trial = min(trials, key=lambda trial: trial[0])
        if noise > current * (1 - _MIN_GAIN):
            return
        remaining.remove(item)
        gone, current, plan = (*gone, item.block), noise, trial
        yield MixedPlan(plan, gone, noise)


# Shares of the noise with all layers in int8 that the mixes leave: 3, 6, 12 and 20 dB less.
_LEFT_SHARES: Final = (0.5, 0.25, 0.06, 0.01)


def mixes(costs: Sequence[LayerCost]) -> list[frozenset[str]]:
    """Return up to 4 sets of layers with int8 weights. The set for the smallest model is first.

    The layers with the most noise per saved byte are not in the sets, and get float16 weights. The noise of
    the sets is at most 50 %, 25 %, 6 % and 1 % of the noise with int8 weights in all layers.
    """
    order = sorted(costs, key=lambda cost: (-cost.noise / max(cost.saved_bytes, 1), cost.layer))
    # Noise that is left after releasing the first 0, 1, ... layers.
    noises = np.array([cost.noise for cost in order])
    remaining = np.append(np.cumsum(noises[::-1])[::-1], 0.0)
    plans: list[frozenset[str]] = []
    for share in _LEFT_SHARES:
        released = int(np.argmax(remaining <= share * remaining[0])) if np.isfinite(remaining[0]) else 1
        quantized = frozenset(cost.layer for cost in order[released:])
        if released and quantized and quantized not in plans:
            plans.append(quantized)
    return plans
