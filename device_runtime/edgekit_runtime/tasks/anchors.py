"""Anchors of SSD and BlazeFace, generated from a few options.

Source: `SsdAnchorsCalculator` of MediaPipe (mediapipe/calculators/tflite/ssd_anchors_calculator.cc), which
takes the anchors of TensorFlow's object detection API.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorGrid:
    """The options of the anchors of one input.

    Attributes:
        size: height and width of the input in pixels.
        strides: pixels of the input for one cell of each layer.
        scales: smallest and largest scale, as shares of the input; layers lie between them in equal steps.
        aspects: width over height of the anchors of a cell.
        interpolated: width over height of a further anchor between a scale and the next; 0 for none.
        reduced: whether the first layer has three anchors: 0.1, and its scale with the aspects 2 and 1/2.
        unit_anchors: whether all anchors are as large as the input.
    """

    size: tuple[int, int]
    strides: tuple[int, ...]
    scales: tuple[float, float]
    aspects: tuple[float, ...]
    interpolated: float
    reduced: bool
    unit_anchors: bool

    @property
    def count(self) -> int:
        """Number of anchors, which costs nothing to know."""
        return sum(math.prod(cells) * len(sides) for cells, sides in self.layers())

    def layers(self) -> Iterator[tuple[tuple[int, int], list[tuple[float, float]]]]:
        """Yield rows and columns of each grid, and the sides of its anchors; equal strides share a grid."""
        for stride in dict.fromkeys(self.strides):
            sides = [
                side for layer, own in enumerate(self.strides) if own == stride for side in self._sides(layer)
            ]
            yield (-(-self.size[0] // stride), -(-self.size[1] // stride)), sides

    def _sides(self, layer: int) -> list[tuple[float, float]]:
        """Return width and height of the anchors that a layer adds to each cell."""
        scale, following = self._scale(layer), self._scale(layer + 1)
        pairs = [(scale, aspect) for aspect in self.aspects]
        if self.interpolated:
            pairs.append((math.sqrt(scale * following), self.interpolated))
        if self.reduced and layer == 0:
            pairs = [(0.1, 1.0), (scale, 2.0), (scale, 0.5)]
        if self.unit_anchors:
            return [(1.0, 1.0)] * len(pairs)
        return [(scale * math.sqrt(aspect), scale / math.sqrt(aspect)) for scale, aspect in pairs]

    def _scale(self, layer: int) -> float:
        least, most = self.scales
        if layer == len(self.strides):
            return 1.0
        steps = len(self.strides) - 1
        return least + (most - least) * layer / steps if steps else (least + most) / 2


@lru_cache(8)
def make_anchors(grid: AnchorGrid) -> NDArray[np.float32]:
    """Return centre x and y, width and height of each anchor as shares of the input, float32 [A, 4]."""
    layers = []
    for (rows, columns), sides in grid.layers():
        y, x = np.mgrid[:rows, :columns]
        centres = np.stack([(x + 0.5) / columns, (y + 0.5) / rows], axis=-1)[:, :, None]
        shape = (rows, columns, len(sides), 2)
        pairs = [np.broadcast_to(centres, shape), np.broadcast_to(np.array(sides), shape)]
        layers.append(np.concatenate(pairs, axis=-1).reshape(-1, 4))
    return np.concatenate(layers).astype(np.float32)
