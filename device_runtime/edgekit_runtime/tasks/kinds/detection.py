"""Detection: labelled boxes in pixels of the picture.

`LAYOUTS` describes the arrangements of boxes in outputs. The decoder has three steps:

    1. `read_boxes` returns the boxes with at least `min_score`, in pixels of the input.
    2. `choose_best` removes overlapping boxes (non-maximum suppression).
    3. `Placement.to_picture` converts the boxes to pixels of the picture.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Final, Literal

import numpy as np

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.boxes import Boxes, choose_best
from edgekit_runtime.tasks.outputs import to_scores
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register
from edgekit_runtime.tensors import Array, Floats

Size = tuple[int, int]  # height and width of the input
# Orders of the values in a row of an end-to-end detector, the likeliest first.
Columns = Literal[
    "box-score-class",  # YOLOv10, YOLO26, most others
    "box-class-score",
    "class-score-box",  # PaddleDetection
    "batch-box-class-score",  # YOLOv7: number of the image first
    "batch-box-score-class",
    "batch-class-score-box",  # Caffe
]

_MAX_CLASS: Final = (1 << 31) - 1
_MAX_PROBABILITY: Final = 1 + 1e-3
_MAX_LISTED: Final = 16  # strides or aspects. A request may state them


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionOptions:
    """Options of `detection`.

    Attributes:
        layout: The arrangement of boxes in the outputs.
        output: The output with the boxes. Empty for the first output that fits.
        scores_output: The output with only scores. Empty for the first output that fits.
        classes_output: The output with classes, for `listed`. Empty if there is only one class.
        count_output: The output with the number of valid boxes, for `listed`. Empty if all are valid.
        boxes: `centre` for centre and size, `corners` for two corners. With `-yx`, y comes before x.
        unit: `pixels` of the input, or `shares` of its width and height.
        scores: `probabilities`, or the activation that converts logits (`softmax` or `sigmoid`).
        background: The position of the class for `no object`, which is `none`, `first` or `last`.
        columns: The order of the values in a row of the layout `rows`.
        strides: The size of a cell of each grid in pixels of the input, for `grid` and `anchors`.
        scales: The sizes of the smallest and the largest anchor as shares of the input.
        aspects: The aspect ratios (width over height) of the anchors of a cell.
        interpolated: The aspect ratio of an additional anchor, whose scale is the geometric mean of the
            scales of this grid and the next. 0 for no additional anchor.
        reduced: Whether each cell of the first grid has only three anchors, as in SSD's lowest layer.
        unit_anchors: Whether all anchors are as large as the input.
        divisors: The divisors of raw x, y, width and height, for `anchors`. 0 for the width of the input.
        sizes: The factor of an anchor's size: exp(value) for `exponential`, the value for `linear`.
        min_score: The minimum score of a box.
        overlap: The intersection over union above which the worse of two boxes of a class is removed. 1 keeps
            all boxes.
        max_boxes: The maximum number of boxes in an answer.
    """

    layout: Literal["scored", "objectness", "grid", "apart", "listed", "rows", "anchors"] = "scored"
    output: str = ""
    scores_output: str = ""
    classes_output: str = ""
    count_output: str = ""
    boxes: Literal["centre", "corners", "centre-yx", "corners-yx"] = "centre"
    unit: Literal["pixels", "shares"] = "pixels"
    scores: Literal["probabilities", "softmax", "sigmoid"] = "probabilities"
    background: Literal["none", "first", "last"] = "none"
    columns: Columns = "box-score-class"
    strides: tuple[int, ...] = (8, 16, 32)
    scales: tuple[float, ...] = (0.2, 0.95)
    aspects: tuple[float, ...] = (1.0, 2.0, 0.5, 3.0, 0.3333)
    interpolated: Annotated[float, Range(0, 100)] = 1.0
    reduced: bool = True
    unit_anchors: bool = False
    divisors: tuple[float, ...] = (10.0, 10.0, 5.0, 5.0)
    sizes: Literal["exponential", "linear"] = "exponential"
    min_score: Annotated[float, Range(0, 1)] = 0.25
    overlap: Annotated[float, Range(0, 1)] = 0.45
    max_boxes: Annotated[int, Range(1, 1000)] = 100

    def __post_init__(self) -> None:
        if not 1 <= len(self.strides) <= _MAX_LISTED or min(self.strides) < 1:
            raise ValueError(
                f"strides is {list(self.strides)}, expected 1 to {_MAX_LISTED} of 1 pixel or more"
            )
        if len(self.scales) != 2 or len(self.divisors) != 4 or min(*self.scales, *self.aspects, 1) <= 0:
            raise ValueError("expected 2 scales, 4 divisors and aspects, scales and aspects over 0")
        if len(self.aspects) > _MAX_LISTED:
            raise ValueError(f"there are {len(self.aspects)} aspects, expected {_MAX_LISTED} at most")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayout:
    """An arrangement of boxes in outputs.

    Attributes:
        sentence: The shapes and their meaning, for documents.
        options: The options of this layout, without those that all layouts have.
        leading: The number of values before the class scores of a box, which is 4, or 5 with an objectness
            score. 0 if boxes and scores are separate outputs.
        find_corners: Takes all boxes [A, 4 or more], the selected indices, the options and the input size.
            Returns the corners of the selected boxes in pixels of the input. None if `read` is set.
        read: Reads the boxes from outputs with one class for each box, or None.
    """

    sentence: str
    options: tuple[str, ...]
    leading: int = 0
    find_corners: "Callable[[Array, Array, DetectionOptions, Size], Floats] | None" = None
    read: "Callable[[Outputs, DetectionOptions, Size], Boxes] | None" = None


def find_boxes(
    outputs: Outputs, options: DetectionOptions, input_size: Size, labels: int | None = None
) -> Boxes:
    """Return the boxes of one sample after suppression, in pixels of the input, best first.

    Args:
        outputs: The outputs of one sample, each with a batch of 1.
        options: The options of the task.
        input_size: The height and width of the input.
        labels: The number of labelled classes, or None. It shows which axis of an output has the values of a
            box. If both or neither are possible, the shorter axis is used, and a probability over 1 is an
            error. If `labels` is None, the shorter axis is used without this check.

    Raises:
        DataError: An output is missing or has another shape, or a probability is over 1.
    """
    boxes = read_boxes(outputs, options, input_size, labels)
    return choose_best(boxes, overlap=options.overlap, max_boxes=options.max_boxes)


def read_boxes(
    outputs: Outputs, options: DetectionOptions, input_size: Size, labels: int | None = None
) -> Boxes:
    """Return all boxes of one sample before suppression, see `find_boxes`. Some may have no finite area."""
    layout = LAYOUTS[options.layout]
    with np.errstate(over="ignore", invalid="ignore"):
        if layout.find_corners is None:
            assert layout.read is not None  # noqa: S101  # for the type checker
            return layout.read(outputs, options, input_size)
        objects, shape = None, None
        if layout.leading:
            rows, is_certain = _orient(outputs, options, layout.leading, labels or 0)
            coords, values = rows[:, :4], rows[:, layout.leading :]
            objects = rows[:, 4] if layout.leading > 4 else None
            shape = None if is_certain or labels is None else rows.shape
        else:
            name, coords = _boxes_apart(outputs, options)
            values = _scores_apart(outputs, options, name, len(coords))
        chosen, scores, classes = _best_classes(values, options, objects)
        boxes = Boxes(layout.find_corners(coords, chosen, options, input_size), scores, classes)
    if shape and options.scores == "probabilities" and scores.max(initial=0) > _MAX_PROBABILITY:
        raise DataError(
            f"task detection: a score is {scores.max():.4g}, expected 0 to 1: the longer axis of"
            f" {list(shape)} was taken for the boxes; labels for all classes tell the axes apart, and"
            " scores=sigmoid reads logits"
        )
    return boxes


def _get(outputs: Outputs, name: str) -> Array:
    if name not in outputs:
        raise DataError(f"task detection: there is no output '{name}', the model has {', '.join(outputs)}")
    return outputs[name]


def _matrix(outputs: Outputs, name: str, min_columns: int) -> Array:
    """Return an output of one sample without its leading axes, [rows, columns]."""
    value = _get(outputs, name)
    if value.ndim < 2 or math.prod(value.shape[:-2]) != 1 or value.shape[-1] < min_columns:
        raise DataError(
            f"task detection: output '{name}' is {list(value.shape)}, expected [1, boxes, values] with"
            f" {min_columns} values or more of one sample"
        )
    rows: Array = value.reshape(value.shape[-2:])
    return rows


def _orient(outputs: Outputs, options: DetectionOptions, leading: int, labels: int) -> tuple[Array, bool]:
    """Return the output with boxes and scores as rows [A, values], and whether labels tell its axes apart.

    Without them the longer axis counts the boxes.
    """
    rows = _matrix(outputs, options.output or next(iter(outputs)), 0)
    widths = {leading + labels, leading + labels + (options.background != "none")} if labels else set()
    fits = [length in widths for length in rows.shape]
    is_certain = fits[0] != fits[1]
    is_turned = fits[0] if is_certain else rows.shape[0] < rows.shape[1]
    rows = rows.T if is_turned else rows
    if rows.size and rows.shape[1] <= leading:
        raise DataError(
            f"task detection: layout {options.layout} needs {leading + 1} values for each box or more,"
            f" there are {rows.shape[1]}"
        )
    return (rows if rows.size else np.zeros((0, leading + 1), np.float32)), is_certain


def _boxes_apart(outputs: Outputs, options: DetectionOptions) -> tuple[str, Array]:
    """Return the output with the boxes alone, [A, 4 or more]."""
    fits = (name for name, value in outputs.items() if value.shape[-1:] == (4,))
    name = options.output or next(fits, next(iter(outputs)))
    return name, _matrix(outputs, name, 4)


def _scores_apart(outputs: Outputs, options: DetectionOptions, boxes: str, count: int) -> Array:
    """Return the output with a score for each box and class, [A, C]."""
    fits = (
        name
        for name, value in outputs.items()
        if name != boxes and value.ndim > 1 and value.shape[-2] == count
    )
    scores = _matrix(outputs, options.scores_output or next(fits, "of scores"), 1)
    if len(scores) != count:
        raise DataError(f"task detection: there are {count} boxes, but scores for {len(scores)}")
    return scores


def _best_classes(
    scores: Array, options: DetectionOptions, objects: "Array | None" = None
) -> tuple[Array, Floats, Array]:
    """Return the rows whose best class has `min_score` or more, with that score and class.

    `scores`: [A, C]. `objects`: [A], shares by which the scores are multiplied; None for 1.
    """
    is_sigmoid = options.scores == "sigmoid"
    rows = None
    if objects is not None:
        objects = to_scores(objects, "sigmoid") if is_sigmoid else objects
        rows = np.flatnonzero(objects >= options.min_score)
        scores, objects = scores[rows], objects[rows]
    if options.scores == "softmax" and scores.size:
        scores = to_scores(scores, "softmax")
    scores = scores[:, options.background == "first" : scores.shape[1] - (options.background == "last")]
    if not scores.size:
        return np.zeros(0, np.intp), np.zeros(0, np.float32), np.zeros(0, np.int64)
    best = np.fmax.reduce(scores, axis=1)
    best = to_scores(best, "sigmoid") if is_sigmoid else best
    best = best if objects is None else best * objects
    chosen = np.flatnonzero(best >= options.min_score)  # NaN compares false
    classes = np.nan_to_num(scores[chosen], nan=-np.inf).argmax(axis=1)
    return (
        chosen if rows is None else rows[chosen],
        best[chosen].astype(np.float32),
        classes.astype(np.int64),
    )


def _corners(coords: Array, options: DetectionOptions, size: Size) -> Floats:
    """Convert boxes [K, 4] from the form that the options state to corners in pixels of the input."""
    coords = coords.astype(np.float32)
    if options.boxes.endswith("-yx"):
        coords = coords[:, [1, 0, 3, 2]]
    if options.boxes.startswith("centre"):
        half = coords[:, 2:] / 2
        coords = np.concatenate([coords[:, :2] - half, coords[:, :2] + half], axis=1)
    if options.unit == "shares":
        height, width = size
        coords = coords * np.array([width, height, width, height], np.float32)
    return coords


def _place_stated(coords: Array, chosen: Array, options: DetectionOptions, size: Size) -> Floats:
    return _corners(coords[chosen, :4], options, size)


def _place_on_grid(coords: Array, chosen: Array, options: DetectionOptions, size: Size) -> Floats:
    count = sum((size[0] // stride) * (size[1] // stride) for stride in options.strides)
    _check_count(len(coords), count, options, size)
    offsets, cells = coords[chosen].astype(np.float32), _grid_cells(size, options.strides)[chosen]
    centres = (offsets[:, :2] + cells[:, :2]) * cells[:, 2:]
    half = np.exp(offsets[:, 2:]) * cells[:, 2:] / 2
    return np.concatenate([centres - half, centres + half], axis=1)


def _check_count(boxes: int, count: int, options: DetectionOptions, size: Size) -> None:
    if boxes != count:
        grids, cells = ("grids of ", "have {} cells") if options.layout == "grid" else ("", "make {} anchors")
        raise DataError(
            f"task detection: there are {boxes} boxes, but {grids}strides {list(options.strides)} on an input"
            f" of {size[0]} x {size[1]} {cells.format(count)}"
        )


@lru_cache(8)
def _grid_cells(size: Size, strides: tuple[int, ...]) -> Floats:
    """Return column, row and stride of each cell, float32 [A, 3], the finest grid first, row by row."""
    grids = []
    for stride in strides:
        rows, columns = np.mgrid[: size[0] // stride, : size[1] // stride]
        grids.append(np.stack([columns.ravel(), rows.ravel(), np.full(rows.size, stride)], axis=1))
    return np.concatenate(grids).astype(np.float32)


def _place_on_anchors(coords: Array, chosen: Array, options: DetectionOptions, size: Size) -> Floats:
    count = sum(rows * columns * len(sides) for rows, columns, sides in _anchor_layers(size, options))
    _check_count(len(coords), count, options, size)
    raw = coords[chosen, :4].astype(np.float32) / [divisor or float(size[1]) for divisor in options.divisors]
    raw = raw[:, [1, 0, 3, 2]] if options.boxes.endswith("-yx") else raw
    anchors = make_anchors(size, options)[chosen]
    sides = np.exp(raw[:, 2:]) if options.sizes == "exponential" else raw[:, 2:]
    centred = np.concatenate([raw[:, :2] * anchors[:, 2:] + anchors[:, :2], sides * anchors[:, 2:]], axis=1)
    return _corners(centred, replace(options, boxes="centre", unit="shares"), size)


@lru_cache(8)
def make_anchors(size: Size, options: DetectionOptions) -> Floats:
    """Return centre x, centre y, width and height of each anchor as shares of the input, float32 [A, 4].

    Source: `SsdAnchorsCalculator` of MediaPipe (mediapipe/calculators/tflite/ssd_anchors_calculator.cc),
    which makes the anchors of TensorFlow's object detection API.
    """
    layers = []
    for rows, columns, sides in _anchor_layers(size, options):
        y, x = np.mgrid[:rows, :columns]
        centres = np.stack([(x + 0.5) / columns, (y + 0.5) / rows], axis=-1)[:, :, None]
        shape = (rows, columns, len(sides), 2)
        pairs = [np.broadcast_to(centres, shape), np.broadcast_to(np.array(sides), shape)]
        layers.append(np.concatenate(pairs, axis=-1).reshape(-1, 4))
    return np.concatenate(layers).astype(np.float32)


def _anchor_layers(
    size: Size, options: DetectionOptions
) -> Iterator[tuple[int, int, list[tuple[float, float]]]]:
    """Yield rows and columns of each grid, and the sides of its anchors; equal strides share a grid."""
    for stride in dict.fromkeys(options.strides):
        layers = [layer for layer, own in enumerate(options.strides) if own == stride]
        sides = [side for layer in layers for side in _anchor_sides(options, layer)]
        yield -(-size[0] // stride), -(-size[1] // stride), sides


def _anchor_sides(options: DetectionOptions, layer: int) -> list[tuple[float, float]]:
    """Return width and height of the anchors that a layer adds to each cell."""
    least, most = options.scales
    scales = [*np.linspace(least, most, len(options.strides)).tolist(), 1.0]
    if len(options.strides) == 1:
        scales[0] = (least + most) / 2
    pairs = [(scales[layer], aspect) for aspect in options.aspects]
    if options.interpolated:
        pairs.append((math.sqrt(scales[layer] * scales[layer + 1]), options.interpolated))
    if options.reduced and layer == 0:
        pairs = [(0.1, 1.0), (scales[0], 2.0), (scales[0], 0.5)]
    if options.unit_anchors:
        return [(1.0, 1.0)] * len(pairs)
    return [(scale * math.sqrt(aspect), scale / math.sqrt(aspect)) for scale, aspect in pairs]


def _read_listed(outputs: Outputs, options: DetectionOptions, size: Size) -> Boxes:
    name, coords = _boxes_apart(outputs, options)
    others = (other for other, value in outputs.items() if other != name and value.size == len(coords))
    scores = _get(outputs, options.scores_output or next(others, "of scores")).reshape(-1)
    classes = (
        _get(outputs, options.classes_output).reshape(-1) if options.classes_output else np.zeros(len(scores))
    )
    if not len(coords) == len(scores) == len(classes):
        raise DataError(
            f"task detection: there are {len(coords)} boxes, {len(scores)} scores and {len(classes)} classes"
        )
    if options.count_output:
        count = _get(outputs, options.count_output).reshape(-1)
        limit = int(np.clip(np.nan_to_num(count[:1].astype(np.float64)), 0, len(coords)).sum())
        coords, scores, classes = coords[:limit], scores[:limit], classes[:limit]
    return _list_boxes(coords, scores, classes, options, size)


def _read_rows(outputs: Outputs, options: DetectionOptions, size: Size) -> Boxes:
    columns = options.columns.split("-")
    starts = dict(
        zip(columns, np.cumsum([0, *(4 if name == "box" else 1 for name in columns)]), strict=False)
    )
    width = len(columns) + 3
    name = options.output or next(iter(outputs))
    rows = _matrix(outputs, name, 1)
    rows = rows if rows.shape[1] == width else rows.T
    if rows.shape[1] != width:
        raise DataError(
            f"task detection: output '{name}' is {list(outputs[name].shape)}, expected rows of {width} values"
            f" ({options.columns})"
        )
    coords = rows[:, starts["box"] : starts["box"] + 4]
    return _list_boxes(coords, rows[:, starts["score"]], rows[:, starts["class"]], options, size)


def _list_boxes(coords: Array, scores: Array, classes: Array, options: DetectionOptions, size: Size) -> Boxes:
    """Return the boxes of `min_score` and more, each with its class as a number; -1 is the class of none."""
    first = int(options.background == "first")
    numbers = np.nan_to_num(classes.astype(np.float64), nan=-1).clip(-1, _MAX_CLASS).round() - first
    chosen = (scores >= options.min_score) & (numbers >= 0)
    return Boxes(
        _corners(coords[chosen], options, size),
        scores[chosen].astype(np.float32),
        numbers[chosen].astype(np.int64),
    )


_KIND_OF_SCORES: Final = ("scores", "background")
LAYOUTS: Final[dict[str, OutputLayout]] = {
    "scored": OutputLayout(
        sentence="One output [N, 4 + C, A] or [N, A, 4 + C]: a box and a score for each class, as YOLOv8 and"
        " later.",
        options=("boxes", "unit", *_KIND_OF_SCORES),
        leading=4,
        find_corners=_place_stated,
    ),
    "objectness": OutputLayout(
        sentence="One output [N, A, 5 + C]: a box, the score of an object, one for each class, as YOLOv5 and"
        " YOLOv7.",
        options=("boxes", "unit", *_KIND_OF_SCORES),
        leading=5,
        find_corners=_place_stated,
    ),
    "grid": OutputLayout(
        sentence="The same with offsets from the cells of grids, and logarithms of sizes in cells, as YOLOX.",
        options=("strides", *_KIND_OF_SCORES),
        leading=5,
        find_corners=_place_on_grid,
    ),
    "apart": OutputLayout(
        sentence="An output [N, A, 4] of boxes and one [N, A, C] of scores, as DETR, RT-DETR and"
        " torchvision's heads.",
        options=("boxes", "unit", "scores_output", *_KIND_OF_SCORES),
        find_corners=_place_stated,
    ),
    "listed": OutputLayout(
        sentence="Outputs of boxes [N, K, 4], scores [N, K], classes [N, K] and perhaps their count, as"
        " torchvision, TFLite's detection post-process and TensorRT's EfficientNMS.",
        options=("boxes", "unit", "scores_output", "classes_output", "count_output", "background"),
        read=_read_listed,
    ),
    "rows": OutputLayout(
        sentence="One output of rows of 6 or 7 values: box, score, class and perhaps the image, as YOLOv10,"
        " YOLO26, YOLOv7 end to end, PaddleDetection and Caffe.",
        options=("boxes", "unit", "columns", "background"),
        read=_read_rows,
    ),
    "anchors": OutputLayout(
        sentence="Outputs of raw offsets [N, A, 4 or more] and of scores [N, A, C], as SSD and BlazeFace.",
        options=(
            "boxes",
            "scores_output",
            *_KIND_OF_SCORES,
            "strides",
            "scales",
            "aspects",
            "interpolated",
            "reduced",
            "unit_anchors",
            "divisors",
            "sizes",
        ),
        find_corners=_place_on_anchors,
    ),
}


def _decode(outputs: Outputs, options: DetectionOptions, context: Context) -> Decoded:
    placement = context.placement
    size = (0, 0) if placement is None else placement.input_size
    boxes = find_boxes(outputs, options, size, len(context.labels))
    corners = boxes.corners if placement is None else placement.to_picture(boxes.corners)
    return {
        "detections": [
            {
                "label": context.name_class(int(index)),
                "index": int(index),
                "score": round(float(score), 4),
                "box": [round(float(value), 1) for value in box],
            }
            for index, score, box in zip(boxes.classes, boxes.scores, corners, strict=True)
        ]
    }


DETECTION = register(
    "detection",
    DetectionOptions,
    "Labelled boxes with scores; a box is [x1, y1, x2, y2] in pixels of the picture.",
    title="object detection",
    entries="detections",
    has_boxes=True,
)(_decode)
