"""Metrics of a whole set: mAP of a small generated detector, AUC, recall@1."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.average_precision import MatchedBoxes
from edgekit_toolkit.evaluation.metrics import METRICS, SetMetric, find_metric
from edgekit_toolkit.evaluation.scoring import Scores, score_candidates
from edgekit_toolkit.samples.split import Part
from edgekit_toolkit.samples.truth import TrueBoxes, truth_array

Array = NDArray[Any]
SIZE = 64
BOXES = TaskChoice("detection", {"layout": "scored", "boxes": "corners"})


def draw_box(number: int) -> tuple[list[float], int]:
    rng = np.random.default_rng(number)
    x, y = rng.uniform(0, 40, 2)
    return [x, y, x + 20, y + 16], number % 3


def truth_of(number: int) -> TrueBoxes:
    corners, kind = draw_box(number)
    no = np.zeros(1, np.bool_)
    return TrueBoxes(
        corners=np.array([corners]),
        classes=np.array([kind]),
        ignored=no,
        crowds=no,
        input_size=(SIZE, SIZE),
    )


def detect(number: int, shift: float = 0.0) -> list[Array]:
    """Return [1, 20, 7] of corners and scores for 3 classes: the box of a picture, others with low scores."""
    corners, kind = draw_box(number)
    rows = np.zeros((1, 20, 7), np.float32)
    rows[0, 0, :4] = np.array(corners) + shift
    rows[0, 0, 4 + kind] = 0.9
    rows[0, 1:, :4] = np.random.default_rng([number, 1]).uniform(0, 20, (19, 4))
    rows[0, 1:, 2:4] += 20
    rows[0, 1:, 4] = 0.01
    return [rows]


def judge(
    candidates: Sequence[Any],
    metric: str = "auto",
    *,
    task: TaskChoice | None = BOXES,
    truths: Sequence[Any] | None = None,
    count: int = 24,
    source: Any = detect,
    probabilities: Array | None = None,
) -> Scores:
    """Return scores of models that map the number of a sample to their outputs."""
    labels = [truth_of(number) for number in range(count)] if truths is None else list(truths)

    def stream(_: int) -> Iterator[tuple[dict[str, Array], Array | None]]:
        for number, label in enumerate(labels):
            yield {"x": np.full((1, 1), number, np.float32)}, truth_array([label])

    def runner(model: Any) -> Any:
        return lambda feeds: model(int(feeds["x"][0, 0]))

    return score_candidates(
        runner(source),
        [runner(candidate) for candidate in candidates],
        Part(
            kind="user",
            count=len(labels),
            sha256=None,
            labelled=True,
            stream=stream,
            truth=type(labels[0]),
            probabilities=probabilities,
        ),
        metric,
        inputs=(TensorSpec("x", "float32", ("N", 1)),),
        outputs=(TensorSpec("y", "float32", ("N", *source(0)[0].shape[1:])),),
        alone=True,
        task=task,
        progress=lambda *_: None,
    )


def test_weighted_samples_count_as_often_in_the_average_precision() -> None:
    def judge_in(numbers: Sequence[int], **options: Any) -> Scores:
        models = [lambda index: detect(numbers[index], shift=0 if numbers[index] < 2 else 6)]
        truths = [truth_of(number) for number in numbers]
        return judge(models, truths=truths, source=lambda index: detect(numbers[index]), **options)

    numbers, repeated = [0, 1, 2, 3], [0, 1, 2, 2, 2, 3, 3, 3]  # too few to hold some back
    weighted = judge_in(numbers, probabilities=np.array([0.3, 0.3, 0.1, 0.1])).choosing.scores[0]
    plain, copied = (judge_in(each).choosing.scores[0] for each in (numbers, repeated))
    assert weighted < plain - 0.05
    assert weighted == pytest.approx(copied, abs=0.02)


def test_samples_with_boxes_are_judged_by_the_mean_average_precision() -> None:
    scores = judge([detect, lambda number: detect(number, shift=2)])

    assert scores.metric.name == "map50_95"
    assert scores.choosing.baseline == scores.choosing.scores[0] == pytest.approx(1)
    assert scores.choosing.scores[1] == pytest.approx(0.3)  # an overlap of 0.65 is a hit up to 0.6


def test_overlap_of_one_half_is_enough_for_map50() -> None:
    scores = judge([lambda number: detect(number, shift=2), lambda number: detect(number + 1)], "map50")

    assert scores.choosing.scores[0] == pytest.approx(1)
    assert scores.choosing.scores[1] < 0.2
    assert scores.choosing.drops[0].points == 0


def test_boxes_below_the_users_score_count() -> None:
    task = TaskChoice("detection", {"layout": "scored", "boxes": "corners", "min_score": 0.95})

    assert judge([detect], "map50", task=task).choosing.scores[0] == pytest.approx(1)


def test_only_matches_are_held_of_a_sample() -> None:
    metric = find_metric("map50", {"y": detect(0)[0]}, labelled=True, truth=TrueBoxes, task=BOXES)

    assert isinstance(metric, SetMetric)
    entry = metric.reduce({"y": detect(0)[0]}, truth_of(0))
    assert isinstance(entry, MatchedBoxes)
    assert entry.hits[0].tolist() == [True] + [False] * (len(entry.scores) - 1)


def test_drop_of_a_detector_has_an_interval() -> None:
    broken = judge([lambda number: detect(number, shift=0 if number % 4 else 9)], "map50", count=48)
    drop = broken.stated.drops[0]

    assert drop.interval().low < drop.points < drop.interval().high


def test_candidate_with_nan_boxes_is_spoiled() -> None:
    scores = judge([lambda number: [detect(number)[0] * np.float32(np.nan)]], "map50")

    assert scores.spoiled[0].startswith("output 'y' is NaN or infinite on 24 of 24")


def test_boxes_without_a_task_are_compared_with_the_float_model_and_a_note_says_so() -> None:
    scores = judge([detect], task=None)

    assert scores.metric.name not in ("map50", "map50_95")
    assert "--task detection:layout=" in str(getattr(scores.metric, "note", ""))


@pytest.mark.parametrize("task", [None, TaskChoice("classification", {})])
def test_map_without_a_layout_is_an_error_that_says_how(task: TaskChoice | None) -> None:
    with pytest.raises(DataError, match="--task detection:layout="):
        judge([detect], "map50", task=task)


def test_map_of_samples_with_classes_is_an_error_that_says_what_is_needed() -> None:
    with pytest.raises(DataError, match="needs true boxes: give --eval a data set in the format of YOLO"):
        judge([detect], "map50", truths=[0] * 20)


def test_accuracy_of_samples_with_boxes_is_an_error() -> None:
    with pytest.raises(DataError, match="needs labels: add an int64 array"):
        judge([detect], "top1")


def rows_for(name: str, rows: Array, labels: list[int]) -> float:
    metric = METRICS[name]
    assert isinstance(metric, SetMetric)
    reduced = [metric.reduce({"y": row[np.newaxis]}, label) for row, label in zip(rows, labels, strict=True)]
    return metric.score(reduced, reduced, np.array(labels))


def test_auc_is_the_chance_of_a_right_order_with_ties_as_half() -> None:
    scores = np.array([[0.1], [0.4], [0.4], [0.8]])

    assert rows_for("auc", scores, [0, 0, 1, 1]) == pytest.approx((1 + 0.5 + 1 + 1) / 4)
    assert rows_for("auc", np.hstack([1 - scores, scores]), [0, 0, 1, 1]) == pytest.approx(3.5 / 4)


def test_auc_of_one_class_has_no_score() -> None:
    with pytest.raises(DataError, match="samples of two"):
        rows_for("auc", np.array([[0.1], [0.4]]), [1, 1])


def test_recall_counts_samples_whose_nearest_other_has_their_class() -> None:
    rows = np.array([[1, 0], [2, 0.1], [0, 1], [0.1, 3], [0.05, 1], [-1, -1]])

    assert rows_for("recall1", rows, [0, 0, 1, 1, 0, 2]) == pytest.approx(3 / 5)  # a class of its own is out


def test_recall_without_pairs_has_no_score() -> None:
    with pytest.raises(DataError, match="two samples of a class"):
        rows_for("recall1", np.eye(3), [0, 1, 2])


@pytest.mark.parametrize("name", ["auc", "recall1"])
def test_metric_of_rows_refuses_maps(name: str) -> None:
    with pytest.raises(DataError, match=f"metric '{name}' needs"):
        find_metric(name, {"y": np.zeros((4, 3, 8), np.float32)}, labelled=True)
