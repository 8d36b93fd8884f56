"""Task detection: layouts are read as boxes in pixels; outputs that mean nothing end in a clear answer."""

import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tasks.boxes import Boxes, choose_best, find_overlaps
from edgekit_runtime.tasks.kinds.detection import LAYOUTS, DetectionOptions, find_boxes, make_anchors
from edgekit_runtime.tasks.task import Context, read_task

Array = NDArray[Any]
Outputs = Mapping[str, Array]
SIZE = (64, 96)  # height and width
CORNERS = np.array([[8, 8, 40, 24], [48, 16, 80, 56]], np.float32)
SCORES = np.array([0.9, 0.6], np.float32)
CLASSES = np.array([2, 0])
ANCHORS = {"layout": "anchors", "strides": (16,), "reduced": False, "aspects": (1.0,), "interpolated": 0.0}


def centred(boxes: Array) -> Array:
    return np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)


def one_hot(count: int = 3, zero: float = 0.0) -> Array:
    """Scores of each class [2, count]."""
    scores = np.full((2, count), zero, np.float32)
    scores[[0, 1], CLASSES] = SCORES
    return scores


def with_nothing(rows: Array, count: int = 20) -> Array:
    """Rows behind which others have neither boxes nor scores, [1, count, values]."""
    padded = np.zeros((1, count, rows.shape[1]), np.float32)
    padded[0, : len(rows)] = rows
    return padded


def logit(shares: Array) -> Array:
    return np.log(shares / (1 - shares))


