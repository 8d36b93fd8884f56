"""Chooses the rounding steps of a model's weights, and computes the size of the codes.

One number, the strength, determines the steps of all layers. If the n weights of a layer are rounded with the
step d, they take about -n log2(d) bits and add the noise c d^2 to the output. With the best steps, c d^2 / n
is equal in all layers, so d = strength x sqrt(n / c). One more bit then reduces the noise equally in every
layer. The size is the entropy of the codes.

Source: T. Cover and J. Thomas, Elements of Information Theory, 2006, section 10.3.3 (reverse water-filling).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.compress.compression import entropy_bits
from edgekit_toolkit.onnx_graph.layers import Floats, Layer

MIN_STRENGTH: Final = 1e-4
MAX_STRENGTH: Final = 10.0
_HALVINGS: Final = 14
# Step at which the noise of a layer is measured, as a share of the root mean square of its weights.
_PROBE_STEP: Final = 0.25
# Used if a layer's noise was not measured, and to prevent steps that leave nothing of a layer.
_LEAST_NOISE: Final = 1e-10
_MAX_STEP: Final = 3.0
# The own steps of rows are quarters of a power of two: few values, which take few bits.
_STEPS_A_POWER: Final = 4


def probe_step(_layer: Layer, rows: Floats) -> Floats:
    """Return the step of each row for measuring the noise that the layer adds to the output.

    The steps have the shape [G, R, 1], with G groups and R rows in each group.
    """
    size = max(float(np.sqrt((rows**2).mean())), 1e-30)
    return np.full((*rows.shape[:2], 1), _PROBE_STEP * size)


class CodeSizes:
    """Chooses steps, and computes the size of weights that are rounded with them and entropy-coded.

    Args:
        weights: A dict from name to the weights of `layers`.
        noises: A dict from layer name to the noise of the output if only this layer is rounded, with the
            steps of `probe_step`.
        peak: The largest code.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        weights: Mapping[str, NDArray[Any]],
        noises: Mapping[str, float],
        *,
        peak: int,
    ) -> None:
        self._peak = peak
        by_weight = {layer.weight: layer for layer in layers}  # layers may share one
        self._rows = [(layer, layer.to_rows(weights[name])) for name, layer in by_weight.items()]
        sizes = {layer.name: layer.channels * layer.columns for layer in layers}
        mean = sum(sizes.values()) / max(len(sizes), 1)
        self._shares = {
            name: np.sqrt(size / mean / max(noises.get(name, 1.0), _LEAST_NOISE)) * _PROBE_STEP
            for name, size in sizes.items()
        }

    def choose_step(self, layer: Layer, rows: Floats, strength: float) -> Floats:
        """Return the step of each row, [G, R, 1].

        All rows get the same step, unless a row needs a larger one to keep its codes within the peak.

        Args:
            layer: The layer.
            rows: The weights of the layer, [G, R, K].
            strength: The number that determines all steps, see the module. A larger one gives larger steps.
        """
        share = min(strength * self._shares[layer.name], _MAX_STEP)
        whole = max(float(np.sqrt((rows**2).mean())), 1e-30)
        least = np.maximum(np.abs(rows).max(axis=2, keepdims=True), 1e-30) / self._peak
        least = 2 ** (np.ceil(_STEPS_A_POWER * np.log2(least)) / _STEPS_A_POWER)
        steps: Floats = np.maximum(least, whole * share)
        return steps

    def at(self, strength: float) -> float:
        """Return the size of all entropy-coded codes in bytes. A larger strength gives a smaller size."""
        return self._sum(lambda layer, rows: self.choose_step(layer, rows, strength))

    def of_peak(self, peak: int, fine_peak: int) -> float:
        """Return a lower bound of the size in bytes if the largest weight of each row has the code `peak`.

        The bound is the entropy of the nearest codes. The size in a package is larger, because it includes
        the scales, and because the coding of a package is not ideal.

        Args:
            peak: The largest code of layers without groups.
            fine_peak: The largest code of grouped layers.
        """

        def choose(layer: Layer, rows: Floats) -> Floats:
            largest: Floats = np.maximum(np.abs(rows).max(axis=2, keepdims=True), 1e-30)
            return largest / (fine_peak if layer.groups > 1 else peak)

        return self._sum(choose)

    def find_strength(self, max_bytes: float) -> float:
        """Return the smallest strength at which the codes take at most `max_bytes`, or `MAX_STRENGTH`."""
        low, high = MIN_STRENGTH, MAX_STRENGTH
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.at(middle) > max_bytes else (low, middle)
        return high

    def list_steps(self, strength: float) -> dict[str, NDArray[np.float32]]:
        """Return a dict from weight name to the step of each output channel, float32 [channels]."""
        return {
            layer.weight: self.choose_step(layer, rows, strength).astype(np.float32).reshape(-1)
            for layer, rows in self._rows
        }

    def _sum(self, choose: Callable[[Layer, Floats], Floats]) -> float:
        return sum(entropy_bits(np.rint(rows / choose(layer, rows))) for layer, rows in self._rows) / 8
