"""Average precision: the figures of pycocotools, and what boxes a score may not see."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.coco_figures import FIGURES, SIZE

from edgekit_runtime.errors import DataError
from edgekit_runtime.tasks.boxes import Boxes
from edgekit_toolkit.evaluation.average_precision import MatchedBoxes, match_boxes, mean_precisions
from edgekit_toolkit.samples.truth import TrueBoxes


def corners_of(boxes: list[list[float]]) -> NDArray[np.float64]:
    array = np.array(boxes, np.float64).reshape(-1, 4)
    return np.concatenate([array[:, :2], array[:, :2] + array[:, 2:]], axis=1)


def matches_of(picture: dict[str, Any]) -> MatchedBoxes:
    crowds = np.array(picture["crowds"], np.bool_)
    truth = TrueBoxes(
        corners=corners_of(picture["truths"]),
        classes=np.array(picture["kinds"], np.int64),
        ignored=np.array(picture.get("ignored", crowds), np.bool_),
        crowds=crowds,
        input_size=(SIZE, SIZE),
    )
    detections = Boxes(
        corners_of(picture["boxes"]).astype(np.float32),
        np.array(picture["scores"], np.float32),
        np.array(picture["classes"], np.int64),
    )
    return match_boxes(detections, truth)


@pytest.mark.parametrize("case", json.loads(FIGURES.read_text()))
def test_random_detections_score_as_in_pycocotools(case: dict[str, Any]) -> None:
    scores = mean_precisions([matches_of(picture) for picture in case["pictures"]])

    assert scores == pytest.approx(case["expected"], abs=1e-6)


def draw(**changes: Any) -> dict[str, Any]:
    base = {"truths": [[10, 10, 20, 20]], "kinds": [0], "crowds": [False]}
    return {**base, "boxes": [[10, 10, 20, 20]], "scores": [0.9], "classes": [0], **changes}


def test_each_true_box_found_exactly_scores_one() -> None:
    assert mean_precisions([matches_of(draw())]) == pytest.approx(np.ones(10))


def test_detection_of_another_class_is_no_hit() -> None:
    assert mean_precisions([matches_of(draw(classes=[1]))]) == pytest.approx(np.zeros(10))


def test_second_detection_of_a_box_counts_as_wrong() -> None:
    twice = draw(boxes=[[10, 10, 20, 20]] * 2, scores=[0.9, 0.8], classes=[0, 0])
    other = draw(scores=[0.5])

    # Hits at ranks 1 and 3: precision 1 up to half of the recall, 2/3 beyond.
    assert mean_precisions([matches_of(twice), matches_of(other)])[0] == pytest.approx(
        (51 + 50 * 2 / 3) / 101
    )


def test_difficult_box_counts_neither_as_missed_nor_as_wrong() -> None:
    difficult = draw(
        truths=[[10, 10, 20, 20], [60, 60, 20, 20]],
        kinds=[0, 0],
        crowds=[False, False],
        ignored=[False, True],
        boxes=[[60, 60, 20, 20], [10, 10, 20, 20]],
        scores=[0.9, 0.8],
        classes=[0, 0],
    )

    assert mean_precisions([matches_of(difficult)]) == pytest.approx(np.ones(10))


def test_set_without_a_true_box_has_no_score() -> None:
    empty = matches_of(draw(truths=[], kinds=[], crowds=[]))

    with pytest.raises(DataError, match="no sample has a box"):
        mean_precisions([empty])


def test_model_without_a_detection_scores_zero() -> None:
    nothing = matches_of(draw(boxes=[], scores=[], classes=[]))

    assert mean_precisions([nothing]) == pytest.approx(np.zeros(10))
