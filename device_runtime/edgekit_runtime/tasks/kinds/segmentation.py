"""Segmentation: the class of each pixel of the picture.

An output such as [1, 21, 65, 65] is cropped to the cells in the picture. Each pixel of the mask gets the best
class of the nearest cell. Pixels that the preprocessing crops away get the class `VOID`.
"""

import base64
import io
from typing import Annotated, Final, Literal

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.install_hint import install_command
from edgekit_runtime.tasks.outputs import MAX_ENTRIES, read_output, to_scores
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register
from edgekit_runtime.tensors import Array

VOID: Final = 255
"""The class of unlabelled pixels in the masks of Pascal VOC."""
_EXPECTED: Final = "[1, classes, height, width] as `layout` says, or whole numbers [1, height, width]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentationOptions:
    """Options of `segmentation`.

    Attributes:
        output: The name of the output. Empty for the first output.
        layout: The order of the output's axes. With several classes, the largest value wins.
        scores: `probabilities`, or `sigmoid` to convert logits. Only used if there is a single class.
        threshold: The minimum score of a pixel if there is a single class.
        form: The format of the mask: `png` with classes as palette indices, or `rle` for COCO's uncompressed
            RLE of each class. Its run lengths are in column order and begin with pixels outside the class.
        max_side: The maximum side of the mask in pixels. The mask of a larger picture is scaled down.
    """

    output: str = ""
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    scores: Literal["probabilities", "sigmoid"] = "probabilities"
    threshold: Annotated[float, Range(0, 1)] = 0.5
    form: Literal["png", "rle"] = "png"
    max_side: Annotated[int, Range(1, 1 << 14)] = 2048


def find_mask(outputs: Outputs, options: SegmentationOptions, placement: Placement | None) -> Array:
    """Return the class of each pixel, uint8 [height, width].

    The mask has the size of the picture, scaled down to `max_side` if necessary. Without a placement, it has
    the size of the output.

    Raises:
        DataError: An output is missing, has another shape, contains NaN, or has more than 255 classes.
    """
    values = read_output(outputs, options.output, _EXPECTED, (2, 3))
    if values.ndim == 3 and options.layout == "NHWC":
        values = np.moveaxis(values, 2, 0)
    height, width = values.shape[-2:]
    placement = placement or Placement.of(width, height)
    shrink = min(1.0, options.max_side / max(placement.width, placement.height))
    rows = _find_centres(placement.height, placement.scale_y, placement.top, shrink)
    columns = _find_centres(placement.width, placement.scale_x, placement.left, shrink)
    row_span, row_indices, no_row = _index_cells(rows * (height / placement.input_height), height)
    column_span, column_indices, no_column = _index_cells(columns * (width / placement.input_width), width)
    mask = _classify(values[..., row_span, column_span], options)[row_indices][:, column_indices]
    mask[no_row], mask[:, no_column] = VOID, VOID
    return mask


def _find_centres(length: int, scale: float, start: int, shrink: float) -> Array:
    """Return the centres of the mask's pixels along an axis, in pixels of the input."""
    count = max(1, round(length * shrink))
    return (np.arange(count, dtype=np.float64) + 0.5) * (length / count * scale) + start


def _index_cells(positions: Array, cells: int) -> tuple[slice, Array, Array]:
    """Return the cells that are needed, the position of each pixel in them, and which pixels have none."""
    indices = np.floor(positions).astype(np.int64)
    is_outside = (indices < 0) | (indices >= cells)
    indices = indices.clip(0, cells - 1)
    first = int(indices[0])
    return slice(first, int(indices[-1]) + 1), indices - first, is_outside


