"""How many bytes the codes of a model take: by their entropy, before a weight is rounded. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.compress.compression import entropy_bits
from edgekit_toolkit.compress.steps import EqualSlopeSteps
from edgekit_toolkit.onnx_graph.layers import Floats, Layer

MIN_STRENGTH: Final = 1e-4
MAX_STRENGTH: Final = 10.0
_HALVINGS: Final = 14


class CodeSizes:
    """Computes how many bytes a model's weights take when they are rounded to codes and entropy-coded.

    One number, the strength, sets the steps of all layers; see `EqualSlopeSteps.choose`.

    Args:
        weights: weights of `layers`, by name.
        steps: chooses the steps of a layer for a strength.
    """

    def __init__(
        self, layers: Sequence[Layer], weights: Mapping[str, NDArray[Any]], steps: EqualSlopeSteps
    ) -> None:
        self.steps = steps
        by_weight = {layer.weight: layer for layer in layers}  # layers may share one
        self._rows = [(layer, layer.to_rows(weights[name])) for name, layer in by_weight.items()]

    def at(self, strength: float) -> float:
        """Return the bytes of all entropy-coded codes. A larger strength gives fewer bytes."""
        return self._sum(lambda layer, rows: self.steps.choose(layer, rows, strength))

    def of_peak(self, peak: int, fine_peak: int) -> float:
        """Return a lower bound on the bytes of the codes if the largest weight of each row has code `peak`.

        The bound is the entropy of the nearest codes. A package takes more: its coding adds some percent, it
        also holds the scales, and rounding to few bits chooses shorter steps.

        Args:
            peak: largest code.
            fine_peak: largest code of grouped layers.
        """

        def choose(layer: Layer, rows: Floats) -> Floats:
            largest: Floats = np.maximum(np.abs(rows).max(axis=2, keepdims=True), 1e-30)
            return largest / (fine_peak if layer.groups > 1 else peak)

        return self._sum(choose)

    def find_strength(self, max_bytes: float) -> float:
        """Return the least strength at which the codes take at most `max_bytes`, else `MAX_STRENGTH`."""
        low, high = MIN_STRENGTH, MAX_STRENGTH
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.at(middle) > max_bytes else (low, middle)
        return high

    def list_steps(self, strength: float) -> dict[str, NDArray[np.float32]]:
        """Return the step of each output channel, float32 [channels], by the name of the weight."""
        return {
            layer.weight: self.steps.choose(layer, rows, strength).astype(np.float32).reshape(-1)
            for layer, rows in self._rows
        }

    def _sum(self, choose: Callable[[Layer, Floats], Floats]) -> float:
        return sum(entropy_bits(np.rint(rows / choose(layer, rows))) for layer, rows in self._rows) / 8
