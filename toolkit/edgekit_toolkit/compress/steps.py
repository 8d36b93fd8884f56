"""Steps of a model's weights for a size in transport: one number chooses those of all layers.

With rounding steps d of n weights, a layer takes about -n log2(d) bits and adds c d^2 to the output's noise.
For all layers together this is least where c d^2 / n is equal everywhere: d = strength x sqrt(n / c).

Source: T. Cover and J. Thomas, Elements of Information Theory, 2006, section 10.3.3 (reverse water-filling).
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from edgekit_toolkit.onnx_graph.layers import Floats, Layer

PROBE_STEP: Final = 0.25
"""Step at which the noise of a layer is measured, as a share of the root mean square of its weights."""
# Where a layer's noise was not seen, and against steps that leave nothing of a layer.
_LEAST_NOISE: Final = 1e-10
_MAX_STEP: Final = 3.0
# Steps of rows follow their size half way, in quarters of a power of two: few values, which take few bits.
# With the scale of its bias, a channel's own step takes about a byte.
_ROW_POWER: Final = 0.5
_ROW_LEAST: Final = 0.02
_MOST_FOR_SCALES: Final = 0.03


class EqualSlopeSteps:
    """Steps of equal slope.

    Args:
        layers: layers of the model.
        noises: noise of the output if a layer alone has steps of `PROBE_STEP`, by the name of the layer.
        peak: largest code.
        limit_bytes: limit on all bytes that travel: a small one leaves no bytes for steps of single rows.
    """

    def __init__(
        self, layers: Sequence[Layer], noises: Mapping[str, float], *, peak: int, limit_bytes: float
    ) -> None:
        self._peak = peak
        channels = sum(layer.channels for layer in layers)
        self._row_power = _ROW_POWER if channels <= _MOST_FOR_SCALES * limit_bytes else 0.0
        sizes = {layer.name: layer.channels * layer.columns for layer in layers}
        mean = sum(sizes.values()) / max(len(sizes), 1)
        self._shares = {
            name: np.sqrt(size / mean / max(noises.get(name, 1.0), _LEAST_NOISE)) * PROBE_STEP
            for name, size in sizes.items()
        }

    def choose(self, layer: Layer, rows: Floats, strength: float) -> Floats:
        """Return the step of each row, [G, R, 1].

        Args:
            layer: the layer.
            rows: its weights.
            strength: square root of the noise that each layer of mean size may add.
        """
        share = min(strength * self._shares[layer.name], _MAX_STEP)
        whole = max(float(np.sqrt((rows**2).mean())), 1e-30)
        own = np.maximum(np.sqrt((rows**2).mean(axis=2, keepdims=True)) / whole, _ROW_LEAST)
        sizes = np.abs(rows).max(axis=2, keepdims=True) if self._row_power else np.abs(rows).max()
        steps = np.maximum(whole * share * own**self._row_power, sizes / self._peak)
        quantized: Floats = 2 ** (np.ceil(4 * np.log2(np.maximum(steps, 1e-30))) / 4)
        return quantized
