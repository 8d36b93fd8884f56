"""Layouts of detectors: which outputs are read as boxes, and how."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.cases import cases

from edgekit_toolkit.evaluation.detections import BoxLayout, find_layout

Outputs = Mapping[str, NDArray[Any]]
COUNT, BOXES = 24, 20


def scene(seed: int, classes: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Boxes as corners in pixels [20, 4], scores [20], the best first, and classes [20] of one photograph."""
    draw = np.random.default_rng(seed)
    corner, size = draw.uniform(0, 200, (BOXES, 2)), draw.uniform(10, 60, (BOXES, 2))
    scores = -np.sort(-draw.uniform(0, 1, BOXES))
    # The first photographs show the classes 0 and 1 alone, as those of a sorted set do.
    labels = draw.integers(0, min(classes, 2) if seed < COUNT // 2 else classes, BOXES)
    return np.concatenate([corner, corner + size], axis=1), scores, labels


def centred(boxes: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)


def joined(*columns: NDArray[Any]) -> NDArray[np.float32]:
    return np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1).astype(np.float32)


Writer = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], Outputs]
ZEROS = np.zeros(BOXES)
WRITERS: dict[str, Writer] = {
    "box, score, class": lambda b, s, c: {"y": joined(b, s, c)[None]},
    "box, class, score": lambda b, s, c: {"y": joined(b, c, s)[None]},
    "class, score, box": lambda b, s, c: {"y": joined(c, s, b)[None]},
    "batch, box, class, score": lambda b, s, c: {"y": joined(ZEROS, b, c, s)[None]},
    "batch, box, score, class": lambda b, s, c: {"y": joined(ZEROS, b, s, c)[None]},
    "batch, class, score, box": lambda b, s, c: {"y": joined(ZEROS, c, s, b)[None, None]},
    "columns": lambda b, s, c: {"y": joined(b, s, c).T[None]},
    "0..1": lambda b, s, c: {"y": joined(b / 260, s, c)[None]},
    "centre and size": lambda b, s, c: {"y": joined(centred(b), s, c)[None]},
    "centre and size in 0..1": lambda b, s, c: {"y": joined(centred(b) / 260, s, c)[None]},
    "only what counts": lambda b, s, c: {"y": joined(b, s, c)[s > 0.3]},
    "TFLite": lambda b, s, c: {
        "boxes": joined(b[:, [1, 0, 3, 2]] / 260)[None],
        "classes": c[None].astype(np.float32),
        "scores": s[None].astype(np.float32),
        "count": np.array([BOXES], np.float32),
    },
    "TensorRT": lambda b, s, c: {
        "num_dets": np.array([[BOXES]], np.int32),
        "boxes": joined(b)[None],
        "scores": s[None].astype(np.float32),
        "labels": c[None].astype(np.int32),
    },
    "torchvision": lambda b, s, c: {
        "boxes": joined(b)[s > 0.3],
        "labels": c[s > 0.3],
        "scores": s[s > 0.3].astype(np.float32),
    },
}


def written(writer: Writer, classes: int) -> list[Outputs]:
    return [writer(*scene(seed, classes)) for seed in range(COUNT)]


