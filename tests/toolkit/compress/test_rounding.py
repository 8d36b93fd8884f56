"""Second-order rounding of rows, without a model."""

import numpy as np
import pytest
from tests.toolkit.cases import cases

from edgekit_toolkit.compress.moments import Moments
from edgekit_toolkit.compress.rounding import (
    choose_scale,
    damp,
    fit_scale,
    limits,
    measure_errors,
    round_rows,
)
from edgekit_toolkit.onnx_graph.layers import Floats

SEED = 3


def moment_of(patches: Floats) -> Floats:
    return damp(patches.transpose(1, 2, 0) @ patches.transpose(1, 0, 2) / len(patches))


def correlated_patches(count: int, groups: int, columns: int) -> Floats:
    rng = np.random.default_rng(SEED)
    mixing = rng.normal(size=(groups, columns, columns)) + 2
    return np.einsum("pgk,gkl->pgl", rng.normal(size=(count, groups, columns)), mixing)


def error(rows: Floats, rounded: Floats, moment: Floats) -> Floats:
    return measure_errors(rounded - rows, moment)


def test_columns_that_move_together_share_their_errors() -> None:
    moment = np.array([[[1, 0.9], [0.9, 1]]])
    codes = round_rows(np.array([[[0.4, 0.4]]]), moment, np.ones((1, 1, 1)), 7)
    assert sorted(codes.ravel()) == [0, 1]  # nearest would be 0, 0


@pytest.mark.parametrize(("groups", "rows", "columns"), [(1, 16, 150), (24, 1, 9), (4, 6, 18)])
def test_error_is_well_below_that_of_nearest_codes(groups: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(SEED)
    weights = rng.normal(size=(groups, rows, columns))
    moment = moment_of(correlated_patches(4000, groups, columns))
    scale = np.abs(weights).max(axis=2, keepdims=True) / 7
    nearest = error(weights, np.rint(weights / scale) * scale, moment)
    second_order = error(weights, round_rows(weights, moment, scale, 7) * scale, moment)
    assert (second_order <= nearest).all()
    assert second_order.mean() < 0.7 * nearest.mean()


@cases("peak", [1, 3, 7, 31, 63, 127])
def test_codes_are_whole_numbers_within_the_bits(peak: int) -> None:
    rng = np.random.default_rng(SEED)
    weights = rng.normal(size=(1, 8, 20)) * 10.0 ** rng.integers(-6, 6, size=(1, 8, 1))
    moment = moment_of(correlated_patches(500, 1, 20))
    codes = round_rows(weights, moment, choose_scale(weights, moment, peak), peak)
    low, high = limits(peak)
    assert (codes == np.rint(codes)).all()
    assert codes.min() >= low
    assert codes.max() <= high


def test_weights_that_are_codes_already_stay() -> None:
    rng = np.random.default_rng(SEED)
    wanted = rng.integers(-3, 4, size=(1, 8, 30)).astype(np.float64)
    moment = moment_of(correlated_patches(1000, 1, 30))
    scale = np.full((1, 8, 1), 0.25)
    np.testing.assert_array_equal(round_rows(wanted * 0.25, moment, scale, 3), wanted)


def test_fewer_samples_than_columns_give_finite_codes() -> None:
    rng = np.random.default_rng(SEED)
    patches = rng.normal(size=(5, 1, 64))
    moments = Moments.measure(patches, patches, centred=True)
    weights = rng.normal(size=(1, 4, 64))
    fitted = moments.fit(weights)
    scale = choose_scale(fitted, moments.damped, 7)
    rounded = round_rows(fitted, moments.damped, scale, 7) * scale
    # What the samples do not show is rounded as if all inputs were independent.
    assert np.square(rounded - weights).mean() < 0.1 * np.square(weights).mean()


def test_inputs_that_are_always_zero_give_finite_codes() -> None:
    moments = Moments.measure(np.zeros((50, 3, 9)), np.zeros((50, 3, 9)), centred=True)
    weights = np.random.default_rng(SEED).normal(size=(3, 1, 9))
    scale = choose_scale(moments.fit(weights), moments.damped, 7)
    assert np.isfinite(round_rows(weights, moments.damped, scale, 7)).all()


def test_rows_of_zeros_stay_zero() -> None:
    moment = moment_of(correlated_patches(100, 1, 6))
    zeros = np.zeros((1, 2, 6))
    scale = choose_scale(zeros, moment, 7)
    codes = round_rows(zeros, moment, scale, 7)
    assert not codes.any()
    np.testing.assert_array_equal(fit_scale(codes, zeros, moment, scale), scale)


def test_fitted_scale_lowers_the_error_of_given_codes() -> None:
    rng = np.random.default_rng(SEED)
    weights = rng.normal(size=(1, 8, 40))
    moment = moment_of(correlated_patches(1000, 1, 40))
    scale = choose_scale(weights, moment, 3)
    codes = round_rows(weights, moment, scale, 3)
    fitted = fit_scale(codes, weights, moment, scale)
    assert (error(weights, codes * fitted, moment) <= error(weights, codes * scale, moment) + 1e-12).all()


def test_rows_are_fitted_to_inputs_that_rounding_changed() -> None:
    rng = np.random.default_rng(SEED)
    floats = correlated_patches(2000, 1, 12)
    changed = 0.8 * floats + 0.1 * rng.normal(size=floats.shape)
    moments = Moments.measure(changed, floats, centred=True)
    weights = rng.normal(size=(1, 4, 12))
    wanted = np.einsum("pgk,grk->pgr", floats - floats.mean(axis=0), weights)
    before, after = (
        np.einsum("pgk,grk->pgr", changed - changed.mean(axis=0), rows)
        for rows in (weights, moments.fit(weights))
    )
    assert np.square(after - wanted).mean() < 0.5 * np.square(before - wanted).mean()
