"""Steps of a model's weights for a size in transport: one number sets the steps of all layers.

With rounding steps d of n weights, a layer takes about -n log2(d) bits and adds c d^2 to the output's noise.
For all layers together this is least where c d^2 / n is equal everywhere: d = strength x sqrt(n / c).

Source: T. Cover and J. Thomas, Elements of Information Theory, 2006, section 10.3.3 (reverse water-filling).
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from edgekit_toolkit.onnx_graph.layers import Floats, Layer

# Step at which the noise of a layer is measured, as a share of the root mean square of its weights.
_PROBE_STEP: Final = 0.25
# Where a layer's noise was not seen, and against steps that leave nothing of a layer.
_LEAST_NOISE: Final = 1e-10
_MAX_STEP: Final = 3.0
# The own steps of rows are quarters of a power of two: few values, which take few bits.
_STEPS_A_POWER: Final = 4


def probe_step(_layer: Layer, rows: Floats) -> Floats:
    """Return the step of each row, [G, R, 1], for measuring how much noise the layer adds to the output."""
    size = max(float(np.sqrt((rows**2).mean())), 1e-30)
    return np.full((*rows.shape[:2], 1), _PROBE_STEP * size)


class EqualSlopeSteps:
    """Chooses steps with which one more bit would lower the output's noise equally in every layer.

    Args:
        noises: name of a layer -> noise of the output if only this layer is rounded, with the steps of
            `probe_step`.
        peak: largest code.
    """

    def __init__(self, layers: Sequence[Layer], noises: Mapping[str, float], *, peak: int) -> None:
        self._peak = peak
        sizes = {layer.name: layer.channels * layer.columns for layer in layers}
        mean = sum(sizes.values()) / max(len(sizes), 1)
        self._shares = {
            name: np.sqrt(size / mean / max(noises.get(name, 1.0), _LEAST_NOISE)) * _PROBE_STEP
            for name, size in sizes.items()
        }

    def choose(self, layer: Layer, rows: Floats, strength: float) -> Floats:
        """Return the step of each row, [G, R, 1].

        All rows get the same step, unless a row needs a longer one to keep its codes within `peak`.

        `rows`: its weights, [G, R, K]. `strength`: square root of the noise, in the unit of `noises`, that a
        layer of mean size may add.
        """
        share = min(strength * self._shares[layer.name], _MAX_STEP)
        whole = max(float(np.sqrt((rows**2).mean())), 1e-30)
        least = np.maximum(np.abs(rows).max(axis=2, keepdims=True), 1e-30) / self._peak
        least = 2 ** (np.ceil(_STEPS_A_POWER * np.log2(least)) / _STEPS_A_POWER)
        steps: Floats = np.maximum(least, whole * share)
        return steps
