"""Weights that are brought near to those of an earlier version: how far they may go, and what they keep."""

import numpy as np
import pytest

from edgekit_toolkit.quantize.near_version import WeightCodes, near_bias, near_floats, near_weight
from edgekit_toolkit.quantize.scheme import quantize_weight

CHANNELS, DEPTH = 24, 300


def versions(moved, grown=1.0):
    """Float weights of two versions, `moved` steps of a code apart (root mean square), and their codes."""
    rng = np.random.default_rng(0)
    before = rng.normal(0, 1, (CHANNELS, DEPTH)).astype(np.float32)
    after = before + rng.normal(0, moved * np.abs(before).max() / 127, before.shape).astype(np.float32)
    after *= np.linspace(1, grown, CHANNELS, dtype=np.float32)[:, None]
    found = []
    for weight in (before, after):
        codes, params = quantize_weight(weight, 0)
        found.append(WeightCodes(codes, params.scale, 0))
    return after, found[1], found[0]


def widen(coded):
    return coded.codes * coded.along(coded.scales.astype(np.float64))


def predict(earlier, scales):
    """What a delta predicts from the scales of both, as the device computes it."""
    multipliers = np.rint(4096 * (earlier.scales.astype(np.float64) / scales)).astype(np.int64)
    return (earlier.codes.astype(np.int64) * multipliers[:, None] + 2048) >> 12


@pytest.mark.parametrize("grown", [1.0, 2.5, 0.3])
def test_heavily_changed_weights_differ_by_whole_steps(grown):
    wanted, new, earlier = versions(moved=6, grown=grown)
    made, step = near_weight(new, earlier)
    assert step >= 3
    differences = made.codes - np.clip(predict(earlier, made.scales), -128, 127)
    assert not (differences % step).any()
    # Half a step, the clipped peak (1 %), and half a code of the first rounding.
    allowed = made.scales * (step / 2 + 0.01 * 127) + new.scales / 2 + made.scales
    assert (np.abs(widen(made) - wanted) <= allowed[:, None]).all()
    # A change of 6 codes (root mean square) against steps of at most 4.5, and the rounding of both.
    assert np.mean(((widen(made) - widen(new)) / new.scales[:, None]) ** 2) < 0.1 * 6**2


def test_slightly_changed_weights_keep_their_codes_and_get_near_scales_back():
    _, new, earlier = versions(moved=0.2)
    new = new._replace(scales=new.scales * np.linspace(1, 1.02, CHANNELS, dtype=np.float32))
    made, step = near_weight(new, earlier)
    assert step == 1
    assert np.array_equal(made.codes, new.codes)
    near = np.abs(new.scales / earlier.scales - 1) < 0.5 / 127
    assert near.any() and not near.all()
    assert np.array_equal(made.scales[near], earlier.scales[near])
    assert np.array_equal(made.scales[~near], new.scales[~near])


def test_channel_that_was_empty_takes_the_new_weights():
    _, new, earlier = versions(moved=6)
    codes, scales = earlier.codes.copy(), earlier.scales.copy()
    codes[0], scales[0] = 0, 1e-30
    made, step = near_weight(new, WeightCodes(codes, scales, 0))
    assert np.abs(widen(made) - widen(new))[0].max() <= (step / 2 + 1) * new.scales[0]


def test_seven_bit_weights_stay_in_seven_bits():
    rng = np.random.default_rng(1)
    pair = []
    for _ in range(2):
        codes, params = quantize_weight(rng.normal(0, 1, (8, 64)).astype(np.float32), 0, weight_peak=63)
        pair.append(WeightCodes(codes, params.scale, 0))
    made, step = near_weight(*pair)
    assert step > 1 and np.abs(made.codes.astype(int)).max() <= 63


def test_bias_follows_the_scales_of_its_weights():
    _, new, earlier = versions(moved=6, grown=2.5)
    made, step = near_weight(new, earlier)
    values = np.random.default_rng(2).normal(0, 50, CHANNELS)
    now, was = (
        WeightCodes(
            np.rint(values / (0.02 * one.scales)).astype(np.int32), (0.02 * one.scales).astype(np.float32), 0
        )
        for one in (new, earlier)
    )
    bias = near_bias(now, was, (made, new, earlier), step)
    assert np.allclose(bias.scales, 0.02 * made.scales, rtol=1e-6)
    assert np.abs(bias.codes * bias.scales - values).max() <= (8 * step + 1) * bias.scales.max()


def test_single_floats_lose_their_low_bits_only():
    rng = np.random.default_rng(3)
    earlier = rng.normal(0, 1, 500).astype(np.float32)
    new = (earlier + rng.normal(0, 0.3, 500)).astype(np.float32)
    new[:2] = np.inf, np.nan
    made = near_floats(new, earlier)
    assert made.dtype == np.float32 and np.isinf(made[0]) and np.isnan(made[1])
    assert (np.abs(made[2:] - new[2:]) <= 2**-11 * np.abs(new[2:]).astype(np.float64)).all()
    same_sign = np.signbit(new) == np.signbit(earlier)
    same_sign[:2] = False
    assert not ((made.view(np.int32) - earlier.view(np.int32))[same_sign] % 2**13).any()


@pytest.mark.parametrize("moved", [1e-5, 1e-3, 0.3])
def test_half_floats_change_by_multiples_of_one_step(moved):
    rng = np.random.default_rng(3)
    earlier = rng.normal(0, 0.1, 5000).astype(np.float16)
    new = (earlier + rng.normal(0, moved, 5000)).astype(np.float16)
    new[:2] = np.inf, np.nan
    made = near_floats(new, earlier)
    assert made.dtype == np.float16 and np.isinf(made[0]) and np.isnan(made[1])
    change = new[2:].astype(np.float64) - earlier[2:]
    error = made[2:].astype(np.float64) - new[2:]
    # The error of uniform steps of at most 0.9 times the change is 0.81 / 12, a quarter more toward zero.
    assert np.mean(error**2) < 0.09 * np.mean(change**2)
    assert len(np.unique(made[2:] - earlier[2:].astype(np.float64))) < len(np.unique(new - earlier))


def test_equal_floats_stay_as_they_are():
    for dtype in (np.float16, np.float32):
        same = np.array([0.0, -0.0, 1.5, np.nan, np.inf, 6e-8, 1, 2], dtype)
        assert near_floats(same, same).tobytes() == same.tobytes()