def _classify(values: Array, options: SegmentationOptions) -> Array:
    if values.ndim == 3 and len(values) > VOID:
        raise DataError(f"there are {len(values)} classes, expected at most {VOID}: is `layout` right?")
    if values.ndim == 3 and len(values) > 1:
        return _find_largest(values)
    values = values[0] if values.ndim == 3 else values
    if values.dtype.kind == "f":
        return (to_scores(values, options.scores) >= options.threshold).astype(np.uint8)
    if values.min() < 0 or values.max() > VOID:
        raise DataError(f"a class is {values.min()} or {values.max()}, expected 0 to {VOID}")
    return values.astype(np.uint8)


def _find_largest(values: Array) -> Array:
    """Return the first channel with the largest value, as argmax does, which takes 3 x as long."""
    if values.strides[0] < values.strides[-1]:  # the channels of a pixel lie together
        return np.asarray(values.argmax(axis=0), np.uint8)
    largest = values.max(axis=0)
    classes = np.zeros(largest.shape, np.uint8)
    for index in reversed(range(len(values))):
        np.copyto(classes, np.uint8(index), where=values[index] == largest)
    return classes


def _encode_png(mask: Array) -> str:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"masks in PNG need Pillow: {install_command('images')}; or form=rle") from error
    image, file = Image.fromarray(mask), io.BytesIO()
    image.putpalette(make_palette().tobytes())
    image.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def make_palette() -> Array:
    """Return a colour for each class, uint8 [256, 3]. Class 0 is black.

    The lowest three bits of a class are the highest bits of red, green and blue. The next three bits are the
    second-highest bits, and so on.

    Source: VOClabelcolormap of the Pascal VOC development kit.
    """
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1  # [class, bit]
    shifts = 7 - np.arange(8) // 3
    return np.stack([(bits << shifts)[:, channel::3].sum(axis=1) for channel in range(3)], 1).astype(np.uint8)


def _find_runs(mask: Array, classes: list[int]) -> list[JsonValue]:
    """Return the run lengths of each class: outside, inside, outside, … in column order.

    Raises:
        DataError: there are more than `MAX_ENTRIES`.
    Source: the uncompressed RLE of COCO's annotations.
    """
    pixels = mask.ravel(order="F")
    starts = np.concatenate([[0], np.flatnonzero(pixels[1:] != pixels[:-1]) + 1])
    if 2 * starts.size > MAX_ENTRIES:  # the pixels of a class, and those before them
        raise DataError(
            f"the mask has {starts.size} runs of pixels, form=rle gives at most {MAX_ENTRIES // 2}: ask for"
            " form=png, or a lower max_side"
        )
    ends = np.append(starts[1:], pixels.size)
    runs: list[JsonValue] = []
    for index in classes:
        is_inside = pixels[starts] == index
        edges = np.stack([starts[is_inside], ends[is_inside]], axis=1).ravel()
        counts: list[int] = np.diff(edges, prepend=0, append=pixels.size).tolist()
        runs.append({"size": list(mask.shape), "counts": counts if counts[-1] else counts[:-1]})
    return runs


@register(
    "segmentation",
    SegmentationOptions,
    "The class of each pixel of the picture as a mask, and the share of each class.",
)
def _decode(outputs: Outputs, options: SegmentationOptions, context: Context) -> Decoded:
    mask = find_mask(outputs, options, context.placement)
    counts = np.bincount(mask.ravel(), minlength=VOID + 1)[:VOID]
    names = context if len(context.labels) != 1 else Context(labels=("background", *context.labels))
    present = [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]
    total = max(1, int(counts.sum()))
    areas: list[dict[str, JsonValue]] = [
        {"label": names.name_class(index), "index": index, "share": round(float(counts[index] / total), 6)}
        for index in present
    ]
    shape: Decoded = {"form": options.form, "height": mask.shape[0], "width": mask.shape[1]}
    if options.form == "png":
        shape["data"] = _encode_png(mask)
    else:
        areas = [{**entry, "rle": runs} for entry, runs in zip(areas, _find_runs(mask, present), strict=True)]
    return {"areas": list(areas), "mask": shape}
