import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekit_toolkit.quantize.scheme import (
    ASYMMETRIC,
    ASYMMETRIC_7BIT,
    SYMMETRIC,
    Scheme,
    activation_params,
    quantize_weight,
)

BOUNDS = st.floats(-1e6, 1e6, allow_nan=False)


@given(BOUNDS, BOUNDS)
def test_asymmetric_codes_reach_the_whole_range_and_zero_exactly(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    params = activation_params(low, high, ASYMMETRIC)
    assert params.scale.dtype == np.float32
    assert params.zero_point.dtype == np.uint8
    scale, zero = float(params.scale), int(params.zero_point)
    # Half a step, since the zero point is rounded, and 1e-6 for the rounding of the scale to float32.
    slack = 0.5 * scale + 1e-6 * max(abs(low), abs(high))
    assert (0 - zero) * scale <= min(low, 0) + slack
    assert (255 - zero) * scale >= max(high, 0) - slack


@given(BOUNDS, BOUNDS)
def test_symmetric_codes_reach_the_whole_range_with_zero_point_zero(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    params = activation_params(low, high, SYMMETRIC)
    assert params.zero_point.dtype == np.int8
    assert int(params.zero_point) == 0
    assert 127 * float(params.scale) >= max(abs(low), abs(high)) * (1 - 1e-6)


def test_range_of_positive_values_starts_at_zero() -> None:
    params = activation_params(2.0, 5.1, ASYMMETRIC)
    assert int(params.zero_point) == 0
    assert float(params.scale) == pytest.approx(5.1 / 255)


def test_range_of_negative_values_ends_at_zero() -> None:
    params = activation_params(-5.1, -2.0, ASYMMETRIC)
    assert int(params.zero_point) == 255
    assert float(params.scale) == pytest.approx(5.1 / 255)


@pytest.mark.parametrize("scheme", [ASYMMETRIC, SYMMETRIC])
def test_empty_range_has_an_ordinary_scale(scheme: Scheme) -> None:
    assert 1 / 255 <= float(activation_params(0.0, 0.0, scheme).scale) <= 1 / 127 + 1e-9


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0, 1, -1]))
@settings(max_examples=40)
def test_weight_codes_are_within_half_a_step_of_the_weights(seed: int, axis: int | None) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.normal(size=(3, 4, 5)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    codes, params = quantize_weight(weight, axis)
    assert codes.dtype == np.int8
    assert np.abs(codes.astype(int)).max() == 127
    scale = (
        params.scale if axis is None else params.scale.reshape([-1 if a == axis % 3 else 1 for a in range(3)])
    )
    assert params.scale.shape == (() if axis is None else (weight.shape[axis],))
    error = np.abs(codes * scale.astype(np.float64) - weight)
    assert (error <= 0.5 * scale.astype(np.float64) * (1 + 1e-4)).all()


def test_each_channel_has_its_own_scale() -> None:
    weight = np.array([[1.27, 0.5], [127.0, -50.0]], np.float32)
    codes, params = quantize_weight(weight, axis=0)
    assert codes.tolist() == [[127, 50], [127, -50]]
    np.testing.assert_allclose(params.scale, [0.01, 1.0], rtol=1e-6)


def test_smallest_scale_that_is_allowed_is_kept_a_channel() -> None:
    weight = np.array([[1.27, 1.27], [1e-8, 0.0]], np.float32)
    codes, params = quantize_weight(weight, axis=0, min_scale=np.array([0.0, 0.5]))
    np.testing.assert_allclose(params.scale, [0.01, 0.5], rtol=1e-6)
    assert codes.tolist() == [[127, 127], [0, 0]]


def test_smallest_scale_that_is_allowed_is_the_largest_for_a_scale_a_tensor() -> None:
    _, params = quantize_weight(np.ones((2, 2), np.float32), axis=None, min_scale=np.array([0.0, 0.5]))
    assert float(params.scale) == 0.5


def test_weights_of_zeros_have_codes_of_zeros_and_a_positive_scale() -> None:
    codes, params = quantize_weight(np.zeros((2, 3), np.float32), axis=0)
    assert not codes.any()
    assert (params.scale > 0).all()


def test_weights_of_seven_bits_keep_sums_of_two_products_in_16_bits() -> None:
    weight = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    codes, params = quantize_weight(weight, 0, weight_peak=ASYMMETRIC_7BIT.weight_peak)
    assert np.abs(codes).max(axis=1).tolist() == [63] * 4
    assert 2 * 255 * int(np.abs(codes).max()) <= np.iinfo(np.int16).max
    error = np.abs(codes * params.scale.astype(np.float64)[:, None] - weight)
    assert (error <= 0.5 * params.scale[:, None] * (1 + 1e-4)).all()
