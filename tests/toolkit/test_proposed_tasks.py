"""Tasks beside boxes and classes are proposed where outputs, names and metadata leave no doubt."""

import dataclasses
from typing import Any

import numpy as np
from tests.toolkit.cases import cases
from tests.toolkit.test_task_proposal import COUNT, evidence

from edgekit_runtime.preprocessing.placement import Placement
from edgekit_toolkit.tasks.proposal import decide_task, write_task
from edgekit_toolkit.tasks.proposers import Evidence

DRAW = np.random.default_rng(8)
CHARACTERS = tuple("abcdefghij")


def pictured(side: int = 16, **changes: Any) -> Evidence:
    """Return evidence of a model whose input is a picture of 16 x 16."""
    return dataclasses.replace(evidence(**changes), placement=Placement.of(side, side))


def normal(*shape: int) -> Any:
    return DRAW.normal(0, 2, (COUNT, *shape)).astype(np.float32)


def shares(*shape: int, axis: int) -> Any:
    values = np.exp(normal(*shape))
    return values / values.sum(axis=axis, keepdims=True)


def frames(blank: int, *, classes: int = 11) -> Any:
    """Return logits [16, 20, classes] in which the blank is the most frequent."""
    values = normal(20, classes)
    values[:, ::2, blank] = 20
    return values


UNIT = normal(64)
UNIT /= np.linalg.norm(UNIT, axis=1, keepdims=True)


def poses(*, places: int = 200, points: int = 17) -> Any:
    """Return rows as YOLOv8-pose has them, turned: a box and a score, and x, y and score of each point."""
    rows = DRAW.uniform(0, 416, (COUNT, 5 + 3 * points, places)).astype(np.float32)
    rows[:, 4::3] = DRAW.random(rows[:, 4::3].shape)
    return rows


def sound(**changes: Any) -> Evidence:
    return dataclasses.replace(evidence(**changes), placement=None, is_sound=True)


def uniform(*shape: int, high: float = 1.0) -> Any:
    return DRAW.uniform(0, high, (COUNT, *shape)).astype(np.float32)


SCORED_POINTS = np.concatenate([uniform(17, 2, high=416), uniform(17, 1)], axis=-1)
POSE_METADATA = {"task": "pose", "kpt_shape": "[5, 2]"}

