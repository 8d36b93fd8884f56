"""Keypoints: named points in pixels of the picture, from heatmaps or coordinates."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal, TypeAlias

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.boxes import Boxes, find_best
from edgekit_runtime.tasks.outputs import MAX_ENTRIES, read_output, to_scores
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register
from edgekit_runtime.tensors import Array

_LETTERS: Final = "xyzs-"
_BOX: Final = 5  # centre, size and score of an object before its points
_OVERLAP: Final = 0.45
_MAX_OBJECTS: Final = 100
# Of one object: x and y, float32 [K, 2], z [K, 0 or 1], and scores [K] or None.
_Points: TypeAlias = "tuple[Array, Array, Array | None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeypointOptions:
    """Options of `keypoints`.

    Attributes:
        output: The name of the output. Empty for the first output.
        form: The format of the output. `coordinates` is [N, points, values] or flattened. `heatmaps` has one
            map for each point. `poses` is [N, 5 + points x values, A] or transposed, as in YOLOv8-pose. Each
            of its A candidates has the centre and size of a box, a score and the points.
        row: The order of the values of a point, with the letters x, y, z and s (score). `-` is an ignored
            value. MoveNet has `yxs` and the unit `shares`. A face mesh has `xyz`.
        unit: `pixels` of the input, or `shares` of its width and height.
        layout: The order of the axes of heatmaps.
        scores: `probabilities`, or `sigmoid` to convert logits.
        min_score: The minimum score of a point.
        min_object_score: The minimum score of an object, for `poses`.
        skeleton: Pairs of points to join by a line in a drawing, as one flat list.
    """

    output: str = ""
    form: Literal["coordinates", "heatmaps", "poses"] = "coordinates"
    row: str = "xys"
    unit: Literal["pixels", "shares"] = "pixels"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    scores: Literal["probabilities", "sigmoid"] = "probabilities"
    min_score: Annotated[float, Range(0, 1)] = 0.0
    min_object_score: Annotated[float, Range(0, 1)] = 0.25
    skeleton: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = {letter: self.row.count(letter) for letter in set(self.row) | {"x", "y"}}
        if set(counts) - set(_LETTERS) or any(
            count != 1 for letter, count in counts.items() if letter != "-"
        ):
            raise ValueError(f"row is {self.row[:20]!r}, expected x, y and maybe z, s once each, such as xys")
        if len(self.skeleton) % 2:
            raise ValueError("skeleton has an odd number of points, expected pairs such as [0, 1, 0, 2]")


def _read_rows(outputs: Outputs, options: KeypointOptions) -> list[_Points]:
    width = len(options.row)
    expected = f"[1, points, {width}] with the values {options.row}, or the same flat"
    values = read_output(outputs, options.output, expected, (1, 2), is_finite=True)
    values = values.ravel() if len(values) == 1 else values
    if values.shape[-1] != width and (values.ndim > 1 or len(values) % width):
        raise DataError(f"the output is {list(values.shape)}, expected {expected}")
    return [_split_rows(values.reshape(-1, width), options)]


def _split_rows(rows: Array, options: KeypointOptions) -> _Points:
    rows = rows.astype(np.float32, copy=False)
    columns = {letter: rows[:, [index]] for index, letter in enumerate(options.row)}
    points = np.concatenate([columns["x"], columns["y"]], axis=1)
    scores = to_scores(columns["s"][:, 0], options.scores) if "s" in columns else None
    return points, columns.get("z", rows[:, :0]), scores


def _read_poses(outputs: Outputs, options: KeypointOptions) -> list[_Points]:
    """Return the points of each object, the best object first; the longer axis counts the places."""
    expected = f"[1, {_BOX} + points x {len(options.row)}, places] or turned"
    rows = read_output(outputs, options.output, expected, (2,), is_finite=True)
    rows = rows.T if rows.shape[0] < rows.shape[1] else rows
    if rows.shape[1] <= _BOX or (rows.shape[1] - _BOX) % len(options.row):
        raise DataError(f"the output has {rows.shape[1]} values for each place, expected {expected}")
    rows = rows[rows[:, 4] >= options.min_object_score]
    corners = np.concatenate([rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2], axis=1)
    boxes = Boxes(corners, rows[:, 4], np.zeros(len(rows), np.int64))
    best = find_best(boxes, overlap=_OVERLAP, max_boxes=_MAX_OBJECTS)
    return [_split_rows(row.reshape(-1, len(options.row)), options) for row in rows[best, _BOX:]]


def _read_heatmaps(outputs: Outputs, options: KeypointOptions) -> list[_Points]:
    """Return the place of the largest value of each map as shares of its sides, and that value.

    The place moves a quarter of a cell towards the larger neighbour on each axis.
    Source: get_final_preds of "Simple Baselines for Human Pose Estimation and Tracking" (Xiao et al., 2018).
    """
    expected = "[1, points, height, width] as `layout` says"
    maps = read_output(outputs, options.output, expected, (3,))
    maps = np.moveaxis(maps, 2, 0) if options.layout == "NHWC" else maps
    count, height, width = maps.shape
    cells = maps.reshape(count, -1).argmax(axis=1)
    y, x = np.divmod(cells, width)
    index = np.arange(count)

    def lean(cell: Array, length: int, before: Array, after: Array) -> Array:
        is_within = (cell > 0) & (cell < length - 1)
        return np.where(is_within, cell + 0.25 * (after > before) - 0.25 * (after < before), cell)

    left, right = maps[index, y, (x - 1).clip(0)], maps[index, y, (x + 1).clip(max=width - 1)]
    above, below = maps[index, (y - 1).clip(0), x], maps[index, (y + 1).clip(max=height - 1), x]
    points = np.stack([lean(x, width, left, right) / width, lean(y, height, above, below) / height], axis=1)
    scores = to_scores(maps[index, y, x], options.scores)
    return [(points.astype(np.float32), points[:, :0], scores)]


_READERS: Final = {"coordinates": _read_rows, "heatmaps": _read_heatmaps, "poses": _read_poses}


@register(
    "keypoints",
    KeypointOptions,
    "Named points with scores; a point is [x, y] in pixels of the picture, maybe with z.",
)
def _decode(outputs: Outputs, options: KeypointOptions, context: Context) -> Decoded:
    objects = _READERS[options.form](outputs, options)
    if (count := sum(len(points) for points, _, _ in objects)) > MAX_ENTRIES:
        raise DataError(f"there are {count} points, expected at most {MAX_ENTRIES}")
    entries: list[JsonValue] = []
    for number, points in enumerate(objects):
        owner: Decoded = {"object": number} if options.form == "poses" else {}
        entries += [entry | owner for entry in _list_points(points, options, context)]
    pairs = zip(options.skeleton[::2], options.skeleton[1::2], strict=True)
    skeleton: list[JsonValue] = [list(pair) for pair in pairs]
    return {"keypoints": entries, **({"skeleton": skeleton} if skeleton else {})}


def _list_points(object_points: _Points, options: KeypointOptions, context: Context) -> Iterator[Decoded]:
    """Yield the points of an object that have the smallest score or more."""
    points, depths, scores = object_points
    if placement := context.placement:
        if options.unit == "shares" or options.form == "heatmaps":
            points = points * np.array([placement.input_width, placement.input_height], np.float32)
        points = placement.to_picture(points)
    digits = 1 if placement else 4
    for index, (x, y) in enumerate(points.tolist()):
        entry: Decoded = {"label": context.name_class(index), "index": index}
        if scores is not None:
            if not options.min_score <= scores[index] < np.inf:
                continue
            entry["score"] = round(float(scores[index]), 4)
        yield entry | {"point": [round(x, digits), round(y, digits), *depths[index].tolist()]}
