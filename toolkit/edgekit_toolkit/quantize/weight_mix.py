"""Mixed precision of weights: some layers keep float16 weights while the others have int8. Pure.

The noises of single quantized layers nearly add up, so the predicted noise of a mix is their sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

# Shares of the noise with all layers in int8 that the mixes leave: 3, 6, 12 and 20 dB less.
_LEFT_SHARES: Final = (0.5, 0.25, 0.06, 0.01)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost and saving of int8 weights in one layer, with float16 weights in all others.

    Attributes:
        layer: first output of the layer.
        noise: noise of the model's outputs, as a ratio of powers.
        saved_bytes: bytes by which the model is smaller.
    """

    layer: str
    noise: float
    saved_bytes: int


def mixes(costs: Sequence[LayerCost]) -> list[frozenset[str]]:
    """Return the layers with int8 weights in each mix, the smallest mix first.

    Layers with the most noise for each byte saved are released first, until no more than a share of the noise
    is left.

    Args:
        costs: one entry a layer.
    """
    order = sorted(costs, key=lambda one: (-one.noise / max(one.saved_bytes, 1), one.layer))
    # Noise that is left after releasing the first 0, 1, ... layers.
    noises = np.array([one.noise for one in order])
    left = np.append(np.cumsum(noises[::-1])[::-1], 0.0)
    found: list[frozenset[str]] = []
    for share in _LEFT_SHARES:
        released = int(np.argmax(left <= share * left[0])) if np.isfinite(left[0]) else 1
        kept = frozenset(one.layer for one in order[released:])
        if released and kept and kept not in found:
            found.append(kept)
    return found
