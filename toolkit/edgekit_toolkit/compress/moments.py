"""Second moments of a layer's patches, in the float network and in the compressed one, from a few samples."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from edgekit_toolkit.compress.layers import Floats
from edgekit_toolkit.compress.rounding import damp

# Where there are few patches for the columns (behind a global pooling there is one a sample), the moment is
# drawn to its diagonal, and not at all with 8 patches a column.
_PATCHES_EACH: Final = 2.0
_LEAST_SHRINK: Final = 0.25
# How strongly least squares hold a row to its own weights.
_RIDGE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of the patches of a layer.

    Attributes:
        own: second moment of the compressed network's patches, [G, K, K].
        cross: the float network's patches times the compressed network's, [G, K, K].
        mean, float_mean: means of the patches in both networks, [G, K]; 0 if the moments are not centred.
    """

    own: Floats
    cross: Floats
    mean: Floats
    float_mean: Floats

    @classmethod
    def measure(cls, patches: Floats, float_patches: Floats, *, centred: bool) -> "Moments":
        """Return the moments of patches [P, G, K] of both networks, at the same positions.

        Args:
            patches: of the compressed network.
            float_patches: of the float network.
            centred: whether means are taken off, as the layer's bias takes them up.
        """
        means = [values.mean(axis=0) * centred for values in (patches, float_patches)]
        new, old = (
            np.ascontiguousarray((values - mean).transpose(1, 2, 0))
            for values, mean in zip((patches, float_patches), means, strict=True)
        )
        count = len(patches)
        own = new @ new.transpose(0, 2, 1) / count
        cross = own if patches is float_patches else old @ new.transpose(0, 2, 1) / count
        return cls(_shrink(own, count), _shrink(cross, count), *means)

    def fit(self, rows: Floats) -> Floats:
        """Return the rows for the compressed network's patches nearest to `rows` for the float ones."""
        diagonal = np.einsum("gii->gi", self.own).mean(axis=1)
        ridge = (_RIDGE * np.maximum(diagonal, 1e-9))[:, None, None] * np.eye(self.own.shape[-1])
        target = rows @ (self.cross + ridge)
        return np.swapaxes(np.linalg.solve(self.own + ridge, np.swapaxes(target, 1, 2)), 1, 2)

    @property
    def damped(self) -> Floats:
        return damp(self.own)


def _shrink(moment: Floats, count: int) -> Floats:
    columns = moment.shape[-1]
    share = min(1.0, _PATCHES_EACH * columns / count)
    if share < _LEAST_SHRINK:
        return moment
    diagonal = np.einsum("gii->gi", moment)
    shrunk: Floats = (1 - share) * moment + share * diagonal[:, :, None] * np.eye(columns)
    return shrunk
