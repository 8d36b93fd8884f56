import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.canary_fakes import Client, FakeLane, fail

from edgekit_runtime.drift.monitor import MAX_DOCUMENT_BYTES, Drift, pick
from edgekit_runtime.drift.sketches import ClassSketch, Moments, ValueSketch, find_distance
from edgekit_runtime.errors import ManifestError
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.scheduling.drift_lane import DriftLane
from edgekit_runtime.service.scheduling.golden_ratio import GOLDEN
from edgekit_runtime.tensors import Array, TensorSpec

IMAGE = TensorSpec("image", "float32", ("N", 3, 32, 32))
LOGITS = TensorSpec("logits", "float32", ("N", 4))
EDGES = [round(0.1 * place, 1) for place in range(1, 10)]
FIGURES: dict[str, Any] = {
    "reference": {
        "inputs": {"image": {"low": 0.0, "high": 1.0, "edges": EDGES, "shares": [0.1] * 10}},
        "outputs": {
            "logits": {
                "probabilities": False,
                "confidence": [0.0] * 8 + [0.15, 0.85],
                "classes": [0.25] * 4,
            }
        },
    }
}


def looked(
    drift: Drift, count: int, *, scale: float = 1.0, classes: int = 4, seed: int = 0
) -> dict[str, Any]:
    """Look at uniform images with sure answers, and return the document."""
    rng = np.random.default_rng(seed)
    for step in range(count):
        image = rng.random((1, 3, 32, 32), np.float32) * np.float32(scale)
        scores = np.zeros((1, 4), np.float32)
        scores[0, rng.integers(classes)] = rng.uniform(3.0, 5.0)
        phase = step * GOLDEN % 1.0
        drift.add(drift.pick_inputs({"image": image}, phase), {"logits": scores}, phase)
    return json.loads(json.dumps(drift.to_json()))  # type: ignore[no-any-return]


def new_drift(window: int = 4096) -> Drift:
    return Drift([IMAGE], [LOGITS], FIGURES, window)


def test_inputs_and_outputs_like_the_reference_lie_close_to_it() -> None:
    document = looked(new_drift(), 400)
    image, logits = document["inputs"]["image"], document["outputs"]["logits"]
    assert image["psi"] < 0.02
    assert image["outside"] == 0.0
    assert image["mean"] == pytest.approx(0.5, abs=0.01)
    assert image["std"] == pytest.approx(12**-0.5, abs=0.01)
    assert logits["classes_psi"] < 0.1
    assert logits["confidence_psi"] < 0.1
    assert sum(logits["classes"]) == 400


def test_another_preprocessing_lies_far_away() -> None:
    image = looked(new_drift(), 50, scale=255.0)["inputs"]["image"]
    assert image["psi"] > 1
    assert image["outside"] > 0.9


def test_missing_classes_lie_far_away() -> None:
    assert looked(new_drift(), 200, classes=2)["outputs"]["logits"]["classes_psi"] > 0.5


def test_old_calls_lose_weight() -> None:
    drift = new_drift(window=100)
    looked(drift, 1000)
    document = looked(drift, 400, scale=255.0)
    assert document["inputs"]["image"]["outside"] > 0.9
    assert document["looked_at"] < 200


@pytest.mark.parametrize("figures", [{"score": {"metric": "top1", "value": 0.9}}, {"class_output": "logits"}])
def test_without_a_reference_counts_are_still_stated(figures: dict[str, Any]) -> None:
    document = looked(Drift([IMAGE], [LOGITS], figures), 20)
    assert "psi" not in document["inputs"]["image"]
    assert sum(document["outputs"]["logits"]["classes"]) == 20


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {
            "score": {"metric": "agreement", "value": 1.0}
        },  # chosen by the shape alone where nothing has labels
        {"score": {"metric": "mae.py (sha256 0123456789ab)", "value": 0.9}},
        {  # it was looked at when the package was made, and left out
            "reference": {
                "inputs": {},
                "outputs": {"other": {"low": 0, "high": 1, "edges": [], "shares": [1.0]}},
            },
            "score": {"metric": "top1", "value": 0.9},
        },
        {
            "reference": {
                "inputs": {},
                "outputs": {"logits": {"low": -5, "high": 5, "edges": [0], "shares": [0.5, 0.5]}},
            }
        },
    ],
)
def test_output_that_nothing_says_to_be_classes_is_watched_by_its_values(figures: dict[str, Any]) -> None:
    stated = looked(Drift([IMAGE], [LOGITS], figures), 20)["outputs"]["logits"]
    assert "classes" not in stated
    assert 3.0 <= stated["high"] <= 5.0


