"""The types of ground truth of a sample that are not just a class number."""

import hashlib
import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrueBoxes:
    """The true boxes of an image, in pixels of the model's input.

    Attributes:
        corners: The corners x1, y1, x2, y2 of the boxes, float64 [K, 4].
        classes: The class number of each box in the model, int64 [K].
        ignored: The boxes that are not evaluated, because they are crowds or difficult objects, bool [K].
        crowds: The boxes that are regions with many objects, bool [K]. Detections in them are ignored.
        input_size: The height and width of the input.
    """

    corners: NDArray[np.float64]
    classes: NDArray[np.int64]
    ignored: NDArray[np.bool_]
    crowds: NDArray[np.bool_]
    input_size: tuple[int, int]

    def __str__(self) -> str:
        """Return a digest of the content, which names it in the digest of a data set."""
        parts = (self.corners.astype("<f8"), self.classes.astype("<i8"), self.ignored, self.crowds)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class TrueMask:
    """The true class of each pixel of the model's input. Pixels with 255 are ignored.

    Attributes:
        packed: The classes as one byte per pixel, row by row, compressed with zlib to save memory.
        shape: The height and width of the input.
    """

    packed: bytes
    shape: tuple[int, int]

    @classmethod
    def of(cls, classes: NDArray[np.uint8]) -> "TrueMask":
        """Return a mask from the classes of all pixels, uint8 [height, width]."""
        return cls(zlib.compress(classes.tobytes(), 1), (classes.shape[0], classes.shape[1]))

    @property
    def classes(self) -> NDArray[np.uint8]:
        return np.frombuffer(zlib.decompress(self.packed), np.uint8).reshape(self.shape)

    def __str__(self) -> str:
        """Return a digest of the content, as that of `TrueBoxes`."""
        return hashlib.sha256(str(self.shape).encode() + self.classes.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class TrueText:
    """The true text in an image or recording, and the model's characters in the order of its outputs."""

    text: str
    characters: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class TrueSteps:
    """The sound classes that are present in each step of a recording.

    Attributes:
        active: Whether a class is present in a step, bool [steps, classes].
    """

    active: NDArray[np.bool_]

    def __str__(self) -> str:
        """Return a digest of the content, as that of `TrueBoxes`."""
        return hashlib.sha256(str(self.active.shape).encode() + self.active.tobytes()).hexdigest()


Truth: TypeAlias = int | TrueBoxes | TrueMask | TrueText | TrueSteps


def truth_array(truths: list[Any]) -> NDArray[Any]:
    """Return class numbers as int64 [samples], or other ground truth as an object array [samples]."""
    if all(isinstance(truth, int) for truth in truths):
        return np.array(truths, np.int64)
    array = np.empty(len(truths), np.object_)
    array[:] = truths
    return array
