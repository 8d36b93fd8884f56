"""Measures the sensitivity of layers to quantization, and derives mixed-precision forms.

The noise of one block is measured with only that block quantized: such noises nearly add up, while leaving
one block out of a quantized model shows little of a loss that many blocks share. Blocks are released to float
greedily, and every step is measured again on the whole model, because the noises add up only nearly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute
from edgekit_toolkit.quantize.plan import COMPUTE, Plan
from edgekit_toolkit.samples.generated import Feeds

Block = tuple[str, ...]

# No decision depends on smaller probabilities.
_LEAST_PROBABILITY = 1e-6


def softmax_axes(model: onnx.ModelProto) -> list[int | None]:
    """Return for each output the axis of the softmax that makes it, or None."""
    index = GraphIndex(model.graph)
    producers = [index.producers.get(value.name) for value in model.graph.output]
    return [
        attribute(node, "axis", -1) if node is not None and node.op_type == "Softmax" else None
        for node in producers
    ]


class Fidelity:
    """Output noise of variants of a model against the model itself, on a few samples.

    Args:
        model: float model.
        samples: inputs; they and the outputs are held in memory.
        threads: threads of one inference.
        softmax_axes: for each output the axis of the softmax that makes it, or None.
    """

    def __init__(
        self,
        model: Model,
        samples: Sequence[Feeds],
        *,
        threads: int,
        softmax_axes: Sequence[int | None],
    ) -> None:
        self.samples = samples
        self._threads = threads
        self._softmax_axes = list(softmax_axes)
        run = model.open(threads=threads)
        self.reference = [run(feeds) for feeds in samples]

    def noise(self, variant: Model) -> float:
        """Return the power of the output error over the power of the output, over all samples; else inf.

        It is the mean over the float outputs. An output with another shape than the reference's, such as a
        list of detections, counts as all error.
        """
        run = variant.open(threads=self._threads)
        error, power = np.zeros(len(self._softmax_axes)), np.zeros(len(self._softmax_axes))
        is_float = [np.issubdtype(output.dtype, np.floating) for output in self.reference[0]]
        for feeds, expected in zip(self.samples, self.reference, strict=True):
            results = run(feeds)
            for place in np.flatnonzero(is_float):
                axis = self._softmax_axes[place]
                want = _comparable(expected[place], axis)
                got = _comparable(results[place], axis)
                power[place] += (want**2).sum()
                with np.errstate(invalid="ignore"):  # infinity minus infinity
                    error[place] += ((got - want) ** 2 if got.shape == want.shape else want**2).sum()
        ratios = (error / np.maximum(power, 1e-30))[is_float]
        noise = float(ratios.mean()) if ratios.size else 0.0
        return noise if np.isfinite(noise) else np.inf


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
    """Return the signal-to-noise ratio in dB of a noise ratio; 200 at most."""
    return min(200.0, -10 * float(np.log10(max(noise, 1e-20)))) if np.isfinite(noise) else -200.0


def blocks(model: onnx.ModelProto, kernels: Sequence[str]) -> list[Block]:
    """Group kernels: a matrix product with the element-wise kernels that follow it in graph order."""
    index = GraphIndex(model.graph)
    found: list[list[str]] = []
    for name in kernels:
        if not found or index.producers[name].op_type in COMPUTE:
            found.append([])
        found[-1].append(name)
    return [tuple(block) for block in found]


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """Noise that one block adds if only this block is quantized."""

    block: Block
    noise: float


def measure_blocks(
    write: Callable[[Plan], Model],
    plan: Plan,
    parts: Sequence[Block],
    fidelity: Fidelity,
    expired: Callable[[], bool],
) -> Iterator[BlockNoise]:
    """Yield the noise of each block until the time is over; blocks that were not reached are left out."""
    for block in parts:
        if expired():
            return
        yield BlockNoise(block, _noise(write, replace(plan, kernels=frozenset(block)), fidelity))


def _noise(write: Callable[[Plan], Model], plan: Plan, fidelity: Fidelity) -> float:
    """Return the noise of a plan; infinite if it cannot be made or run."""
    try:
        return fidelity.noise(write(plan))
    except BackendError:
        return np.inf


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A plan in which some blocks run in float, and its noise."""

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
    """Yield plans with one more block in float each, the best next block first.

    Args:
        write: writes the model with a plan.
        plan: all kernels quantized.
        noises: measured blocks.
        fidelity: measures the whole model.
        max_blocks: most blocks to release.
        expired: returns whether the time is over.
    """
    total = sum(item.noise for item in noises if np.isfinite(item.noise))
    left = sorted((item for item in noises if item.noise > _MIN_GAIN * total), key=lambda item: -item.noise)
    gone: tuple[Block, ...] = ()
    current = _noise(write, plan, fidelity)
    while left and len(gone) < max_blocks and not expired():
        trials = []
        for item in left[:_RECHECKED]:
            trial = replace(plan, kernels=plan.kernels - set(item.block))
            trials.append((_noise(write, trial, fidelity), item, trial))
        noise, item, trial = min(trials, key=lambda found: found[0])
        if noise > current * (1 - _MIN_GAIN):
            return
        left.remove(item)
        gone, current, plan = (*gone, item.block), noise, trial
        yield MixedPlan(plan, gone, noise)
