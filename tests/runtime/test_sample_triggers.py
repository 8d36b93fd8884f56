"""Whether triggers fit requests, by their answers, outputs and the reference of their package."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.protocol.samples import TRIGGERS, SampleTrigger
from edgekit_runtime.samples.draws import KEPT
from edgekit_runtime.samples.triggers import JUDGES, Observation
from edgekit_runtime.tensors import TensorSpec

VALUES = {"low": 0.0, "high": 1.0, "edges": [0.25, 0.5, 0.75], "shares": [0.5, 0.5, 0.0, 0.0]}
CLASSES = {
    "probabilities": True,
    "confidence": [0.0] * 5 + [0.2] * 5,
    "classes": [0.5, 0.5, 0.0],
}


def observe(
    *,
    x: Any = (0.1, 0.2),
    scores: Any = (0.6, 0.4, 0.0),
    answer: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
    agreement: float | None = None,
) -> Observation:
    manifest: Any = SimpleNamespace(
        outputs=(TensorSpec("y", "float32", ("N", 3)),), figures=figures or {}, name="m", version="1"
    )
    return Observation(
        manifest=manifest,
        inputs={"x": np.array([x], np.float32)},
        outputs={"y": np.array([scores], np.float32)},
        answer=answer or {},
        find_agreement=lambda: agreement,
    )


def judge(kind: str, observation: Observation, threshold: float | None = None) -> bool | None:
    return JUDGES[kind](observation, SampleTrigger(kind=kind, threshold=threshold))


def test_each_trigger_of_the_protocol_has_a_judge_or_is_pulled() -> None:
    assert {*JUDGES, KEPT} == TRIGGERS.keys()


@pytest.mark.parametrize(
    ("answer", "is_fit"),
    [
        ({"classes": [{"label": "a", "score": 0.5}, {"label": "b", "score": 0.45}]}, True),
        ({"classes": [{"label": "a", "score": 0.9}, {"label": "b", "score": 0.05}]}, False),
        ({"classes": [{"label": "a", "score": 0.9}, {"label": "b", "score": 0.88}]}, False),  # may both hold
        ({"detections": [{"score": 0.95, "box": []}, {"score": 0.55, "box": []}]}, True),
        ({"detections": [{"score": 0.95, "box": []}, {"score": 0.2, "box": []}]}, False),
        ({"people": [{"score": 0.95, "face": {"classes": [{"score": 0.52}, {"score": 0.48}]}}]}, True),
        ({"detections": []}, False),
        ({"values": [0.5, 0.5]}, False),
    ],
)
def test_an_answer_is_uncertain_by_its_scores(answer: Mapping[str, Any], is_fit: bool) -> None:
    assert judge("uncertain", observe(answer=answer)) is is_fit


def test_class_scores_without_a_task_are_uncertain_as_probabilities_or_logits() -> None:
    figures = {"class_output": "y"}
    assert judge("uncertain", observe(scores=(0.45, 0.35, 0.2), figures=figures))
    assert not judge("uncertain", observe(scores=(0.7, 0.2, 0.1), figures=figures))
    assert judge("uncertain", observe(scores=(5.0, 4.9, -3.0), figures=figures))
    assert not judge("uncertain", observe(scores=(5.0, 2.0, -3.0), figures=figures))
    assert judge("uncertain", observe(scores=(0.7, 0.2, 0.1), figures=figures), threshold=0.6)
    assert judge("uncertain", observe()) is None


def test_drift_is_a_range_or_a_class_that_the_reference_lacks() -> None:
    values = {"reference": {"inputs": {"x": VALUES}, "outputs": {}}}
    assert judge("drift", observe()) is None
    assert judge("drift", observe(figures=values)) is False
    assert judge("drift", observe(x=(0.1, 9.0), figures=values))
    assert judge("drift", observe(x=(0.1, 0.6), figures=values))
    assert judge("drift", observe(x=(float("nan"), 0.1), figures=values))
    classes = {"reference": {"inputs": {}, "outputs": {"y": CLASSES}}}
    assert judge("drift", observe(figures=classes)) is False
    assert judge("drift", observe(scores=(0.1, 0.1, 0.8), figures=classes))


def test_disagreement_is_of_the_other_version_if_there_is_one() -> None:
    assert judge("disagreement", observe()) is None
    assert judge("disagreement", observe(agreement=1.0)) is False
    assert judge("disagreement", observe(agreement=0.5))
