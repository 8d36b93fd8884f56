"""Reads segmentation masks from a folder `masks` beside the folder `images`.

The mask of an image is a PNG file of the same name. The grey level or palette index of a pixel is its class
number. Pixels with 255 are ignored. For models with at most two classes, a mask with only 0 and 255 is read
as 0 and 1.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_toolkit.samples.boxes.box_set import list_images
from edgekit_toolkit.samples.truth import TrueMask

VOID: Final = 255
_MAX_BINARY: Final = 2  # classes with the background


@dataclass(frozen=True, slots=True)
class MaskSet:
    """The paths of images and of their masks, in the same order."""

    files: tuple[Path, ...]
    masks: tuple[Path, ...]
    _read: dict[int, TrueMask] = field(default_factory=dict)

    def in_input(self, index: int, placement: Placement, classes: int) -> TrueMask:
        """Return the mask of an image in the size of the model's input. Padding around the image is `VOID`.

        Args:
            index: The index of the image in `files`.
            placement: Where the image lies in the input.
            classes: The number of classes of the model, 0 if unknown.

        Raises:
            DataError: The mask is not a PNG of class numbers, has a different size than the image, or has
                unknown classes.
        """
        if index not in self._read:
            mask = _read_mask(self.masks[index], placement, classes)
            self._read[index] = TrueMask.of(_place(mask, placement))
        return self._read[index]


def find_mask_set(path: Path) -> MaskSet | None:
    """Return the images under `path` with their masks, or None if it has no folders `images` and `masks`.

    Raises:
        DataError: There are no images, an image has no mask, or two images have the same mask.
    """
    if not ((path / "images").is_dir() and (path / "masks").is_dir()):
        return None
    files = list_images(path / "images")
    masks = [path / "masks" / file.relative_to(path / "images").with_suffix(".png") for file in files]
    lacking = [str(mask) for mask in masks if not mask.is_file()]
    if lacking:
        raise DataError(f"{path}: there is no mask {lacking[0]} ({len(lacking)} of {len(files)} are missing)")
    mask, count = Counter(masks).most_common(1)[0]
    if count > 1:
        raise DataError(f"{mask}: is the mask of {count} pictures; give each picture a name of its own")
    return MaskSet(tuple(files), tuple(masks))


def _read_mask(file: Path, placement: Placement, classes: int) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG",)) as image:
            if image.size != (placement.width, placement.height):
                raise DataError(
                    f"{file}: has {image.width} x {image.height} pixels, its picture (upright by its EXIF)"
                    f" {placement.width} x {placement.height}"
                )
            if image.mode not in ("L", "P", "1"):
                raise DataError(
                    f"{file}: has pixels of the kind {image.mode}, expected 8 bits: class numbers in grey"
                    " levels or a palette, no colours"
                )
            mask: NDArray[np.uint8] = np.asarray(image).astype(np.uint8)
    except (OSError, SyntaxError, ValueError) as error:  # of a damaged PNG
        raise DataError(f"{file}: is damaged or no PNG ({error})") from error
    present = np.unique(mask)
    if classes <= _MAX_BINARY and set(present.tolist()) <= {0, VOID}:
        return np.asarray(mask == VOID, np.uint8)
    stated = present[present != VOID]
    most = max(classes, _MAX_BINARY) if classes else VOID  # a single class has the number 1
    if stated.size and stated[-1] >= most:
        raise DataError(f"{file}: has the class {stated[-1]}, the model has the classes 0 to {most - 1}")
    return mask


def _place(mask: NDArray[np.uint8], placement: Placement) -> NDArray[np.uint8]:
    """Return the nearest pixel of the picture for each pixel of the input."""
    height, width = placement.input_height, placement.input_width
    rows = np.floor((np.arange(height) + 0.5 - placement.top) / placement.scale_y).astype(np.int64)
    columns = np.floor((np.arange(width) + 0.5 - placement.left) / placement.scale_x).astype(np.int64)
    placed: NDArray[np.uint8] = mask[rows.clip(0, placement.height - 1)][
        :, columns.clip(0, placement.width - 1)
    ]
    placed[(rows < 0) | (rows >= placement.height)] = VOID
    placed[:, (columns < 0) | (columns >= placement.width)] = VOID
    return placed