@cases("classes", [1, 2, 10])
@cases("name", WRITERS)
def test_layout_of_exporters_is_read_and_agrees_with_itself(name: str, classes: int) -> None:
    runs = written(WRITERS[name], classes)
    layout = find_layout(runs[: COUNT // 2], rows_are_samples=False)
    assert layout is not None
    for seed, run in enumerate(runs):
        assert layout.score(run, run).tolist() == [1]
        boxes, scores, labels = scene(seed, classes)
        (seen,) = BoxLayout(replace(layout.options, min_score=0, overlap=1)).read(run)
        assert len(seen) >= BOXES / 4
        assert seen.classes.tolist() == labels[: len(seen)].tolist()
        np.testing.assert_allclose(seen.scores, scores[: len(seen)], rtol=1e-6)
        np.testing.assert_allclose(
            seen.corners / seen.corners.max(), boxes[: len(seen)] / boxes[: len(seen)].max(), atol=1e-5
        )
    assert layout.options.boxes.startswith("centre" if "centre" in name else "corners")
    assert layout.options.unit == ("shares" if "0..1" in name or name == "TFLite" else "pixels")


@cases("name", WRITERS)
def test_wrong_class_and_lost_box_lower_the_score_in_every_layout(name: str) -> None:
    runs = written(WRITERS[name], 10)
    layout = find_layout(runs, rows_are_samples=False)
    assert layout is not None
    boxes, scores, labels = scene(COUNT - 1, 10)
    others = WRITERS[name](boxes, scores, (labels + 1) % 10)
    assert layout.score(others, runs[-1]).tolist() == [0]
    fewer = WRITERS[name](boxes, np.where(np.arange(BOXES) == 0, 0.31, scores), labels)
    assert layout.score(fewer, runs[-1]).tolist() == [1]
    nothing = WRITERS[name](boxes, scores / 10, labels)
    assert layout.score(nothing, runs[-1]).tolist() == [0]
    assert np.isnan(layout.score(nothing, nothing)).all()


def test_boxes_behind_the_count_do_not_count() -> None:
    run = dict(WRITERS["TFLite"](*scene(1, 3)))
    layout = find_layout([run])
    assert layout is not None
    cut = {**run, "count": np.array([0], np.float32)}
    assert layout.detects_nothing([cut])


def test_box_without_an_area_lowers_no_score_of_the_model_against_itself() -> None:
    boxes, scores, labels = scene(2, 3)
    boxes[3, 2] = boxes[3, 0]
    runs = [*written(WRITERS["box, score, class"], 3), WRITERS["box, score, class"](boxes, scores, labels)]
    layout = find_layout(runs)
    assert layout is not None
    assert layout.score(runs[-1], runs[-1]).tolist() == [1]


@pytest.mark.parametrize("seed", range(3))
def test_sequences_and_features_are_no_boxes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 3, (16, 1, 30, 6))
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for values in (logits, shares, 1 / (1 + np.exp(-logits))):
        assert find_layout([{"y": value.astype(np.float32)} for value in values]) is None
    assert find_layout([{"y": draw.normal(size=(1, 6)).astype(np.float32)} for _ in range(16)]) is None


@pytest.mark.parametrize("shape", [(224, 1, 4), (1, 224, 4)])
def test_logits_of_four_classes_beside_their_probabilities_are_no_boxes(shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal([6, 0, 0, 0], 1, (8, *shape))  # the first class is the one of no event
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    pairs = zip(logits.astype(np.float32), shares.astype(np.float32), strict=True)
    assert find_layout([{"logits": value, "probs": share} for value, share in pairs]) is None


def test_box_whose_four_values_sum_to_one_in_an_image_is_a_box() -> None:
    draw = np.random.default_rng(0)
    corners = np.sort(draw.random((8, 1, 1, 2, 2)), axis=-2).reshape(8, 1, 1, 4).astype(np.float32)
    corners[0] = [0.1, 0.2, 0.3, 0.4]
    scores = draw.uniform(0.5, 1, (8, 1, 1)).astype(np.float32)
    runs = [{"boxes": box, "scores": score} for box, score in zip(corners, scores, strict=True)]
    assert find_layout(runs) is not None


@pytest.mark.parametrize("seed", range(3))
def test_raw_offsets_are_no_boxes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    offsets, scores = draw.normal(0.5, 1, (16, 1, 200, 4)), draw.uniform(0, 1, (16, 1, 200, 3))
    whole = np.concatenate([offsets, scores], axis=-1).astype(np.float32)
    assert find_layout([{"y": value} for value in whole]) is None
    pairs = zip(offsets.astype(np.float32), scores.astype(np.float32), strict=True)
    assert find_layout([{"boxes": value, "scores": score} for value, score in pairs]) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_boxes_that_are_not_finite_are_none(value: float) -> None:
    runs = written(WRITERS["box, score, class"], 3)
    layout = find_layout(runs)
    assert layout is not None
    broken = {"y": runs[0]["y"].copy()}
    broken["y"][..., :4] = value
    assert layout.score(broken, runs[0]).tolist() == [0]
