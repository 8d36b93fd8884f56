"""Masks, texts and embeddings are proposed where the outputs leave no doubt."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.toolkit.test_task_proposal import COUNT, evidence

from edgekit_runtime.preprocessing.placement import Placement
from edgekit_toolkit.tasks.proposal import Evidence, decide_task, write_task

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

CASES = {
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
    "shares without labels": (pictured(labels=(), y=shares(5, 16, 16, axis=1)), "segmentation"),
    "whole numbers": (pictured(y=DRAW.integers(0, 3, (COUNT, 16, 16))), "segmentation"),
    "class folders": (pictured(labelled=True, labels=(), y=UNIT), "embedding"),
    "PaddleOCR": (pictured(labels=CHARACTERS, y=frames(0, classes=12)), "text:blank=first,scores=softmax"),
}
UNCERTAIN = {
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


@pytest.mark.parametrize(
    ("shown", "expected"),
    [*((shown, name) for name, shown in CASES.items()), *MORE.values()],
    ids=[*CASES, *MORE],
)
def test_outputs_without_doubt_propose_their_task(shown: Evidence, expected: str) -> None:
    choice = decide_task("auto", shown).choice
    assert choice is not None
    assert write_task(choice) == expected
    assert decide_task(expected, shown).choice == choice  # it can read the outputs


@pytest.mark.parametrize("case", UNCERTAIN)
def test_outputs_that_may_mean_anything_propose_none(case: str) -> None:
    assert decide_task("auto", UNCERTAIN[case]).choice is None
