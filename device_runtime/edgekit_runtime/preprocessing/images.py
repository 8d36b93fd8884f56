"""Decodes images with Pillow and converts them to the form that a model needs.

The steps and results are those of torchvision's transforms for PIL images: Resize (antialiased), CenterCrop,
ToTensor, Normalize. Unlike torchvision's loader, it rotates an image upright according to its EXIF data.
"""

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import numpy as np

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.features import Factor
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.install_hint import install_command
from edgekit_runtime.tensors import DTYPES, Array

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
_FORMATS: Final = ("JPEG", "PNG", "BMP", "WEBP")  # the only decoders of Pillow that are used
LAYOUTS: Final = ("NCHW", "NHWC")
_MAX_SIDE: Final = 1 << 14
Side: TypeAlias = Annotated[int, Range(1, _MAX_SIDE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """The preprocessing steps of an image, in order.

    Attributes:
        resize: (height, width) in pixels, or only the length of the shorter side. None keeps the size.
        interpolation: The interpolation of the resize.
        center_crop: (height, width) in pixels, or None. Smaller images get black borders.
        letterbox: (height, width) in pixels to fit the whole image into, or None. Cannot be combined with
            `resize` or `center_crop`.
        fill: The value of the letterbox borders, 0 to 255.
        align: The position of the image in the letterbox. `corner` is the upper left corner.
        colour: The channels in order. `L` is grey.
        scale: Each pixel, 0 to 255, becomes (pixel * scale - mean) / std.
        mean, std: One value for all channels, or one value for each channel.
        layout: The order of the axes of the result.
        dtype: The dtype of the result. If it is an integer type, the values are rounded.

    Raises:
        ValueError: A field is out of range, or the dtype cannot hold the values.
    """

    resize: tuple[Side, ...] | None = None
    interpolation: Literal["bilinear", "nearest", "bicubic", "lanczos"] = "bilinear"
    center_crop: tuple[Side, Side] | None = None
    letterbox: tuple[Side, Side] | None = None
    fill: Annotated[int, Range(0, 255)] = 114
    align: Literal["centre", "corner"] = "centre"
    colour: Literal["RGB", "BGR", "L"]
    scale: Factor
    mean: tuple[Factor, ...] = (0.0,)
    std: tuple[Factor, ...] = (1.0,)
    layout: Literal["NCHW", "NHWC"]
    dtype: str

    def __post_init__(self) -> None:
        if self.resize is not None and len(self.resize) not in (1, 2):
            raise ValueError(f"resize is {list(self.resize)}, expected a number of pixels or [height, width]")
        if self.letterbox and (self.resize or self.center_crop):
            raise ValueError("'letterbox' fits the whole image; remove 'resize' and 'center_crop'")
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, len(self.colour)):
                raise ValueError(
                    f"{name} is {list(numbers)}, expected a number, or a list of {len(self.colour)}"
                )
        if 0 in self.std:
            raise ValueError("std holds 0, by which values are divided")
        _make_table(self)  # refuses values that the dtype cannot hold, before any file is read

    def load(self, path: Path) -> Array:
        """Return the pixels of an image file after resize and crop, uint8 [height, width, channels].

        Raises:
            DataError: The file is not an image, is damaged or too large, or Pillow is not installed.
        """
        return self.fit(decode_image(path))[0]

    def fit(self, image: "Image.Image") -> tuple[Array, Placement]:
        """Resize and crop an image.

        Returns:
            The pixels, uint8 [height, width, channels] with the channels of `colour`, and the placement of
            the image in them.
        """
        image = _convert(image, "L" if self.colour == "L" else "RGB")
        placement = Placement.of(image.width, image.height)
        if self.letterbox is None:
            image, placement = self._resized(image, placement)
            image, placement = self._cropped(image, placement)
        else:
            image, placement = self._boxed(image, placement)
        pixels = np.asarray(image, np.uint8).reshape(image.height, image.width, -1)
        return pixels[:, :, ::-1] if self.colour == "BGR" else pixels, placement

    def finish(self, loaded: Array) -> Array:
        """Return the model's input for pixels from `load` or `fit`, with the axes of `layout`."""
        table = _make_table(self)
        planes = loaded.transpose(2, 0, 1) if self.layout == "NCHW" else loaded
        if (table == np.arange(256)).all():
            return np.ascontiguousarray(planes, table.dtype)
        finished = np.empty(planes.shape, table.dtype)
        for channel, values in enumerate(table):
            plane = finished[channel] if self.layout == "NCHW" else finished[:, :, channel]
            plane[...] = values.take(loaded[:, :, channel])
        return finished

    def _resized(self, image: "Image.Image", placement: Placement) -> "tuple[Image.Image, Placement]":
        if self.resize is None:
            return image, placement
        if len(self.resize) == 1:
            (side,), (short, long) = self.resize, sorted(image.size)
            longer = int(side * long / short)  # truncated, as in torchvision
            if longer > _MAX_SIDE:
                return self._middle_resized(image, placement, longer)
            size = (side, longer) if image.width <= image.height else (longer, side)
        else:
            size = (self.resize[1], self.resize[0])
        return self._scaled(image, size), placement.scaled_to(*size)

    def _middle_resized(
        self, image: "Image.Image", placement: Placement, longer: int
    ) -> "tuple[Image.Image, Placement]":
        """Return the crop of a picture that would take too much memory if it were resized whole."""
        assert self.resize is not None  # noqa: S101  # for the type checker
        (side,) = self.resize
        if self.center_crop is None:
            raise DataError(
                f"the image has {image.width} x {image.height} pixels and would be resized to {longer} x"
                f" {side}; cut it, or set 'center_crop' or 'letterbox'"
            )
        is_wide = image.width > image.height
        crop = self.center_crop[is_wide]
        start = _crop_start(longer, crop)
        begin, end = (position * max(image.size) / longer for position in (start, start + crop))
        if is_wide:
            middle = self._scaled(image, (crop, side), (begin, 0, end, image.height))
            return middle, placement.scaled_to(longer, side).moved(-start, 0, crop, side)
        middle = self._scaled(image, (side, crop), (0, begin, image.width, end))
        return middle, placement.scaled_to(side, longer).moved(0, -start, side, crop)

    def _scaled(
        self,
        image: "Image.Image",
        size: tuple[int, int],
        box: tuple[float, float, float, float] | None = None,
    ) -> "Image.Image":
        from PIL import Image

        return image.resize(size, Image.Resampling[self.interpolation.upper()], box)

    def _cropped(self, image: "Image.Image", placement: Placement) -> "tuple[Image.Image, Placement]":
        if self.center_crop is None:
            return image, placement
        height, width = self.center_crop
        top, start = _crop_start(image.height, height), _crop_start(image.width, width)
        cropped = image.crop((start, top, start + width, top + height))  # black beyond the image
        return cropped, placement.moved(-start, -top, width, height)

    def _boxed(self, image: "Image.Image", placement: Placement) -> "tuple[Image.Image, Placement]":
        """Return the whole image, as large as fits into the letterbox, with borders."""
        from PIL import Image

        assert self.letterbox is not None  # noqa: S101  # for the type checker
        height, width = self.letterbox
        ratio = min(height / image.height, width / image.width)
        size = max(1, round(image.width * ratio)), max(1, round(image.height * ratio))
        left, top = ((width - size[0]) // 2, (height - size[1]) // 2) if self.align == "centre" else (0, 0)
        canvas = Image.new(image.mode, (width, height), (self.fill,) * len(image.getbands()))
        canvas.paste(self._scaled(image, size), (left, top))
        return canvas, placement.scaled_to(*size).moved(left, top, width, height)


@functools.lru_cache(32)
def _make_table(rules: ImageRules) -> Array:
    """Return the result for each pixel value, [channels, 256].

    Raises:
        ValueError: a value is beyond the dtype.
    """
    dtype = DTYPES[rules.dtype]
    pixels = np.arange(256, dtype=np.float64) * rules.scale
    with np.errstate(over="ignore"):  # refused below
        values = (pixels - np.array(rules.mean)[:, None]) / np.array(rules.std)[:, None]
    values = np.broadcast_to(values, (len(rules.colour), 256))
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    values = values if dtype.kind == "f" else np.rint(values)
    low, high = float(values.min()), float(values.max())
    if not float(limits.min) <= low <= high <= float(limits.max):
        raise ValueError(
            f"scale, mean and std give values from {low:g} to {high:g}, beyond"
            f" {rules.dtype}; for int8 a scale of 1 and a mean of 128 are usual"
        )
    table: Array = values.astype(dtype)
    return table


def _crop_start(size: int, crop: int) -> int:
    """Return the begin of a centre crop. Source: torchvision.transforms.functional.center_crop."""
    return round((size - crop) / 2) if size >= crop else -((crop - size) // 2)


def decode_image(file: Path | bytes, *, max_pixels: int | None = None) -> "Image.Image":
    """Return an image as RGB, rotated upright according to its EXIF data.

    Args:
        file: The path or the content of a JPEG, PNG, BMP or WebP file.
        max_pixels: The size limit, which is checked before decoding. None means Pillow's limit of 89 million.

    Raises:
        DataError: The file is not an image, is damaged or too large, or Pillow is not installed.
    """
    where = file if isinstance(file, Path) else "the image"
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(f"{where}: images need Pillow: {install_command('images')}") from error
    limit = max_pixels or Image.MAX_IMAGE_PIXELS or math.inf
    # The filter of warnings belongs to the whole process; content is decoded on threads of a service.
    with _mute_warnings(Image) if isinstance(file, Path) else contextlib.nullcontext():
        try:
            with Image.open(file if isinstance(file, Path) else io.BytesIO(file), formats=_FORMATS) as image:
                if image.width * image.height > limit:
                    raise Image.DecompressionBombError  # noqa: TRY301  # as Pillow does at its own limit
                ImageOps.exif_transpose(image, in_place=True)
                image.load()  # before the file is closed
                return _convert(_eight_bits(image), "RGB")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(
                f"{where}: has over {limit / 1e6:.0f} million pixels; make it smaller, no model needs that"
                " many"
            ) from error
        except OSError as error:
            raise DataError(f"{where}: {_reason(error)}") from error
        except Exception as error:  # decoders raise errors of many kinds on damaged files
            raise DataError(f"{where}: is damaged ({error})") from error


def take_image(pixels: Array) -> "Image.Image":
    """Return raw pixels as an image without copying them.

    Args:
        pixels: uint8 [height, width, 3] in RGB, or [height, width, 1] in grey.

    Raises:
        DataError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"images need Pillow: {install_command('images')}") from error
    return Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0])


@contextlib.contextmanager
def _mute_warnings(image: Any) -> Iterator[None]:
    """Ignore warnings about oddities of a file that can be decoded, but not about its size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", image.DecompressionBombWarning)
        yield


def _convert(image: "Image.Image", mode: str) -> "Image.Image":
    return image if image.mode == mode else image.convert(mode)  # which copies an image of this mode, too


def _eight_bits(image: "Image.Image") -> "Image.Image":
    """Return an image of 8 bits a channel; `convert` would cut values of 16-bit grey at 255."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))


def _reason(error: OSError) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "is no image in JPEG, PNG, BMP or WebP"
    if error.strerror:
        return f"cannot be read: {error.strerror}"
    return f"is damaged or cut short ({error})"
