"""Decodes photographs with Pillow and brings them into a model's form.

The steps and their results are those of torchvision's transforms for PIL images: Resize (antialiased),
CenterCrop, ToTensor, Normalize. Unlike torchvision's loader it turns a photograph upright by its EXIF data.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.system.install_hint import install_command
from edgekit_runtime.tensors import DTYPES

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
_FORMATS: Final = ("JPEG", "PNG", "BMP", "WEBP")  # the only decoders of Pillow that are used
COLOURS: Final[Mapping[str, str]] = {"RGB": "RGB", "BGR": "BGR", "L": "L"}  # name -> channels in order
LAYOUTS: Final = ("NCHW", "NHWC")
INTERPOLATIONS: Final = ("bilinear", "nearest", "bicubic", "lanczos")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """The preprocessing of a photograph, in this order.

    Attributes:
        resize: length of the shorter side in pixels, or (height, width); None leaves the size.
        interpolation: interpolation of the resize, one of `INTERPOLATIONS`.
        center_crop: (height, width) in pixels, or None. A smaller image gets black borders.
        colour: one of `COLOURS`.
        scale: a pixel 0..255 becomes (pixel * scale - mean) / std.
        mean, std: one for each channel, in the order of `colour`.
        layout: one of `LAYOUTS`.
        dtype: dtype of the result; integers are rounded.
    """

    resize: int | tuple[int, int] | None
    interpolation: str
    center_crop: tuple[int, int] | None
    colour: str
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layout: str
    dtype: str

    def __post_init__(self) -> None:
        self._table()  # refuses values that the dtype cannot hold, before any file is read

    def load(self, path: Path) -> NDArray[np.uint8]:
        """Return the pixels of a file after resize and crop, uint8 [height, width, channels].

        Raises:
            DataError: the file is no image, damaged or too large, or Pillow is not installed.
        """
        image = _decoded(path, "L" if self.colour == "L" else "RGB")
        image = self._cropped(self._resized(image))
        pixels = np.asarray(image, np.uint8).reshape(image.height, image.width, -1)
        return pixels[:, :, ::-1] if self.colour == "BGR" else pixels

    def finish(self, loaded: NDArray[Any]) -> NDArray[Any]:
        """Return the sample for `load`'s pixels: [channels, height, width] or [height, width, channels]."""
        table = self._table()
        channels = [table[index][loaded[:, :, index]] for index in range(loaded.shape[2])]
        return np.stack(channels, axis=0 if self.layout == "NCHW" else -1)

    def _table(self) -> NDArray[Any]:
        """Return the result for each pixel value, [channels, 256].

        Raises:
            DataError: a value is beyond the dtype.
        """
        dtype = DTYPES[self.dtype]
        pixels = np.arange(256, dtype=np.float64) * self.scale
        values = (pixels - np.array(self.mean)[:, None]) / np.array(self.std)[:, None]
        limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        values = values if dtype.kind == "f" else np.rint(values)
        low, high = float(values.min()), float(values.max())
        if not float(limits.min) <= low <= high <= float(limits.max):
            raise DataError(
                f"preprocessing: scale, mean and std give values from {low:g} to {high:g}, beyond"
                f" {self.dtype}; for int8 a scale of 1 and a mean of 128 are usual"
            )
        table: NDArray[Any] = values.astype(dtype)
        return table

    def _resized(self, image: "Image.Image") -> "Image.Image":
        from PIL import Image

        if self.resize is None:
            return image
        if isinstance(self.resize, int):
            short, long = sorted(image.size)
            longer = int(self.resize * long / short)  # truncated, as in torchvision
            size = (self.resize, longer) if image.width <= image.height else (longer, self.resize)
        else:
            size = (self.resize[1], self.resize[0])
        return image.resize(size, Image.Resampling[self.interpolation.upper()])

    def _cropped(self, image: "Image.Image") -> "Image.Image":
        if self.center_crop is None:
            return image
        height, width = self.center_crop
        top, start = _crop_start(image.height, height), _crop_start(image.width, width)
        return image.crop((start, top, start + width, top + height))  # black beyond the image


def _crop_start(size: int, crop: int) -> int:
    """Return the begin of a centre crop. Source: torchvision.transforms.functional.center_crop."""
    return round((size - crop) / 2) if size >= crop else -((crop - size) // 2)


def _decoded(path: Path, mode: str) -> "Image.Image":
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(f"{path}: images need Pillow: {install_command('images')}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about oddities of a file that can be decoded
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(path, formats=_FORMATS) as image:
                upright = ImageOps.exif_transpose(image)
                return _eight_bits(upright).convert(mode)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            most = (Image.MAX_IMAGE_PIXELS or math.inf) / 1e6
            raise DataError(
                f"{path}: has over {most:.0f} million pixels; make it smaller, no model needs that many"
            ) from error
        except OSError as error:
            raise DataError(f"{path}: {_reason(error)}") from error
        except Exception as error:  # decoders raise errors of many kinds on damaged files
            raise DataError(f"{path}: is damaged ({error})") from error


def _eight_bits(image: "Image.Image") -> "Image.Image":
    """Return an image of 8 bits a channel; `convert` would cut values of 16-bit grey at 255."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def _reason(error: OSError) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "is no image in JPEG, PNG, BMP or WebP"
    if error.strerror:
        return f"cannot be read: {error.strerror}"
    return f"is damaged or cut short ({error})"