def test_probabilities_and_their_logits_look_the_same() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (50, 6)).astype(np.float32)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    first, second = ClassSketch(6), ClassSketch(6)
    for row, probabilities in zip(logits, weights / weights.sum(axis=1, keepdims=True), strict=True):
        first.add(row)
        second.add(probabilities)
    assert (first.is_probabilities, second.is_probabilities) == (False, True)
    assert (first.classes, first.confidence) == (second.classes, second.confidence)
    assert first.entropy.mean == pytest.approx(second.entropy.mean, abs=1e-5)  # float32


def test_masked_classes_have_no_weight() -> None:
    sketch = ClassSketch(3)
    sketch.add(np.float32([0, -np.inf, 0]))
    assert sketch.confidence[5] == 1  # a half
    assert sketch.entropy.mean == pytest.approx(np.log(2) / np.log(3))


def test_answers_that_are_not_finite_are_left_out() -> None:
    sketch = ClassSketch(3)
    for scores in ([0, np.nan, 0], [np.inf, 0, np.inf], [-np.inf] * 3):
        sketch.add(np.float32(scores))
    assert sum(sketch.classes) == 0


def test_huge_values_do_not_overflow() -> None:
    sketch = ValueSketch()
    sketch.add(np.float32([-3e38, 3e38]))
    assert sketch.moments.std == pytest.approx(3e38)


def test_an_output_that_was_not_asked_for_is_left_out() -> None:
    drift = new_drift()
    drift.add(drift.pick_inputs({"image": np.zeros((1, 3, 32, 32), np.float32)}), {})
    assert drift.looked_at == 1


def test_nan_is_counted_apart() -> None:
    sketch = ValueSketch()
    sketch.add(np.float32([1, np.nan, 3]))
    sketch.add(np.float32([np.nan]))
    assert sketch.not_finite == 2
    assert (sketch.moments.count, sketch.moments.mean) == (2, 2)


@given(
    parts=st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), min_size=1, max_size=8)
)
def test_merged_moments_are_those_of_all_values(parts: list[list[float]]) -> None:
    merged = Moments()
    for part in parts:
        sketch = ValueSketch()
        sketch.add(np.array(part, np.float32))
        merged.merge(sketch.moments)
    values = np.concatenate([np.array(part, np.float32) for part in parts]).astype(np.float64)
    assert merged.count == len(values)
    assert merged.mean == pytest.approx(values.mean(), abs=1e-3)  # sums of float32 up to 1e3
    assert merged.std == pytest.approx(values.std() if len(values) > 1 else 0.0, abs=1e-2)
    assert (merged.low, merged.high) == (values.min(), values.max())


def test_the_document_stays_small() -> None:
    inputs = [TensorSpec("x" * 200 + str(place), "float32", ("N", 50)) for place in range(9)]
    outputs = [TensorSpec("scores", "float32", ("N", 1000)), TensorSpec("more", "float32", ("N", 7))]
    drift = Drift(inputs, outputs, {})
    rng = np.random.default_rng(0)
    for _ in range(50):
        feeds = {spec.name: (rng.random((1, 50)) * 1e-7).astype(np.float32) for spec in inputs}
        made = {"scores": rng.normal(size=(1, 1000)).astype(np.float32), "more": np.ones((1, 7), np.float32)}
        drift.add(drift.pick_inputs(feeds), made)
    assert len(json.dumps(drift.to_json())) <= MAX_DOCUMENT_BYTES
    assert "scores" in drift.to_json()["outputs"]  # type: ignore[operator]


def count_nan_answers(values: Array, dtype: str) -> int:
    """Answer NaN to `values`; return how often that counted against the model."""
    spec = TensorSpec("x", dtype, values.shape)
    drift = Drift([spec], [LOGITS], {})
    behind = FakeLane(compute=lambda _given: {"logits": np.full((1, 4), np.nan, np.float32)})
    lane = DriftLane(drift, behind)

    def reply(_answer: Answer) -> None:
        values.fill(np.nan)  # the buffer of a request is used again

    lane.submit(Call({"x": values}, reply))
    assert drift.looked_at == 1
    return drift.not_finite


