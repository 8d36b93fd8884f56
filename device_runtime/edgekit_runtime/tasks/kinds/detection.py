"""Detection: labelled boxes, in pixels of the picture.

How boxes lie in the outputs is a layout, a record in the table `LAYOUTS`:

    outputs [1, 8400, 85] -> layout.read -> Boxes in pixels of the input, scores of min_score and more
        -> choose_best (non-maximum suppression) -> Placement.to_picture -> {"detections": [...]}
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.tasks.boxes import Boxes, choose_best
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, Task, register
from edgekit_runtime.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionOptions:
    """Options of `detection`.

    Attributes:
        layout: where the boxes are, a key of `LAYOUTS`.
        output: name of the output with the boxes; empty for the first output.
        boxes: `centre` for centre and size, `corners` for two corners.
        unit: `pixels` of the input, or `shares` of its width and height.
        strides: pixels of the input for one cell of each grid, of the layout `grid`.
        min_score: boxes of a lower score are left out.
        overlap: of two boxes of a class that overlap more (intersection over union) the worse is left out;
            1 leaves all, for a model that has done so itself.
        max_boxes: most boxes in an answer.
    """

    layout: Literal["scored", "objectness", "grid"] = "scored"
    output: str = ""
    boxes: Literal["centre", "corners"] = "centre"
    unit: Literal["pixels", "shares"] = "pixels"
    strides: tuple[int, ...] = (8, 16, 32)
    min_score: Annotated[float, Range(0, 1)] = 0.25
    overlap: Annotated[float, Range(0, 1)] = 0.45
    max_boxes: Annotated[int, Range(1, 1000)] = 100


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """One arrangement of boxes in outputs.

    Attributes:
        sentence: shapes and meaning, for documents.
        read: (outputs of one sample, options, (height, width) of the input) -> boxes of `min_score` and more
            in pixels of the input.
    """

    sentence: str
    read: Callable[[Outputs, DetectionOptions, tuple[int, int]], Boxes]


def find_boxes(outputs: Outputs, options: DetectionOptions, input_size: tuple[int, int]) -> Boxes:
    """Return the boxes of one sample after suppression, in pixels of the input, the best first.

    Args:
        outputs: outputs of one sample, each with the first axis 1.
        options: options of the task.
        input_size: height and width of the input.

    Raises:
        DataError: an output is missing, or has another shape.
    """
    boxes = LAYOUTS[options.layout].read(outputs, options, input_size)
    return choose_best(boxes, overlap=options.overlap, max_boxes=options.max_boxes)


def _rows(outputs: Outputs, options: DetectionOptions) -> Array:
    """Return the output with the boxes as rows [A, values], whichever of its axes counts them."""
    name = options.output or next(iter(outputs))
    if name not in outputs:
        raise DataError(f"task detection: there is no output '{name}', the model has {', '.join(outputs)}")
    value = outputs[name]
    rows = value.reshape(value.shape[-2:]) if value.ndim >= 2 and value.size else value
    if rows.ndim != 2 or min(rows.shape) < 5:
        raise DataError(
            f"task detection: output '{name}' is {list(value.shape)}, expected [1, boxes, values]"
        )
    return rows if rows.shape[0] >= rows.shape[1] else rows.T


def _best_classes(
    scores: NDArray[np.float32], factors: NDArray[np.float32] | None, min_score: float
) -> tuple[NDArray[np.intp], NDArray[np.float32], NDArray[np.int64]]:
    """Return the rows whose best class has `min_score` or more, with that score and class.

    Args:
        scores: [A, C].
        factors: [A], by which the scores are multiplied, 0..1; None for 1.
        min_score: lower scores are left out.
    """
    rows = np.arange(len(scores)) if factors is None else np.flatnonzero(factors >= min_score)
    scores = scores[rows] if factors is not None else scores
    classes = np.nan_to_num(scores, nan=-np.inf).argmax(axis=1)
    best = scores[np.arange(len(rows)), classes]
    if factors is not None:
        best = best * factors[rows]
    is_over = best >= min_score
    return rows[is_over], np.asarray(best[is_over], np.float32), classes[is_over].astype(np.int64)


def _corners(
    places: NDArray[np.float32], options: DetectionOptions, size: tuple[int, int]
) -> NDArray[np.float32]:
    """Return boxes [K, 4] as the options state them as corners in pixels of the input."""
    places = places.astype(np.float32)
    if options.boxes == "centre":
        half = places[:, 2:] / 2
        places = np.concatenate([places[:, :2] - half, places[:, :2] + half], axis=1)
    if options.unit == "shares":
        height, width = size
        places = places * np.array([width, height, width, height], np.float32)
    return places


def _read_scored(outputs: Outputs, options: DetectionOptions, size: tuple[int, int]) -> Boxes:
    rows = _rows(outputs, options)
    chosen, scores, classes = _best_classes(rows[:, 4:], None, options.min_score)
    return Boxes(_corners(rows[chosen, :4], options, size), scores, classes)


def _read_objectness(outputs: Outputs, options: DetectionOptions, size: tuple[int, int]) -> Boxes:
    rows = _rows(outputs, options)
    chosen, scores, classes = _best_classes(rows[:, 5:], rows[:, 4], options.min_score)
    return Boxes(_corners(rows[chosen, :4], options, size), scores, classes)


def _read_grid(outputs: Outputs, options: DetectionOptions, size: tuple[int, int]) -> Boxes:
    rows = _rows(outputs, options)
    cells = _grid_cells(size, options.strides)
    if len(cells) != len(rows):
        raise DataError(
            f"task detection: there are {len(rows)} boxes, but grids of strides {list(options.strides)} on an"
            f" input of {size[0]} x {size[1]} have {len(cells)} cells"
        )
    chosen, scores, classes = _best_classes(rows[:, 5:], rows[:, 4], options.min_score)
    places, cells = rows[chosen, :4].astype(np.float32), cells[chosen]
    centres = (places[:, :2] + cells[:, :2]) * cells[:, 2:]
    with np.errstate(over="ignore"):
        half = np.exp(places[:, 2:]) * cells[:, 2:] / 2
    return Boxes(np.concatenate([centres - half, centres + half], axis=1), scores, classes)


def _grid_cells(size: tuple[int, int], strides: Sequence[int]) -> NDArray[np.float32]:
    """Return column, row and stride of each cell, float32 [A, 3], the finest grid first, row by row."""
    grids = []
    for stride in strides:
        rows, columns = np.mgrid[: size[0] // stride, : size[1] // stride]
        grids.append(np.stack([columns.ravel(), rows.ravel(), np.full(rows.size, stride)], axis=1))
    return np.concatenate(grids).astype(np.float32)


LAYOUTS: Final[dict[str, BoxLayout]] = {
    "scored": BoxLayout(
        "One output [N, 4 + C, A] or [N, A, 4 + C]: a box and a score for each class, as YOLOv8 and later.",
        _read_scored,
    ),
    "objectness": BoxLayout(
        "One output [N, A, 5 + C]: a box, the score of an object, and one for each class, as YOLOv5.",
        _read_objectness,
    ),
    "grid": BoxLayout(
        "The same with offsets from the cells of grids, and logarithms of sizes in cells, as YOLOX.",
        _read_grid,
    ),
}


def _decode(outputs: Outputs, options: DetectionOptions, context: Context) -> Decoded:
    placement = context.placement
    size = (0, 0) if placement is None else (placement.input_height, placement.input_width)
    boxes = find_boxes(outputs, options, size)
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
    Task(
        name="detection",
        title="object detection",
        sentence="Labelled boxes with scores; a box is [x1, y1, x2, y2] in pixels of the picture.",
        options=DetectionOptions,
        decode=_decode,
    )
)
