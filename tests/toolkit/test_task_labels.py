"""Labels of another number than the model's classes, and detectors with fewer boxes than values."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.test_task_proposal import COUNT, evidence

from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.detections import layout_of_task
from edgekit_toolkit.evaluation.metrics import find_metric
from edgekit_toolkit.samples.truth import TrueBoxes, truth_array
from edgekit_toolkit.tasks.labels import find_label_problems
from edgekit_toolkit.tasks.proposal import TaskDecision, decide_task

SCORED = TaskChoice("detection", {"layout": "scored", "boxes": "centre"})
NAMES = tuple(f"name{number}" for number in range(90))


@cases(
    ("choice", "shape", "labels", "message"),
    [
        (SCORED, (1, 84, 8400), 80, None),
        (SCORED, (1, 84, 8400), 3, "3 labels, and the model has 80 classes.*classes 3 to 79 by number"),
        (
            SCORED,
            (1, 8400, 84),
            85,
            "85 labels, and the model has 80 classes: the last 5 .*name80, name81, name82, ..",
        ),
        (
            TaskChoice("detection", {"layout": "grid"}),
            (1, 3549, 85),
            79,
            "79 labels.*80 classes.*class 79 by its",
        ),
        (TaskChoice("detection", {"layout": "rows"}), (1, 300, 6), 80, None),
        (TaskChoice("classification"), ("N", 1000), 10, "10 labels, and the model has 1000 classes"),
        (
            TaskChoice("classification", {"background": 1}),
            ("N", 81),
            80,
            "first one is taken for the background",
        ),
        (TaskChoice("segmentation"), (1, 21, 64, 64), 20, "20 labels, and the model has 21 classes"),
        (TaskChoice("segmentation"), (1, 1, 64, 64), 2, "2 labels, but no output"),
        (TaskChoice("keypoints"), (1, 51), 17, None),
        (None, (1, 7), 3, "3 labels, but no output has an axis of 3 classes"),
    ],
)
def test_labels_are_compared_with_the_classes_of_the_task(
    choice: TaskChoice | None, shape: tuple[int | str, ...], labels: int, message: str | None
) -> None:
    outputs = [TensorSpec("y", "float32", shape)]
    task = TaskDecision(choice, "", is_proposed=True)
    problems = list(find_label_problems(NAMES[:labels], task, outputs))
    assert len(problems) == (message is not None)
    assert message is None or re.search(message, problems[0])


@pytest.mark.parametrize(
    ("shape", "labels", "is_noted"),
    [((1, 84, 8400), 0, False), ((1, 84, 100), 0, True), ((1, 84, 100), 80, False), ((1, 84, 84), 80, True)],
)
def test_axes_of_like_lengths_are_noted_without_labels(
    shape: tuple[int, ...], labels: int, is_noted: bool
) -> None:
    outputs = [TensorSpec("y", "float32", shape)]
    notes = find_label_problems(NAMES[:labels], TaskDecision(SCORED, ""), outputs)
    assert ["which axis" in note for note in notes] == [True] * is_noted


@pytest.fixture(scope="module")
def few_boxes() -> Any:
    """Return evidence of a detector with 24 boxes of 40 classes, of which each sample shows one."""
    draw = np.random.default_rng(3)
    rows = np.zeros((COUNT, 24, 44), np.float32)
    rows[..., :2], rows[..., 2:4] = (
        draw.uniform(60, 350, (COUNT, 24, 2)),
        draw.uniform(10, 50, (COUNT, 24, 2)),
    )
    rows[..., 4:] = draw.uniform(0, 0.02, (COUNT, 24, 40))
    rows[:, 0, 7] = 0.9
    return evidence(labels=NAMES[:40], y=rows)


def test_labels_tell_the_axis_of_a_detector_with_fewer_boxes_than_values(few_boxes: Any) -> None:
    choice = decide_task("auto", few_boxes).choice
    assert choice == SCORED
    layout = layout_of_task(choice, few_boxes.placement, labels=40)
    probes = dataclasses.replace(few_boxes.probes, stated_layout=layout)
    metric = find_metric("auto", probes, labelled=False, task=choice, labels=40)
    outputs = few_boxes.probes.runs[0]
    assert metric.name == "detections"
    assert metric.score(outputs, outputs, None).tolist() == [1]
    assert decide_task("auto", dataclasses.replace(few_boxes, labels=())).choice is None


def test_true_boxes_judge_such_a_detector_by_its_labels(few_boxes: Any) -> None:
    outputs = few_boxes.probes.runs[0]
    x, y, width, height = outputs["y"][0, 0, :4].astype(np.float64)
    truth = TrueBoxes(
        corners=np.array([[x - width / 2, y - height / 2, x + width / 2, y + height / 2]]),
        classes=np.array([3]),
        ignored=np.zeros(1, np.bool_),
        crowds=np.zeros(1, np.bool_),
        input_size=Placement.of(416, 416).input_size,
    )
    metric = find_metric("map50", outputs, labelled=True, truth=TrueBoxes, task=SCORED, labels=40)
    matches = [metric.reduce(outputs, truth)]
    assert metric.score(matches, matches, truth_array([truth])) == pytest.approx(1)
