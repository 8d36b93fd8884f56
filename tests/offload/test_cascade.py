"""A cascade is a plan only where samples that did not choose its threshold confirm it, and where it pays."""

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.cases import cases

from edgekit_offload.planning.cascade import Cascade, choose_threshold
from edgekit_offload.planning.result import Refusal
from edgekit_runtime.errors import CutError

CLASSES = 5


def two_models(
    count: int, seed: int, weakness: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scores of a small and a large model: the small one sees the same with noise."""
    rng = np.random.default_rng(seed)
    large = rng.standard_normal((count, CLASSES)).astype(np.float32) * 3
    return large + weakness * rng.standard_normal(large.shape).astype(np.float32), large


def choose(small: NDArray[np.float32], large: NDArray[np.float32], asked: float = 0.95) -> Cascade | Refusal:
    return choose_threshold(small, large, "logits", least_agreement=asked)


def agreement(
    small: NDArray[np.float32], large: NDArray[np.float32], least_margin: float
) -> tuple[float, float]:
    """Agreement and share of escalations of a cascade that is run on new samples."""
    top = np.sort(small, axis=1)
    asks = top[:, -1] - top[:, -2] < least_margin
    return float((asks | (small.argmax(1) == large.argmax(1))).mean()), float(asks.mean())


def test_threshold_keeps_the_agreement_on_new_samples(is_long: bool) -> None:
    plans = kept = 0
    seeds, most_failures = (40, 5) if is_long else (12, 3)
    for seed in range(seeds):
        found = choose(*two_models(2000, seed))
        if isinstance(found, Refusal):
            assert "did not stand its test" in found.reason
            continue
        plans += 1
        true, share = agreement(*two_models(20_000, 1000 + seed), found.escalation.least_margin)
        assert found.least_agreement >= 0.95
        kept += true >= found.least_agreement
        assert share == pytest.approx(found.escalation.share, abs=0.08)  # 5 deviations of 1,000 samples
    assert plans >= 3 * seeds // 4
    # Each bound holds with 95 %: more than 5 of 40, or 3 of 12, fail with less than 2 %.
    assert plans - kept <= most_failures


def test_stronger_demand_escalates_more() -> None:
    small, large = two_models(4000, 1)
    shares = []
    for asked in (0.9, 0.95, 0.98):
        found = choose(small, large, asked)
        assert isinstance(found, Cascade)
        shares.append(found.escalation.share)
    assert 0.05 < shares[0] < shares[1] < shares[2] < 1


def test_equal_models_never_escalate() -> None:
    _, large = two_models(1000, 2)
    found = choose(large, large)
    assert isinstance(found, Cascade)
    assert found.agreement == 1.0
    assert found.escalation.share < 0.02  # margins below all of the half that chose


def test_bound_is_that_of_clopper_and_pearson() -> None:
    _, large = two_models(200, 3)
    found = choose(large, large)
    assert isinstance(found, Cascade)
    assert found.least_agreement == pytest.approx(0.05 ** (1 / 100))  # no error in 100 samples


def test_too_few_samples_are_refused_with_the_number_that_is_needed() -> None:
    small, large = two_models(400, 4)
    found = choose(small, large, 0.99)
    assert isinstance(found, Refusal)
    assert "400 samples" in found.reason
    assert "at least 598" in found.reason


def test_small_model_that_knows_nothing_is_refused() -> None:
    rng = np.random.default_rng(5)
    _, large = two_models(1000, 5)
    found = choose(rng.standard_normal(large.shape).astype(np.float32), large, 0.995)
    assert isinstance(found, Refusal)
    sure_but_wrong = np.roll(large, 1, axis=1)
    found = choose(sure_but_wrong, large)
    assert isinstance(found, Refusal) or found.escalation.share > 0.9


def test_equal_margins_are_taken_together() -> None:
    _, large = two_models(1000, 6)
    small = np.eye(CLASSES, dtype=np.float32)[np.random.default_rng(6).integers(0, CLASSES, 1000)]
    found = choose(small, large)
    assert isinstance(found, Refusal)
    assert "most sure" in found.reason


@cases(
    ("small", "large", "asked", "message"),
    [
        (np.zeros((9, 3)), np.zeros((9, 4)), 0.9, "same classes"),
        (np.zeros((9, 1)), np.zeros((9, 1)), 0.9, "at least 2 classes"),
        (np.zeros((9, 7, 3)), np.zeros((9, 7, 3)), 0.9, "classifier"),
        (np.full((9, 3), np.nan), np.zeros((9, 3)), 0.9, "small model hold NaN"),
        (np.zeros((9, 3)), np.zeros((9, 3)), 1.0, "below 1"),
    ],
)
def test_scores_that_make_no_cascade_are_refused(
    small: NDArray[np.float32], large: NDArray[np.float32], asked: float, message: str
) -> None:
    with pytest.raises(CutError, match=message):
        choose(small, large, asked)
