"""Second moments of a layer's input patches in the float and in the compressed network."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.compress.rounding import damp
from edgekit_toolkit.onnx_graph.layers import Floats

# If there are few patches per column, the moment is pulled towards its diagonal. After a global pooling there
# is one patch per sample. With 8 patches per column the moment stays as it is.
_PATCHES_EACH: Final = 2.0
_LEAST_SHRINK: Final = 0.25
# How strongly the least-squares fit pulls a row towards its own weights.
_RIDGE: Final = 0.05
_MAX_FLOAT32: Final = 1e15  # a sum of squares stays finite


@dataclass(frozen=True, slots=True)
class Moments:
    """Second moments and means of a layer's input patches in the float and in the compressed network.

    The layer has G groups, such as those of a grouped convolution. In each group, a patch has K columns in
    the float network. The compressed network keeps J of these columns.

    Attributes:
        own: The second moment of the compressed network's patches, [G, J, J].
        cross: The second moment between the patches of the float and the compressed network, [G, K, J].
        mean, float_mean: The means of the patches, [G, J] and [G, K], or 0 if the moments are not centred.
        columns: The indices of the remaining columns in the float network's patches, [J].
    """

    own: Floats
    cross: Floats
    mean: Floats
    float_mean: Floats
    columns: NDArray[np.intp]

    @classmethod
    def measure(
        cls,
        patches: NDArray[np.floating[Any]],
        float_patches: NDArray[np.floating[Any]],
        *,
        centred: bool,
        columns: NDArray[np.intp] | None = None,
    ) -> "Moments":
        """Return the moments of a layer's input, measured on P patches of each network.

        `patches[p]` and `float_patches[p]` are from the same sample and the same position. For the axes G, J
        and K, see `Moments`.

        Products are computed in the dtype of the patches, or in float64 if values are very large.

        Args:
            patches: The patches of the compressed network, [P, G, J].
            float_patches: The patches of the float network, [P, G, K].
            centred: Whether to subtract the means. This requires a layer with a bias, which can restore them.
            columns: The indices of the remaining columns in `float_patches`, [J]. The default is all columns.
        """
        if columns is None:
            columns = np.arange(float_patches.shape[-1])
        mean, new = _centre(patches, centred=centred)
        float_mean, old = (mean, new) if patches is float_patches else _centre(float_patches, centred=centred)
        own = _multiply(new, new)
        cross = own if patches is float_patches else _multiply(old, new)
        count = len(patches)
        share = min(1.0, _PATCHES_EACH * cross.shape[1] / count)
        if share >= _LEAST_SHRINK:
            own, cross = _shrink(own, share, np.arange(len(columns))), _shrink(cross, share, columns)
        return cls(own, cross, mean, float_mean, columns)

    def restrict(self, columns: NDArray[np.intp]) -> "Moments":
        """Return the moments for only these columns of the compressed network (indices from 0 to J - 1)."""
        own = self.own[:, columns[:, None], columns]
        mean = self.mean[:, columns]
        return Moments(own, self.cross[:, :, columns], mean, self.float_mean, self.columns[columns])

    def fit(self, rows: Floats) -> Floats:
        """Return the weights [G, R, J] with which the compressed network best reproduces the layer's outputs.

        This is a least-squares fit. `rows` are the weights of the float network, [G, R, K], with G groups, R
        output channels in each group and K inputs of each channel.
        """
        diagonal = np.einsum("gii->gi", self.own).mean(axis=1)
        ridge = (_RIDGE * np.maximum(diagonal, 1e-9))[:, None, None]
        target = rows @ self.cross + ridge * rows[:, :, self.columns]
        own = self.own + ridge * np.eye(self.own.shape[-1])
        return np.swapaxes(np.linalg.solve(own, np.swapaxes(target, 1, 2)), 1, 2)

    def bias_change(self, rows: Floats, new_rows: Floats) -> Floats:
        """Return the change of a layer's bias that keeps the means of its outputs, [G * R].

        `rows` are the float weights [G, R, K] and `new_rows` the compressed weights [G, R, J], see `fit`.
        """
        means = rows @ self.float_mean[:, :, None] - new_rows @ self.mean[:, :, None]
        return np.asarray(means.reshape(-1))

    @property
    def damped(self) -> Floats:
        return damp(self.own)


def _centre(patches: NDArray[np.floating[Any]], *, centred: bool) -> tuple[Floats, NDArray[np.floating[Any]]]:
    """Return the mean of patches, 0 if they are not centred, and the patches without it."""
    if max(patches.max(initial=0), -patches.min(initial=0)) > _MAX_FLOAT32:
        patches = patches.astype(np.float64)
    if not centred:
        return np.zeros(patches.shape[1:]), patches
    mean = patches.mean(axis=0, dtype=np.float64)
    return mean, patches - mean.astype(patches.dtype)


def _multiply(old: NDArray[np.floating[Any]], new: NDArray[np.floating[Any]]) -> Floats:
    """Return the mean products [G, K, J] of patches [P, G, K] and [P, G, J]."""
    products: Floats = (old.transpose(1, 2, 0) @ new.transpose(1, 0, 2)).astype(np.float64)
    return products / len(new)


def _shrink(moment: Floats, share: float, columns: NDArray[np.intp]) -> Floats:
    """Draw a moment [G, K, J] towards its values for the same column."""
    shrunk = (1 - share) * moment
    same = np.arange(len(columns))
    shrunk[:, columns, same] = moment[:, columns, same]
    return shrunk
