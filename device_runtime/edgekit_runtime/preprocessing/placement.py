"""The position of an image in a model's input, which is needed to convert results to pixels of the image."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Floats

_CHANNELS: Final = (1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The position and scale of an image in a model's input.

    Attributes:
        width, height: The size of the image in pixels.
        input_width, input_height: The size of the input in pixels.
        scale_x, scale_y: The number of input pixels for each image pixel.
        left, top: The position of the image's upper left corner in the input, in pixels. Negative after a
            crop.
        origin: The position (x, y) of the image in the larger image that it was cropped from, in pixels.
            Answers give positions in the larger image.
    """

    width: int
    height: int
    input_width: int
    input_height: int
    scale_x: float = 1.0
    scale_y: float = 1.0
    left: int = 0
    top: int = 0
    origin: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, width: int, height: int) -> "Placement":
        """Return the placement of an image that has the size of the input."""
        return cls(width=width, height=height, input_width=width, input_height=height)

    @classmethod
    def of_input(cls, shape: Sequence[int]) -> "Placement | None":
        """Return the placement of an image that fills an NCHW or NHWC input, or None for other inputs."""
        if len(shape) == 4 and shape[1] in _CHANNELS:
            return cls.of(shape[3], shape[2])
        return cls.of(shape[2], shape[1]) if len(shape) == 4 and shape[3] in _CHANNELS else None

    @property
    def input_size(self) -> tuple[int, int]:
        """The height and the width of the input in pixels."""
        return self.input_height, self.input_width

    def scaled_to(self, width: int, height: int) -> "Placement":
        """Return the placement after the whole image was resized to this size in pixels."""
        return replace(
            self,
            input_width=width,
            input_height=height,
            scale_x=width / self.width,
            scale_y=height / self.height,
        )

    def moved(self, left: int, top: int, width: int, height: int) -> "Placement":
        """Return the placement on a canvas of this size, with the image's top left corner at (left, top)."""
        return replace(
            self, left=self.left + left, top=self.top + top, input_width=width, input_height=height
        )

    def to_picture(self, corners: Floats) -> Floats:
        """Convert points of the input to points of the image, clipped to the image and shifted by `origin`.

        `corners` is a float array [..., 2 n] of alternating x and y, in pixels of the input.
        """
        pairs = corners.reshape(*corners.shape[:-1], corners.shape[-1] // 2, 2)
        unclipped = (pairs - self._start) / self._scale
        inside = unclipped.clip(0, np.array([self.width, self.height], np.float32))
        points: Floats = (inside + np.array(self.origin, np.float32)).reshape(corners.shape)
        return points

    def to_input(self, corners: Floats) -> Floats:
        """Convert points from `to_picture` back to points of the input, without clipping."""
        pairs = corners.reshape(*corners.shape[:-1], corners.shape[-1] // 2, 2)
        within = pairs - np.array(self.origin, np.float32)
        points: Floats = (within * self._scale + self._start).reshape(corners.shape)
        return points

    @property
    def _start(self) -> Floats:
        return np.array([self.left, self.top], np.float32)

    @property
    def _scale(self) -> Floats:
        return np.array([self.scale_x, self.scale_y], np.float32)
