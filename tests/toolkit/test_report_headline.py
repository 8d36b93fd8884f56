"""The sentence that sums a package up."""

from typing import Any

import pytest
from tests.toolkit import report_sample

from edgekit_toolkit.report.headline import headline


def report(**changes: Any) -> Any:
    document = report_sample.packaged()
    document["source"]["bytes"], document["package"]["bytes"] = 1_000_000, 400_000
    drop = {"interval": [-0.8, 0.8], "confidence": 0.95, "samples": 500, "held_back": True, "resolved": True}
    told = {"state": "ok", "title": "top-1 accuracy", "drop_points": 0.0, "drop": drop}
    document["accuracy"] |= told | changes
    return document


def test_headline_states_size_accuracy_and_latency() -> None:
    assert headline(report()) == (
        "2.5 x smaller, same top-1 accuracy on 500 samples (±0.8 points),"
        " 0.41 x the latency of float32 (modelled)"
    )


@pytest.mark.parametrize(
    ("points", "interval", "said"),
    [
        (0.4, [-0.2, 1.5], "top-1 accuracy 0.40 points lower on 500 samples (±1.1 points)"),
        (-0.2, [-1.4, 0.6], "top-1 accuracy 0.20 points higher on 500 samples (±1.2 points)"),
    ],
)
def test_headline_states_a_loss_or_a_gain_with_its_wider_side(
    points: float, interval: list[float], said: str
) -> None:
    drop = {"interval": interval, "confidence": 0.95, "samples": 500, "held_back": True, "resolved": True}
    assert said in str(headline(report(drop_points=points, drop=drop)))


def test_headline_of_a_drop_that_is_not_resolved_claims_no_accuracy() -> None:
    drop = {"interval": [-79.0, 79.0], "confidence": 0.95, "samples": 1, "held_back": False}
    text = str(headline(report(drop={**drop, "resolved": False}, state="not resolved")))
    assert "drop of top-1 accuracy not resolved by 1 sample (-79.0 to 79.0 points)" in text
    assert "same" not in text


def test_headline_without_data_claims_no_accuracy() -> None:
    assert "accuracy not checked" in str(headline(report(drop_points=None, drop=None)))


def test_headline_where_transport_is_limited_states_both_sizes() -> None:
    document = report()
    line = {**document["budget"][0], "limit": "transport", "value": 100_000.0}
    document["budget"].append(line)
    assert str(headline(document)).startswith("10.0 x smaller on its way, 2.5 x smaller on the device, ")


def test_headline_of_a_larger_package_says_so() -> None:
    document = report()
    document["package"]["bytes"] = 1_500_000
    assert str(headline(document)).startswith("1.5 x larger")


@pytest.mark.parametrize("bytes_", [990_000, 1_000_000, 1_030_000])
def test_headline_of_a_package_of_about_the_same_size_says_so(bytes_: int) -> None:
    document = report()
    document["package"]["bytes"] = bytes_
    assert str(headline(document)).startswith("same size, same")


def test_headline_of_a_refusal_is_missing() -> None:
    assert headline(report_sample.refused()) is None