CASES = {
    "keypoints:form=poses,row=xys": pictured(labels=(), y=poses()),
    "keypoints:form=poses,row=xy": dataclasses.replace(
        pictured(labels=(), y=uniform(15, 300, high=1)), metadata=POSE_METADATA
    ),
    "keypoints:form=heatmaps": pictured(labels=(), heatmaps=uniform(17, 32, 24)),
    "keypoints:form=heatmaps,layout=NHWC,scores=sigmoid": pictured(labels=(), heatmap=normal(32, 24, 17)),
    "keypoints:row=xys": pictured(labels=(), keypoints=SCORED_POINTS),
    "keypoints:row=xy": pictured(labels=(), landmarks=uniform(5, 2, high=416)),
    "keypoints:row=yxs,unit=shares": pictured(labels=(), keypoints=uniform(1, 17, 3)),
    "keypoints:row=xyz": pictured(labels=CHARACTERS, landmarks=uniform(1, 1, 30, high=192)),
    "sound_events": sound(labels=(), y=uniform(1)),
    "sound_events:layout=NCT": sound(labels=(), y=uniform(4, 100)),
    "regression": pictured(labels=(), y=normal(1)),
    "segmentation": pictured(y=normal(3, 16, 16)),
    "segmentation:layout=NHWC": pictured(y=normal(16, 16, 3)),
    "segmentation:scores=probabilities": pictured(labels=("cat",), y=DRAW.random((COUNT, 1, 16, 16))),
    "segmentation:scores=sigmoid": pictured(labels=("cat",), y=normal(1, 16, 16)),
    "segmentation:layout=NHWC,scores=sigmoid": pictured(labels=("cat",), y=normal(16, 16, 1)),
    "text:blank=first,scores=softmax": pictured(labels=CHARACTERS, y=frames(0)),
    "text:blank=last,scores=softmax": pictured(labels=CHARACTERS, y=frames(10)),
    "text:blank=last,scores=softmax,layout=NCT": pictured(labels=CHARACTERS, y=frames(10).swapaxes(1, 2)),
    "text:blank=first,scores=probabilities": pictured(
        labels=CHARACTERS, y=np.exp(frames(0) - 20) / np.exp(frames(0) - 20).max()
    ),
    "embedding": pictured(labels=(), y=UNIT),
}
MORE = {
    "embedding by its name": (pictured(labels=(), embeddings=normal(64)), "embedding"),
    "voice by its name": (pictured(labels=(), speech=uniform(1)), "sound_events"),
    "scores of all labels": (sound(labels=CHARACTERS[:3], y=uniform(50, 3)), "sound_events"),
    "shares of sounds": (sound(labels=(), y=shares(5, axis=1)), "classification:scores=probabilities"),
    "a score beside points": (
        pictured(labels=(), landmarks=uniform(5, 2, high=416), score=uniform(1)),
        "keypoints:row=xy",
    ),
    "shares without labels": (pictured(labels=(), y=shares(5, 16, 16, axis=1)), "segmentation"),
    "whole numbers": (pictured(y=DRAW.integers(0, 3, (COUNT, 16, 16))), "segmentation"),
    "class folders": (pictured(labelled=True, labels=(), y=UNIT), "embedding"),
    "PaddleOCR": (pictured(labels=CHARACTERS, y=frames(0, classes=12)), "text:blank=first,scores=softmax"),
}
UNCERTAIN = {
    "points without a name": pictured(labels=(), y=uniform(5, 2, high=416)),
    "points of an order that nothing tells": pictured(labels=(), keypoints=uniform(21, 3)),
    "points beside boxes": pictured(
        labels=(), landmarks=uniform(10, high=400), boxes=uniform(9, 4, high=400)
    ),
    "one score of a photograph": pictured(labels=(), y=uniform(1)),
    "a logit of two classes": pictured(labels=("no", "yes"), y=normal(1)),
    "a logit by its name": pictured(labels=(), logits=normal(1)),
    "a picture that was transposed": pictured(labels=(), transpose_1=DRAW.random((COUNT, 64, 64, 3))),
    "kinds of an invoice": pictured(labels=(), invoice=uniform(4)),
    "a number that never changes": pictured(labels=(), y=np.full((COUNT, 1), 7, np.float32)),
    "a rotation": pictured(labels=(), pose=normal(3, 3)),
    "a mask over frequencies": sound(labels=(), y=uniform(1, 257)),
    "many scores of sound": sound(labels=(), y=uniform(521)),
    "colours": pictured(labels=(), y=DRAW.random((COUNT, 3, 16, 16))),
    "depth": pictured(labels=(), y=DRAW.random((COUNT, 1, 16, 16))),
    "maps of another size": pictured(y=normal(3, 8, 8)),
    "maps of no picture": dataclasses.replace(evidence(y=normal(3, 16, 16)), placement=None),
    "whole numbers beyond the labels": pictured(y=DRAW.integers(0, 9, (COUNT, 16, 16))),
    "a mask with a NaN": pictured(y=np.full((COUNT, 3, 16, 16), np.nan)),
    "words over time": pictured(labels=("yes", "no", "left"), y=frames(0, classes=4)),
    "frames without a blank": pictured(labels=CHARACTERS, y=frames(4)),
    "vectors of other lengths": pictured(labels=(), y=normal(64)),
    "short vectors": pictured(labels=(), y=UNIT[:, :4] / np.linalg.norm(UNIT[:, :4], axis=1, keepdims=True)),
}


@cases(
    ("shown", "expected"),
    [*((shown, name) for name, shown in CASES.items()), *MORE.values()],
    ids=[*CASES, *MORE],
)
def test_outputs_without_doubt_propose_their_task(shown: Evidence, expected: str) -> None:
    choice = decide_task("auto", shown).choice
    assert choice is not None
    assert write_task(choice) == expected
    assert decide_task(expected, shown).choice == choice  # it can read the outputs


@cases("case", UNCERTAIN)
def test_outputs_that_may_mean_anything_propose_none(case: str) -> None:
    assert decide_task("auto", UNCERTAIN[case]).choice is None
