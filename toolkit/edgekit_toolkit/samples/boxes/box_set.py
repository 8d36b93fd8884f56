"""The bounding boxes of a data set of any format."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_toolkit.samples.media.files import SUFFIXES, list_media
from edgekit_toolkit.samples.truth import TrueBoxes

# Boxes of real data sets reach beyond the picture by roundings. By more they are those of another picture.
_MAX_BEYOND: Final = 0.01
_MIN_BEYOND: Final = 1.0  # pixels
_SAME_SHAPE: Final = 0.02
_MAX_BYTES: Final = 1 << 29  # of a file of annotations


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedBox:
    """A bounding box in a data set.

    Attributes:
        corners: The coordinates x1, y1, x2, y2 in the unit of `PictureBoxes.size`.
        category: The name of the class, or its number if the data set has no names.
        where: The file and line of the box, for messages.
        is_ignored: Whether detecting or missing the box does not affect the score.
        is_crowd: Whether the box contains many objects that are not annotated separately.
    """

    corners: tuple[float, float, float, float]
    category: str | int
    where: str
    is_ignored: bool = False
    is_crowd: bool = False


@dataclass(frozen=True, slots=True)
class PictureBoxes:
    """The boxes of one image.

    Attributes:
        size: The width and height of the image in the unit of the boxes, (1, 1) for relative coordinates, or
            None if unknown.
    """

    file: Path
    boxes: tuple[StatedBox, ...]
    size: tuple[float, float] | None

    def __post_init__(self) -> None:
        if self.size is not None:
            self._check(self.size)

    def in_input(self, placement: Placement, numbers: Mapping[str | int, int]) -> TrueBoxes:
        """Return the boxes in pixels of the model's input, clipped to the input. Boxes outside are left out.

        `numbers` is the dict from `BoxSet.number_classes`.

        Raises:
            DataError: The image has another aspect ratio than the data set states, or a box is outside of
                the image.
        """
        picture = (float(placement.width), float(placement.height))
        size = self.size or picture
        self._check(size)
        if size != (1, 1) and abs(size[0] * picture[1] / (size[1] * picture[0]) - 1) > _SAME_SHAPE:
            raise DataError(
                f"{self.file}: has {placement.width} x {placement.height} pixels (upright by its EXIF), but"
                f" the data set states {size[0]:g} x {size[1]:g}; give the pictures that were annotated"
            )
        corners = np.array([box.corners for box in self.boxes], np.float64).reshape(-1, 4)
        corners = corners / np.tile(size, 2) * np.tile(picture, 2)
        ends = (placement.input_width, placement.input_height) * 2
        corners = np.clip(placement.to_input(np.clip(corners, 0, np.tile(picture, 2))), 0, ends)
        # Without an area, or cropped away.
        is_visible: NDArray[np.bool_] = np.all(corners[:, 2:] > corners[:, :2], axis=1)
        boxes = list(itertools.compress(self.boxes, is_visible))
        return TrueBoxes(
            corners=corners[is_visible],
            classes=np.array([numbers[box.category] for box in boxes], np.int64),
            ignored=np.array([box.is_ignored or box.is_crowd for box in boxes], np.bool_),
            crowds=np.array([box.is_crowd for box in boxes], np.bool_),
            input_size=(placement.input_height, placement.input_width),
        )

    def _check(self, size: tuple[float, float]) -> None:
        unit = _MIN_BEYOND if size != (1, 1) else 0.0
        beyond = np.maximum(unit, np.multiply(_MAX_BEYOND, size))
        for box in self.boxes:
            start, end = np.array(box.corners).reshape(2, 2)
            if not (np.isfinite(box.corners).all() and (start <= end).all()):
                raise DataError(f"{box.where}: the box {_show(box.corners)} has no size of 0 or more")
            if (start < -beyond).any() or (end > size + beyond).any():
                raise DataError(
                    f"{box.where}: the box {_show(box.corners)} lies outside the picture of"
                    f" {size[0]:g} x {size[1]:g} (x1, y1, x2, y2); mend it, or remove it"
                )


@dataclass(frozen=True, slots=True)
class BoxSet:
    """Images with their boxes, in the order of the files.

    Attributes:
        names: The class names in the order of their numbers. May be empty.
        notes: Sentences for the user, for example on images that are left out.
    """

    pictures: tuple[PictureBoxes, ...]
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def check_filled(self, where: Path) -> "BoxSet":
        """Return this set, or raise DataError with the path `where` if it has no boxes."""
        if not any(picture.boxes for picture in self.pictures):
            raise DataError(f"{where}: none of its {len(self.pictures)} pictures has a box")
        return self

    def number_classes(self, classes: Sequence[str], where: Path) -> dict[str | int, int]:
        """Return a dict from the classes of the boxes to the class numbers of the model.

        A box whose class is already a number keeps this number.

        Args:
            classes: The class names in the order of the model's outputs, or empty to use `names`.
            where: The path of the data set, for messages.

        Raises:
            DataError: A box has an unknown class.
        """
        names = tuple(classes) or self.names
        by_name: dict[str | int, int] = {name: number for number, name in enumerate(names)}
        for picture in self.pictures:
            for box in picture.boxes:
                if isinstance(box.category, int):
                    by_name[box.category] = box.category
                elif box.category not in by_name:
                    raise DataError(
                        f"{box.where}: class '{box.category}' of {where.name} is none of the {len(names)}"
                        f" labels ({', '.join(names[:5])}, ...); name it as --labels does, or leave"
                        " --labels out"
                    )
        return by_name


def read_text(path: Path) -> str:
    """Return the text of a file, or raise DataError if it is unreadable, not UTF-8 or too large."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: has over {_MAX_BYTES >> 20} MB, which no annotations need")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as annotations: {error}") from error


def number(value: Any, where: str) -> float:
    """Return `value` as a float, or raise DataError with the location `where` if it is not finite."""
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: {str(value)[:40]!r} is no number") from error
    if not np.isfinite(result):
        raise DataError(f"{where}: {result} is no number")
    return result


def list_images(folder: Path) -> list[Path]:
    """Return the sorted paths of all images in a folder and its sub-folders.

    Raises:
        DataError: There are no images.
    """
    images = [file for file in list_media(folder)[0] if SUFFIXES[file.suffix.lower()] == "image"]
    if not images:
        raise DataError(f"{folder}: holds no image (JPEG, PNG, BMP, WebP)")
    return images


def _show(corners: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in corners) + "]"
