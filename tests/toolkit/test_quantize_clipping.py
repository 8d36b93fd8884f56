"""Ranges without rare extremes: histograms, percentiles and least squared error."""

from collections.abc import Callable

import numpy as np
import pytest
from tests.toolkit.small_models import model_of, node, random_weight

from edgekit_toolkit.pipeline import candidates
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.clipping import RANGE_METHODS, RangeMethod, least_error_range, percentile_range
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.ranges import HISTOGRAM_BINS, Histogram, count_values
from edgekit_toolkit.quantize.scheme import ASYMMETRIC


def histogram_of(*samples: np.ndarray) -> Histogram:
    feeds = [{"x": one.astype(np.float32)} for one in samples]
    low, high = min(one.min() for one in samples), max(one.max() for one in samples)
    return count_values(feeds, lambda given: given.items(), {"x": (float(low), float(high))})["x"]


def test_histogram_counts_each_value_of_all_samples_once() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.normal(size=(3, 50)), rng.normal(size=(2, 70))]
    found = histogram_of(*samples)
    values = np.concatenate([one.reshape(-1) for one in samples])
    want, _ = np.histogram(values, HISTOGRAM_BINS, (values.min(), values.max()))
    assert found.counts.sum() == 290
    assert np.abs(np.cumsum(found.counts) - np.cumsum(want)).max() <= 1  # a value on an edge, in float32


def test_constant_activation_has_no_histogram() -> None:
    feeds = [{"x": np.full((2, 2), 3, np.float32)}]
    assert count_values(feeds, lambda given: given.items(), {"x": (3.0, 3.0)}) == {}


def test_percentile_range_leaves_out_one_value_in_ten_thousand() -> None:
    values = np.linspace(0, 1, 100_000)
    low, high = percentile_range(histogram_of(values), symmetric=False)
    assert low == pytest.approx(0.00005, abs=1 / HISTOGRAM_BINS)
    assert high == pytest.approx(0.99995, abs=1 / HISTOGRAM_BINS)


def test_percentile_range_of_many_equal_values_holds_them() -> None:
    values = np.concatenate([np.zeros(99_990), np.linspace(0, 8, 10)])
    low, high = percentile_range(histogram_of(values), symmetric=False)
    assert low == 0
    assert 0 < high < 8


def quantized_error(values: np.ndarray, low: float, high: float) -> float:
    """Mean squared error of 8-bit codes, by the formula."""
    low, high = min(low, 0), max(high, 0)
    scale = (high - low) / 255
    codes = np.clip(np.rint(values / scale), np.rint(low / scale), np.rint(high / scale))
    return float(np.square(codes * scale - values).mean())


@pytest.mark.parametrize("outlier", [40.0, -40.0])
def test_least_error_range_clips_an_outlier_that_costs_more_than_it_gives(outlier: float) -> None:
    values = np.append(np.random.default_rng(2).normal(size=1_000_000), outlier)
    low, high = least_error_range(histogram_of(values), symmetric=False)
    assert max(-low, high) < 20
    assert quantized_error(values, low, high) < 0.5 * quantized_error(values, values.min(), values.max())


def test_least_error_range_of_even_values_is_the_whole() -> None:
    values = np.linspace(-1, 3, 100_000)
    assert least_error_range(histogram_of(values), symmetric=False) == pytest.approx((-1, 3))


def test_least_error_range_for_symmetric_codes_counts_the_longer_side() -> None:
    # The short side costs nothing where codes reach equally far on both.
    values = np.append(np.random.default_rng(3).uniform(-0.1, 4, 100_000), -4.0)
    low, _ = least_error_range(histogram_of(values), symmetric=True)
    assert low == pytest.approx(-4)


def test_range_of_positive_values_starts_no_higher_than_they_do() -> None:
    low, high = least_error_range(histogram_of(np.linspace(5, 6, 1000)), symmetric=False)
    assert low <= 5
    assert high == pytest.approx(6)


@pytest.fixture
def list_labels() -> Callable[[float], list[str]]:
    """The labels of a search with a limit in seconds; one activation of its model has an outlier."""
    rng = np.random.default_rng(4)
    weights = {"w": random_weight(rng, 16, 8, 1, 1), "v": random_weight(rng, 8, 16, 1, 1)}
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("Conv", ["r", "v"], ["y"]),
    ]
    model = model_of(nodes, weights, {"x": (1, 8, 16, 16)})
    samples = [{"x": rng.normal(size=(1, 8, 16, 16)).astype(np.float32)} for _ in range(20)]
    samples[19]["x"][0, 3, 5, 5] = 400.0  # behind the samples that noise is measured on

    def search(limit_s: float) -> list[str]:
        found = candidates.find_candidates(
            OnnxQuantizer(model, ASYMMETRIC, threads=1),
            lambda: iter(samples),
            per_channel=True,
            kinds=frozenset({forms.STATIC_INT8}),
            limit_s=limit_s,
            dims={},
            progress=lambda *_: None,
        )
        return [candidate.label for candidate in found.candidates]

    return search


def test_search_takes_clipped_ranges_where_an_outlier_stretches_the_others(
    list_labels: Callable[[float], list[str]],
) -> None:
    assert any("ranges" in label for label in list_labels(60))
    assert not any("ranges" in label for label in list_labels(0))


def test_further_range_method_is_one_record_and_makes_candidates_of_its_own(
    list_labels: Callable[[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    further = RangeMethod("further ranges", percentile_range)
    monkeypatch.setattr(candidates, "RANGE_METHODS", (further, *RANGE_METHODS[1:]))
    assert any("further ranges" in label for label in list_labels(60))
