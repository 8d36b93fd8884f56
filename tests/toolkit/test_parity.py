import re

import numpy as np
import pytest
from tests.toolkit.cases import cases

from edgekit_toolkit.passes.parity import Tolerance, compare, worst


def test_equal_outputs_are_ok_without_error():
    want = {"y": np.array([[1.0, 5.0]], np.float32)}
    verdict = compare(want, {"y": want["y"].copy()})
    assert verdict.ok
    assert verdict.max_abs_error == 0


def test_error_beyond_a_fraction_of_the_range_is_refused_with_both_figures():
    want = {"y": np.linspace(0, 100, 11, dtype=np.float32)}
    got = {"y": want["y"] + np.float32(0.01)}
    assert compare(want, got, Tolerance(range_fraction=2e-4)).ok
    verdict = compare(want, got, Tolerance(range_fraction=5e-5))
    assert not verdict.ok
    assert verdict.max_abs_error == pytest.approx(0.01, rel=1e-2)  # float32 near 100 resolves 8e-6
    assert verdict.relative_to_range == pytest.approx(1e-4, rel=1e-2)
    assert "'y' differs by 0.01" in verdict.reason


def test_rounding_of_a_large_constant_output_is_ok():
    want = {"y": np.full(4, 1000, np.float32)}
    assert compare(want, {"y": np.nextafter(want["y"], np.float32(2000))}).ok
    assert not compare(want, {"y": want["y"] + np.float32(0.01)}).ok


def test_range_of_a_lone_number_begins_at_zero():
    want = {"y": np.array([[100.0]], np.float32)}
    assert compare(want, {"y": want["y"] + np.float32(0.004)}, Tolerance(range_fraction=5e-5)).ok
    assert not compare(want, {"y": want["y"] + np.float32(0.01)}, Tolerance(range_fraction=5e-5)).ok


def test_error_of_an_output_that_is_zero_throughout_is_told_as_it_is():
    want = {"y": np.zeros(4, np.float32)}
    parity = compare(want, {"y": want["y"] + np.float32(0.25)})
    assert (parity.ok, parity.relative_to_range) == (False, 0.25)


def test_tolerance_is_per_output_range_and_not_of_the_largest_output():
    want = {"large": np.array([0, 1e6], np.float32), "small": np.array([0, 1], np.float32)}
    got = {"large": want["large"], "small": want["small"] + np.float32(0.001)}
    verdict = compare(want, got)
    assert not verdict.ok
    assert "'small'" in verdict.reason


@cases(
    ("got", "reason"),
    [
        ({"z": np.zeros((1, 2), np.float32)}, "outputs are"),
        ({"y": np.zeros((1, 2), np.float64)}, "dtype float64, expected float32"),
        ({"y": np.zeros((2, 1), np.float32)}, r"shape \[2, 1\], expected \[1, 2\]"),
        ({"y": np.array([[0, np.nan]], np.float32)}, "1 values that are NaN"),
        ({"y": np.array([[0, np.inf]], np.float32)}, "1 values that are NaN"),
    ],
)
def test_outputs_that_do_not_line_up_are_refused(got, reason):
    verdict = compare({"y": np.zeros((1, 2), np.float32)}, got)
    assert not verdict.ok
    assert verdict.max_abs_error == np.inf
    assert re.search(reason, verdict.reason)


def test_nan_and_infinity_that_stay_in_place_are_ok():
    want = {"y": np.array([np.nan, -np.inf, 1, 2], np.float32)}
    assert compare(want, {"y": want["y"].copy()}).ok


def test_infinity_of_the_other_sign_is_refused():
    want = {"y": np.array([np.inf, 1, 2], np.float32)}
    assert not compare(want, {"y": np.array([-np.inf, 1, 2], np.float32)}).ok


def test_integers_must_be_equal():
    want = {"y": np.array([1, 2, 3], np.int64)}
    assert compare(want, {"y": want["y"].copy()}).ok
    verdict = compare(want, {"y": np.array([1, 2, 4], np.int64)})
    assert not verdict.ok
    assert verdict.max_abs_error == 1
    assert "1 of 3" in verdict.reason


def test_empty_outputs_are_ok():
    want = {"boxes": np.zeros((0, 4), np.float32)}
    assert compare(want, {"boxes": np.zeros((0, 4), np.float32)}).ok


def test_half_precision_is_judged_in_its_own_resolution():
    want = {"y": np.array([1.0, 2.0], np.float16)}
    assert compare(want, {"y": np.nextafter(want["y"], np.float16(3))}).ok


def test_worst_of_several_keeps_the_largest_error_and_first_reason():
    want = {"y": np.array([0.0, 1.0], np.float32)}
    fine = compare(want, want)
    off = compare(want, {"y": np.array([0.0, 2.0], np.float32)})
    verdict = worst([fine, off, fine])
    assert not verdict.ok
    assert verdict.max_abs_error == 1
    assert verdict.reason == off.reason