def test_nan_to_an_input_whose_nan_no_sample_sees_does_not_count() -> None:
    values = np.zeros(100_000, np.float32)
    values[1] = np.nan
    assert count_nan_answers(values, "float32") == 0


def test_nan_to_an_input_that_is_finite_in_its_own_type_counts() -> None:
    assert count_nan_answers(np.full(10, 1e39), "float64") == 1
    assert count_nan_answers(np.full(10, 3e38, np.float32), "float32") == 1


def test_in_time_every_value_is_looked_at() -> None:
    values = np.arange(3072, dtype=np.float32)
    seen: set[float] = set()
    for place in range(6):
        part = pick(values, place / 6)
        assert len(part) == 512
        seen.update(part.tolist())
    assert len(seen) == 3072


@pytest.mark.parametrize("cost_s", [1e-5, 1e-3])
def test_a_look_that_takes_longer_comes_more_seldom(cost_s: float) -> None:
    ticks = [0.0]

    def clock() -> float:
        ticks[0] += cost_s / 2  # four readings, two of which enclose work
        return ticks[0]

    drift, client = new_drift(), Client()
    lane = DriftLane(
        drift,
        FakeLane(compute=lambda _given: {"logits": np.zeros((1, 4), np.float32)}),
        budget_s=2e-6,
        clock=clock,
    )
    image = np.zeros((1, 3, 32, 32), np.float32)
    for _ in range(20_000):
        lane.submit(client.call({"image": image}))
    spent_s = drift.looked_at * cost_s
    assert spent_s / 20_000 < 2.5e-6
    assert drift.looked_at >= 20


def test_the_lane_answers_every_call_once_whatever_is_wrong_with_it() -> None:
    client, behind = Client(), FakeLane(compute=fail)
    lane = DriftLane(new_drift(), behind)
    for inputs in (
        {},
        {"image": np.zeros((1, 0), np.float32)},
        {"image": np.array(["a"])},
        {"z": np.zeros(3)},
    ):
        lane.submit(client.call(inputs))
    assert [len(mine) for mine in client.answers] == [1] * 4


def test_inputs_are_taken_before_the_reply() -> None:
    buffer = bytearray(np.full((1, 3, 32, 32), 0.25, np.float32).tobytes())
    image = np.frombuffer(buffer, np.float32).reshape(1, 3, 32, 32)

    def reuse(_answer: Any) -> None:
        buffer[:] = bytes(len(buffer))

    drift = new_drift()
    lane = DriftLane(drift, FakeLane(compute=lambda _given: {"logits": np.zeros((1, 4), np.float32)}))
    lane.submit(Call({"image": image}, reuse))
    assert drift.to_json()["inputs"]["image"]["mean"] == 0.25  # type: ignore[call-overload,index]


def test_the_distance_of_equal_shares_is_nothing() -> None:
    assert find_distance([250, 250, 500], [0.25, 0.25, 0.5]) == pytest.approx(0, abs=1e-4)
    assert find_distance([], []) is None
    assert (find_distance([900, 50, 50], [0.25, 0.25, 0.5]) or 0) > 0.25


@pytest.mark.parametrize(
    "broken",
    [
        {"inputs": [], "outputs": {}},
        {"inputs": {"image": {"low": 0, "high": 1, "edges": [0.5], "shares": [1.0]}}, "outputs": {}},
        {"inputs": {"image": {"low": 0, "high": "1", "edges": [], "shares": [1.0]}}, "outputs": {}},
        {"inputs": {"image": {"low": 2, "high": 1, "edges": [], "shares": [1.0]}}, "outputs": {}},
        {"inputs": {"image": {"low": 0, "high": 1, "shares": [1.0]}}, "outputs": {}},
        {"inputs": {}, "outputs": {"logits": {"probabilities": True, "confidence": [], "classes": [1]}}},
        {
            "inputs": {},
            "outputs": {"logits": {"probabilities": True, "confidence": [0.1] * 10, "classes": [0.5] * 2}},
        },
    ],
)
def test_a_malformed_reference_is_refused(broken: Any) -> None:
    with pytest.raises(ManifestError, match=r"figures\.reference"):
        Drift([IMAGE], [LOGITS], {"reference": broken})
