"""Outputs that are none of a task: each is refused with what was expected, and none takes long."""

import json
from typing import Any

import numpy as np
import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tasks.task import Context, read_task

TYPICAL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "classification": ((1, 4), {}),
    "segmentation": ((1, 3, 8, 8), {}),
    "keypoints": ((1, 5, 3), {}),
    "text": ((1, 7, 4), {}),
    "sound_events": ((1, 7, 4), {}),
    "embedding": ((1, 9), {}),
    "regression": ((1, 2), {}),
}
CONTEXT = Context(labels=("a", "b", "c"), placement=Placement.of(640, 480))


def answer(task: str, outputs: dict[str, Any], **options: Any) -> Any:
    record, read = read_task(TaskChoice(task, options))
    decoded = record.decode(outputs, read, CONTEXT)
    json.dumps(decoded, allow_nan=False)  # it can be sent
    return decoded


@pytest.mark.parametrize("task", TYPICAL)
def test_typical_output_has_an_answer(task: str) -> None:
    shape, options = TYPICAL[task]
    assert answer(task, {"out": np.random.default_rng(0).random(shape, np.float32)}, **options)


@cases("task", TYPICAL)
@cases("dtype", ["float16", "float64"])
def test_other_floating_point_numbers_are_taken(task: str, dtype: str) -> None:
    shape, options = TYPICAL[task]
    values = np.random.default_rng(0).random(shape).astype(dtype)
    assert answer(task, {"out": values}, **options)


HEATMAPS: tuple[str, tuple[int, ...], dict[str, Any]] = ("keypoints", (1, 5, 8, 8), {"form": "heatmaps"})


@pytest.mark.parametrize(
    ("task", "shape", "options"), [*((name, *TYPICAL[name]) for name in TYPICAL), HEATMAPS]
)
def test_nan_is_refused(task: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    values = np.full(shape, 0.5, np.float32)
    values.flat[-1] = np.nan
    with pytest.raises(DataError, match=r"output 'out' holds NaN.*expected"):
        answer(task, {"out": values}, **options)


@pytest.mark.parametrize("task", ["keypoints", "embedding", "regression"])
def test_infinity_is_refused_where_values_are_the_answer(task: str) -> None:
    values = np.full(TYPICAL[task][0], np.inf, np.float32)
    with pytest.raises(DataError, match="holds NaN or infinity"):
        answer(task, {"out": values})


def test_infinite_point_of_a_pose_is_refused() -> None:
    values = np.ones((1, 5 + 2 * 3, 30), np.float32)
    values[0, 5, 0] = np.inf  # which JSON cannot hold
    with pytest.raises(DataError, match="holds NaN or infinity"):
        answer("keypoints", {"out": values}, form="poses")


@pytest.mark.parametrize(
    ("task", "shape", "options"), [HEATMAPS, ("sound_events", (1, 7, 4), {}), ("classification", (1, 4), {})]
)
def test_infinite_score_is_left_out(task: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    values = np.full(shape, 0.6, np.float32)
    values.flat[0] = np.inf  # which JSON cannot hold
    (entries,) = answer(task, {"out": values}, **options).values()
    assert entries
    assert 0 not in {entry["index"] for entry in entries}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("task", ["classification", "sound_events"])
def test_infinite_logits_are_no_error(task: str, scores: str, sign: int) -> None:
    values = np.zeros(TYPICAL[task][0], np.float32)
    values[..., 0] = sign * np.inf
    answer(task, {"out": values}, scores=scores)
    answer(task, {"out": np.full_like(values, sign * np.inf)}, scores=scores)


@cases("task", TYPICAL)
@cases("shape", [(0,), (1, 0), (0, 3), (1, 3, 0, 8), (2, 2, 2, 2, 2), (1,) * 12 + (0,)])
def test_empty_and_other_shapes_are_refused(task: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="expected"):
        answer(task, {"out": np.zeros(shape, np.float32)}, **TYPICAL[task][1])


@pytest.mark.parametrize("task", TYPICAL)
def test_missing_output_and_strings_are_refused(task: str) -> None:
    with pytest.raises(DataError, match="there is no output 'mask', the model has out"):
        answer(task, {"out": np.zeros(TYPICAL[task][0], np.float32)}, output="mask")
    with pytest.raises(DataError, match="the model has none"):
        answer(task, {})
    with pytest.raises(DataError, match="expected"):
        answer(task, {"out": np.full(TYPICAL[task][0], "x")})


@pytest.mark.parametrize(
    ("task", "shape", "options", "reason"),
    [
        ("segmentation", (1, 300, 8, 8), {}, "300 classes, expected at most 255: is `layout` right"),
        ("keypoints", (1, 5, 4), {}, r"\[5, 4\], expected \[1, points, 3\] with the values xys"),
        ("keypoints", (1, 16), {}, "or the same flat"),
        (
            "keypoints",
            (1, 12, 30),
            {"form": "poses"},
            r"12 values for each place, expected \[1, 5 \+ points x 3",
        ),
        ("keypoints", (1, 1 << 18, 2), {"row": "xy"}, "262144 points"),
        ("text", (1, 7, 9), {}, "9 characters with the blank and there are 3 labels, expected 8, or 9"),
        ("text", (1, 7, 3, 4), {}, "expected"),
        ("embedding", (1, 3, 3), {}, "expected"),
        ("embedding", (1, 1 << 20), {}, "at most 65536"),
        ("regression", (1, 1 << 20), {}, "at most 65536"),
        ("regression", (1, 2), {"scale": [1, 2, 3]}, "scale has 3 numbers, expected 1 or 2"),
        ("sound_events", (1, 7, 4), {"min_event_s": 1}, "min_event_s needs hop_s"),
    ],
)
def test_what_does_not_fit_is_named(
    task: str, shape: tuple[int, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        answer(task, {"out": np.zeros(shape, np.float32)}, **options)


def test_class_numbers_out_of_range_are_refused() -> None:
    for value in (-1, 256):
        with pytest.raises(DataError, match=f"{value}, expected 0 to 255"):
            answer("segmentation", {"out": np.full((1, 4, 4), value, np.int64)})


def test_answers_to_large_outputs_are_bounded() -> None:
    generator = np.random.default_rng(1)
    noise = generator.random((1, 20_000, 50), np.float32)
    assert len(answer("sound_events", {"out": noise}, hop_s=0.01)["events"]) == 100
    labels = Context(labels=tuple(map(str, range(49))))
    record, options = read_task(TaskChoice("text", {}))
    text = record.decode({"out": noise}, options, labels)["text"]
    assert isinstance(text, str)
    assert len(text) <= 20_000 * 2
    record, options = read_task(TaskChoice("segmentation", {"form": "rle", "max_side": 128}))
    context = Context(placement=Placement.of(1 << 16, 1 << 16))
    reply: Any = record.decode({"out": generator.random((1, 100, 256, 256), np.float32)}, options, context)
    runs = sum(len(entry["rle"]["counts"]) for entry in reply["areas"])
    assert (reply["mask"]["width"], runs <= 2 * 128 * 128 + 200) == (128, True)
