"""The truth of a sample, if it is more than a class number."""

import hashlib
import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrueBoxes:
    """The boxes that a picture really holds, in pixels of the model's input.

    Attributes:
        corners: float64 [K, 4], x1, y1, x2, y2.
        classes: int64 [K], number of each box's class in the model.
        ignored: bool [K], boxes that may be found or missed without effect: crowds, and objects hard to see.
        crowds: bool [K], regions of many objects, in which any number of detections is ignored.
        input_size: height and width of the input.
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
    """The class of each pixel of the model's input; 255 where the pixel does not count.

    Attributes:
        packed: the classes, a byte each, row by row, compressed by zlib to keep a data set in memory.
        shape: height and width of the input.
    """

    packed: bytes
    shape: tuple[int, int]

    @classmethod
    def of(cls, classes: NDArray[np.uint8]) -> "TrueMask":
        """Return the mask with the classes of all pixels, uint8 [height, width]."""
        return cls(zlib.compress(classes.tobytes(), 1), (classes.shape[0], classes.shape[1]))

    @property
    def classes(self) -> NDArray[np.uint8]:
        return np.frombuffer(zlib.decompress(self.packed), np.uint8).reshape(self.shape)

    def __str__(self) -> str:
        """Return a digest of the content, as that of `TrueBoxes`."""
        return hashlib.sha256(str(self.shape).encode() + self.classes.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class TrueText:
    """The text that a picture or recording holds, and the model's characters in the order of its outputs."""

    text: str
    characters: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class TrueSteps:
    """Which classes sound in each step of a recording.

    Attributes:
        active: bool [steps, classes].
    """

    active: NDArray[np.bool_]

    def __str__(self) -> str:
        """Return a digest of the content, as that of `TrueBoxes`."""
        return hashlib.sha256(str(self.active.shape).encode() + self.active.tobytes()).hexdigest()


Truth: TypeAlias = int | TrueBoxes | TrueMask | TrueText | TrueSteps


def truth_array(truths: list[Any]) -> NDArray[Any]:
    """Return class numbers as int64 [samples], truths of other kinds as objects [samples]."""
    if all(isinstance(truth, int) for truth in truths):
        return np.array(truths, np.int64)
    array = np.empty(len(truths), np.object_)
    array[:] = truths
    return array