def grid_outputs() -> Outputs:
    """Offsets from cells and logarithms of sizes, for grids of 8, 16 and 32 pixels."""
    cells = [(SIZE[0] // stride) * (SIZE[1] // stride) for stride in (8, 16, 32)]
    rows = np.zeros((1, sum(cells), 8), np.float32)
    centres = centred(CORNERS)
    for index, box in enumerate(centres):
        column, row = int(box[0] // 8), int(box[1] // 8)
        place = rows[0, row * (SIZE[1] // 8) + column]
        place[:4] = [box[0] / 8 - column, box[1] / 8 - row, *np.log(box[2:] / 8)]
        place[4] = 1
        place[5:] = one_hot()[index]
    return {"y": rows}


def anchor_outputs(*, y_first: bool = False) -> Outputs:
    """Offsets from one square anchor of 0.575 for each cell of 16 pixels."""
    anchors = make_anchors(SIZE, DetectionOptions(**ANCHORS))
    raw, scores = np.zeros((len(anchors), 16), np.float32), np.full((len(anchors), 3), -9, np.float32)
    boxes = centred(CORNERS) / [SIZE[1], SIZE[0], SIZE[1], SIZE[0]]
    for index, box in enumerate(boxes):
        nearest = np.abs(anchors[:, :2] - box[:2]).sum(axis=1).argmin()
        offset = 10 * (box[:2] - anchors[nearest, :2]) / anchors[nearest, 2:]
        raw[nearest, :4] = [*offset, *(5 * np.log(box[2:] / anchors[nearest, 2:]))]
        scores[nearest] = logit(one_hot(zero=1e-4)[index])
    raw = raw[:, [1, 0, 3, 2, *range(4, 16)]] if y_first else raw
    return {"raw": raw[None], "scores": scores[None]}


SHARES = np.array([SIZE[1], SIZE[0], SIZE[1], SIZE[0]], np.float32)
DETR = np.full((1, 20, 4), -9, np.float32)
DETR[..., 3] = 9  # no object
DETR[0, :2] = np.log([[0.02, 0.02, 0.9, 0.06], [0.6, 0.2, 0.1, 0.1]])
LISTED = {
    "boxes": with_nothing((CORNERS / SHARES)[:, [1, 0, 3, 2]]),
    "classes": with_nothing(CLASSES[:, None])[..., 0],
    "scores": with_nothing(SCORES[:, None])[..., 0],
    "count": np.array([2], np.float32),
}
NAMES = {"scores_output": "scores", "classes_output": "classes", "count_output": "count"}
ROWS = {"box": CORNERS, "score": SCORES[:, None], "class": CLASSES[:, None], "batch": np.zeros((2, 1))}
CASES: dict[str, tuple[dict[str, Any], Outputs]] = {
    "scored": ({}, {"y": with_nothing(np.hstack([centred(CORNERS), one_hot()])).transpose(0, 2, 1)}),
    "scored rows": ({"boxes": "corners"}, {"y": with_nothing(np.hstack([CORNERS, one_hot()]))}),
    "logits": (
        {"boxes": "corners", "scores": "sigmoid"},
        {"y": with_nothing(np.hstack([CORNERS, logit(one_hot(zero=1e-3))])) - 0},
    ),
    "objectness": (
        {"layout": "objectness"},
        {"y": with_nothing(np.hstack([centred(CORNERS), SCORES[:, None], one_hot() > 0]))},
    ),
    "grid": ({"layout": "grid"}, grid_outputs()),
    "apart": (
        {"layout": "apart", "boxes": "corners", "background": "first"},
        {"boxes": with_nothing(CORNERS), "scores": with_nothing(np.hstack([np.zeros((2, 1)), one_hot()]))},
    ),
    "DETR": (
        {"layout": "apart", "output": "boxes", "unit": "shares", "scores": "softmax", "background": "last"},
        {"logits": DETR, "boxes": with_nothing(centred(CORNERS / SHARES))},
    ),
    "TFLite": ({"layout": "listed", "boxes": "corners-yx", "unit": "shares", **NAMES}, LISTED),
    "torchvision": (
        {"layout": "listed", "boxes": "corners", "background": "first", **NAMES, "count_output": ""},
        {"boxes": CORNERS, "classes": CLASSES + 1, "scores": SCORES},
    ),
    "SSD": (
        {**ANCHORS, "boxes": "centre-yx", "scores": "sigmoid", "output": "raw"},
        anchor_outputs(y_first=True),
    ),
    "BlazeFace": ({**ANCHORS, "scores": "sigmoid"}, anchor_outputs()),
    **{
        columns: (
            {"layout": "rows", "columns": columns, "boxes": "corners"},
            {"y": with_nothing(np.hstack([ROWS[name] for name in columns.split("-")]))},
        )
        for columns in ("box-score-class", "class-score-box", "batch-box-class-score")
    },
}


@cases("case", CASES)
def test_boxes_of_each_layout_are_corners_in_pixels_of_the_input(case: str) -> None:
    options, outputs = CASES[case]
    options = {"min_score": 0.55, **options}
    boxes = find_boxes(outputs, DetectionOptions(**options), SIZE)
    np.testing.assert_allclose(boxes.corners, CORNERS, atol=1e-3)
    np.testing.assert_allclose(boxes.scores, SCORES, atol=0.02)
    assert boxes.classes.tolist() == CLASSES.tolist()


def test_every_layout_has_a_case() -> None:
    assert {options.get("layout", "scored") for options, _ in CASES.values()} == set(LAYOUTS)


def test_answer_has_labels_and_pixels_of_the_picture() -> None:
    task, options = read_task(TaskChoice("detection", {"layout": "scored", "boxes": "corners"}))
    placement = Placement.of(192, 128).scaled_to(96, 64)
    answer = task.decode(CASES["scored rows"][1], options, Context(labels=("cat",), placement=placement))
    assert answer == {
        "detections": [
            {"label": "2", "index": 2, "score": 0.9, "box": [16, 16, 80, 48]},  # labels are too few
            {"label": "cat", "index": 0, "score": 0.6, "box": [96, 32, 160, 112]},
        ]
    }


def test_anchors_are_those_of_mediapipe() -> None:
    """896 of a short-range face detector: two and six for each cell, all as large as the input."""
    options = DetectionOptions(strides=(8, 16, 16, 16), aspects=(1.0,), reduced=False, unit_anchors=True)
    anchors = make_anchors((128, 128), options)
    assert len(anchors) == 896
    assert anchors[[0, 1, 2, -1]].tolist() == [
        [0.03125, 0.03125, 1, 1],
        [0.03125, 0.03125, 1, 1],
        [0.09375, 0.03125, 1, 1],
        [0.9375, 0.9375, 1, 1],
    ]


def test_anchors_of_ssd_have_three_sizes_in_the_first_layer() -> None:
    anchors = make_anchors((300, 300), DetectionOptions(strides=(16, 32, 64, 128, 256, 512)))
    assert len(anchors) == 1917
    np.testing.assert_allclose(
        anchors[:3, 2:], [[0.1, 0.1], [0.2 * 2**0.5, 0.2 / 2**0.5], [0.2 / 2**0.5, 0.2 * 2**0.5]], rtol=1e-6
    )
    np.testing.assert_allclose(anchors[-1, 2:], [(0.95 * 1) ** 0.5] * 2, rtol=1e-6)


def slow_choice(boxes: Boxes, overlap: float, count: int) -> list[int]:
    """Greedy suppression, a pair at a time."""
    chosen: list[int] = []
    for index in np.argsort(-boxes.scores, kind="stable").tolist():
        alike = [other for other in chosen if boxes.classes[other] == boxes.classes[index]]
        overlaps = find_overlaps(boxes.corners[index : index + 1], boxes.corners[alike])
        if not (overlaps > overlap).any():
            chosen.append(index)
    return chosen[:count]


@pytest.mark.parametrize(("count", "classes"), [(0, 1), (1, 1), (128, 1), (129, 3), (700, 2)])
def test_suppression_in_blocks_chooses_as_one_box_after_the_other(count: int, classes: int) -> None:
    draw = np.random.default_rng(count)
    corner = draw.uniform(0, 100, (count, 2))
    corners = np.concatenate([corner, corner + draw.uniform(5, 60, (count, 2))], axis=1).astype(np.float32)
    boxes = Boxes(corners, draw.uniform(0, 1, count).astype(np.float32), draw.integers(0, classes, count))
    for most in (1, 40, 1000):
        best = choose_best(boxes, overlap=0.4, max_boxes=most)
        assert best.corners.tolist() == corners[slow_choice(boxes, 0.4, most)].tolist()


HOSTILE_VALUES = [np.nan, np.inf, -np.inf, 3e38, -1.0]


@cases("value", HOSTILE_VALUES)
@cases("case", CASES)
def test_hostile_values_give_an_answer_that_json_holds(case: str, value: float) -> None:
    options, outputs = CASES[case]
    task, parsed = read_task(TaskChoice("detection", json.loads(json.dumps(options))))
    draw = np.random.default_rng(1)
    for share in (1.0, 0.3):
        hostile = {}
        for name, output in outputs.items():
            changed = output.astype(np.float32)
            changed[draw.uniform(0, 1, output.shape) < share] = value
            hostile[name] = changed
        context = Context(labels=("a", "b", "c"), placement=Placement.of(SIZE[1], SIZE[0]))
        answer = task.decode(hostile, parsed, context)
        json.dumps(answer, allow_nan=False)
        for detection in answer["detections"]:  # type: ignore[union-attr]
            x1, y1, x2, y2 = detection["box"]  # type: ignore[index]
            assert 0 <= x1 <= x2 <= SIZE[1]
            assert 0 <= y1 <= y2 <= SIZE[0]


@pytest.mark.parametrize(
    ("layout", "background", "classes"),
    [("scored", "none", 8), ("scored", "last", 8), ("objectness", "none", 7)],
)
@pytest.mark.parametrize("is_turned", [False, True])
def test_labels_tell_the_axis_of_boxes_where_there_are_fewer_than_values(
    layout: str, background: str, classes: int, *, is_turned: bool
) -> None:
    values = (4 if layout == "scored" else 5) + classes + (background != "none")
    rows = np.zeros((1, 6, values), np.float32)
    rows[0, :, :4], rows[0, :, 4:] = CORNERS[0], 0.1
    rows[0, 3, [4, values - 1 - (background == "last")]] = 0.9
    outputs = {"y": rows.swapaxes(1, 2) if is_turned else rows}
    task, options = read_task(
        TaskChoice("detection", {"layout": layout, "background": background, "boxes": "corners"})
    )
    context = Context(labels=tuple(map(str, range(classes))), placement=Placement.of(SIZE[1], SIZE[0]))
    answer: Any = task.decode(outputs, options, context)
    assert answer["detections"][0]["box"] == CORNERS[0].tolist()
    with pytest.raises(DataError, match=r"longer axis .* was taken for the boxes; labels for all classes"):
        task.decode(outputs, options, Context(placement=context.placement))


@pytest.mark.parametrize("case", ["scored", "torchvision", "box-score-class", "apart"])
def test_no_boxes_give_an_empty_answer(case: str) -> None:
    options, outputs = CASES[case]
    axis = 2 if case == "scored" else 0 if case == "torchvision" else 1
    empty = {name: value.take(range(0), axis=axis) for name, value in outputs.items()}
    assert len(find_boxes(empty, DetectionOptions(**options), SIZE)) == 0


def test_boxes_without_an_area_or_with_an_infinite_one_are_left_out() -> None:
    corners = np.array(
        [[5, 5, 5, 9], [9, 9, 5, 5], [0, 0, np.inf, 9], [-3e38, -3e38, 3e38, 3e38], [1, 1, 2, 2]], np.float32
    )
    boxes = Boxes(corners, np.full(5, 0.5, np.float32), np.zeros(5, np.int64))
    assert choose_best(boxes, overlap=0.5, max_boxes=9).corners.tolist() == [[1, 1, 2, 2]]


def test_a_hundred_thousand_boxes_take_no_more_memory_than_a_few_copies() -> None:
    draw = np.random.default_rng(3)
    count = 100_000
    corner = draw.uniform(0, 600, (count, 2))
    rows = np.concatenate([corner, corner + 50, draw.uniform(0.3, 1, (count, 6))], axis=1)
    outputs = {"y": rows[None].astype(np.float32)}
    tracemalloc.start()
    boxes = find_boxes(outputs, DetectionOptions(boxes="corners", max_boxes=300), (640, 640))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(boxes) == 300
    assert peak_bytes < 6 * outputs["y"].nbytes


@pytest.mark.parametrize(
    ("options", "outputs", "message"),
    [
        ({"output": "z"}, CASES["scored"][1], "no output 'z', the model has y"),
        ({}, {"y": np.zeros(9, np.float32)}, r"output 'y' is \[9\], expected \[1, boxes, values\]"),
        ({}, {"y": np.zeros((2, 6, 40), np.float32)}, "of one sample"),
        ({}, {"y": np.zeros((1, 4, 40), np.float32)}, "needs 5 values for each box or more, there are 4"),
        (
            {"layout": "grid"},
            {"y": np.zeros((1, 40, 8), np.float32)},
            "40 boxes, but grids .* have 126",
        ),
        ({"layout": "rows"}, {"y": np.zeros((1, 40, 8), np.float32)}, "expected rows of 6 values"),
        (
            ANCHORS,
            {"a": np.zeros((1, 40, 4), np.float32), "s": np.zeros((1, 40, 3), np.float32)},
            "40 boxes, but strides .* make 24 anchors",
        ),
        ({"layout": "apart"}, {"a": np.zeros((1, 40, 4), np.float32)}, "no output 'of scores'"),
        (
            {"layout": "apart", "scores_output": "s"},
            {"b": np.zeros((1, 40, 4), np.float32), "s": np.zeros((1, 9, 4), np.float32)},
            "40 boxes, but scores for 9",
        ),
        ({"layout": "listed", **NAMES}, {**LISTED, "scores": np.zeros((1, 3))}, "20 boxes, 3 scores and 20"),
    ],
)
def test_outputs_of_another_layout_are_refused_with_what_was_expected(
    options: dict[str, Any], outputs: Outputs, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        find_boxes(outputs, DetectionOptions(**options), SIZE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "yolo"}, "layout is 'yolo', expected one of scored"),
        ({"strides": [8, 0]}, "strides is"),
        ({"strides": [8] * 17}, "expected 1 to 16"),
        ({"aspects": [1.0] * 17}, "17 aspects"),
        ({"divisors": [1.0]}, "4 divisors"),
        ({"min_score": 2}, "min_score is 2, expected 0 to 1"),
        ({"treshold": 0.5}, "unknown setting 'treshold'"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_task(TaskChoice("detection", options), DataError)
