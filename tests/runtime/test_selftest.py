import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.archive import OpenedPackage, read_package, write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import read_golden_inputs, run_selftest
from edgekit_runtime.tensors import TensorSpec

EXPECTED = np.array([[1.0, 0.0]], np.float32)  # [-1, -0.5, 0, 0.5] @ the weights of the test model, by hand


class FixedSession:
    """Returns what it is told to."""

    inputs = (TensorSpec("x", "float32", ("N", 4)),)
    outputs = (TensorSpec("y", "float32", ("N", 2)),)

    def __init__(self, outputs: dict[str, Any]) -> None:
        self._outputs = outputs

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        for spec in self.inputs:
            spec.check(inputs[spec.name])
        return self._outputs

    def close(self) -> None:
        pass


@pytest.fixture
def package(maker: Any, package_path: Path) -> Iterator[OpenedPackage]:
    with read_package(package_path, maker.trust) as opened:
        yield opened


def write_golden(maker: Any, path: Path, expected: np.ndarray, atol: float, rtol: float) -> OpenedPackage:
    """Write a package whose golden output is `expected`."""
    artifacts = {**maker.artifacts, "golden/y.bin": expected.tobytes()}
    name, shape = str(expected.dtype), expected.shape
    golden = Golden(
        maker.manifest().golden.inputs,
        (GoldenOutput(name="y", dtype=name, shape=shape, path="golden/y.bin", atol=atol, rtol=rtol),),
    )
    outputs = (TensorSpec("y", name, shape),)
    write_package(path, maker.manifest(artifacts, golden=golden, outputs=outputs), artifacts, maker.signer)
    return read_package(path, maker.trust)


def test_the_golden_inputs_are_the_decoded_codes(package: OpenedPackage) -> None:
    inputs = read_golden_inputs(package)
    assert (inputs["x"].dtype, inputs["x"].tolist()) == (np.float32, [[-1.0, -0.5, 0.0, 0.5]])


def test_the_model_of_the_package_passes(package: OpenedPackage) -> None:
    pytest.importorskip("onnxruntime")
    result = run_selftest(open_session(package), package)
    assert (result.passed, result.checks[0].wrong_count) == (True, 0)


def test_a_golden_output_that_the_model_does_not_give_fails(maker: Any, package_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with write_golden(maker, package_path, EXPECTED + np.float32([[0, 0.25]]), 0.0, 0.0) as package:
        (check,) = run_selftest(open_session(package), package).checks
    assert (check.passed, check.wrong_count, check.max_abs_error) == (False, 1, 0.25)
    assert "1 of 2 values differ" in check.message


@pytest.mark.parametrize(
    ("got", "expected", "atol", "rtol", "passes"),
    [
        (1.5, 1.0, 0.5, 0.0, True),
        (1.5, 1.0, 0.4375, 0.0, False),
        (3.0, 2.0, 0.0, 0.5, True),
        (3.0, 2.0, 0.0, 0.4375, False),
        (-3.0, -2.0, 0.0, 0.5, True),
        (float("nan"), 1.0, 1e30, 1e30, False),
        (1.0, float("nan"), 1e30, 1e30, False),
        (float("nan"), float("nan"), 1e30, 0.0, False),
        (float("inf"), 1.0, 1e30, 1e30, False),
        (1.0, float("inf"), 1.0, 1.0, False),
        (float("inf"), float("inf"), 0.0, 0.0, True),
        (float("-inf"), float("inf"), 1e30, 1.0, False),
    ],
)
def test_the_tolerance_is_atol_plus_rtol_times_expected(
    got: float, expected: float, atol: float, rtol: float, passes: bool, maker: Any, package_path: Path
) -> None:
    with write_golden(maker, package_path, np.float32([[expected, 0]]), atol, rtol) as package:
        assert run_selftest(FixedSession({"y": np.float32([[got, 0]])}), package).passed is passes


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ([np.nan, 0], r"1 of 2 values .*; 1 of them are NaN or infinite in one of the two$"),
        (
            [np.nan, 0.5],
            r"2 of 2 .*; 1 of them are NaN .* two, the largest difference of the others is 0\.5$",
        ),
        ([1, 0.5], r"1 of 2 values .*; the largest difference is 0\.5$"),
    ],
)
def test_a_value_that_is_not_finite_is_said_to_be_so(
    got: list[float], message: str, package: OpenedPackage
) -> None:
    """It has no difference: "the largest difference is 0" would not explain the failure."""
    (check,) = run_selftest(FixedSession({"y": np.float32([got])}), package).checks
    assert not check.passed
    assert re.search(message, check.message), check.message


def test_exact_integers_are_compared_beyond_float64(maker: Any, package_path: Path) -> None:
    expected = np.array([[2**60, 2]])
    with write_golden(maker, package_path, expected, 0, 0) as package:
        assert run_selftest(FixedSession({"y": expected}), package).passed
        assert not run_selftest(FixedSession({"y": expected + 1}), package).passed


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ({}, "'y' is missing"),
        ({"z": EXPECTED}, "'y' is missing"),
        ({"y": EXPECTED.astype(np.float64)}, "float64"),
        ({"y": EXPECTED[0]}, r"(2,)"),
    ],
)
def test_an_output_of_another_kind_fails_with_what_it_is(
    outputs: dict[str, Any], reason: str, package: OpenedPackage
) -> None:
    (check,) = run_selftest(FixedSession(outputs), package).checks
    assert (check.passed, check.wrong_count, reason in check.message) == (False, None, True)


def test_a_session_of_other_inputs_is_a_data_error(package: OpenedPackage) -> None:
    session = FixedSession({})
    session.inputs = (TensorSpec("x", "float32", ("N", 5)),)
    with pytest.raises(DataError, match="'x'"):
        run_selftest(session, package)


def test_golden_inputs_without_codes_are_read_as_they_are(maker: Any, package_path: Path) -> None:
    values = np.float32([[1, 2, 3, 4]])
    artifacts = {**maker.artifacts, "golden/x.bin": values.tobytes()}
    golden = Golden((GoldenInput("x", "float32", (1, 4), "golden/x.bin"),), maker.manifest().golden.outputs)
    write_package(package_path, maker.manifest(artifacts, golden=golden), artifacts, maker.signer)
    with read_package(package_path, maker.trust) as package:
        assert read_golden_inputs(package)["x"].tolist() == values.tolist()


@pytest.fixture
def sampled(maker: Any, package_path: Path) -> Iterator[OpenedPackage]:
    """A package with repeated codes, and of its output [1, 2] only the first value."""
    write_package(package_path, maker.sampled_manifest(), maker.sampled_artifacts, maker.signer)
    with read_package(package_path, maker.trust) as opened:
        yield opened


def test_repeated_codes_and_a_sampled_output_pass_with_the_model(sampled: OpenedPackage) -> None:
    pytest.importorskip("onnxruntime")
    assert read_golden_inputs(sampled)["x"].tolist() == [[-1.0, -1.0, 0.5, 0.5]]
    (check,) = run_selftest(open_session(sampled), sampled).checks
    assert (check.passed, check.wrong_count) == (True, 0)
    assert "0 of 1 values (one in 2 is compared)" in check.message


@pytest.mark.parametrize(("got", "passes"), [([2, 0], True), ([2, 99], True), ([99, 0], False)])
def test_only_stored_values_are_compared(got: list[float], passes: bool, sampled: OpenedPackage) -> None:
    # By hand: -1 * (1 + 3) + 0.5 * (5 + 7) = 2
    assert run_selftest(FixedSession({"y": np.float32([got])}), sampled).passed is passes


@pytest.mark.parametrize("got", [np.float32([2]), np.float32([[2]]), np.float32([[2, 0], [0, 0]])])
def test_a_sampled_output_of_another_shape_fails_with_the_full_shape(
    got: np.ndarray, sampled: OpenedPackage
) -> None:
    (check,) = run_selftest(FixedSession({"y": got}), sampled).checks
    assert (check.passed, check.wrong_count, "expected float32 (1, 2)" in check.message) == (
        False,
        None,
        True,
    )


ROWS = np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], np.float32)


def check_rows(
    maker: Any, path: Path, got: np.ndarray, *, every: int = 1, loose: int = 1, more: int = 1
) -> bool:
    """Whether `got` passes for `ROWS`, whose number depends on the data."""
    stored = ROWS[::every]
    artifacts = {**maker.artifacts, "golden/y.bin": stored.tobytes()}
    output = GoldenOutput(
        name="y",
        dtype="float32",
        shape=ROWS.shape,
        path="golden/y.bin",
        atol=0.1,
        rtol=0.0,
        every=every,
        axis=0,
        loose=loose,
        count_atol=more,
    )
    golden = Golden(maker.manifest().golden.inputs, (output,))
    manifest = maker.manifest(artifacts, golden=golden, outputs=(TensorSpec("y", "float32", ("K", 2)),))
    write_package(path, manifest, artifacts, maker.signer)
    with read_package(path, maker.trust) as opened:
        return run_selftest(FixedSession({"y": got}), opened).passed


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("places", "shift", "passed"),
    [
        ([4, 2, 0, 1, 3], 0.05, True),
        ([4, 2, 0, 1], 0.0, True),
        ([0, 1, 2, 3, 4, 1], 0.0, True),
        ([0, 1, 2, 3, 4, 1, 1], 0.0, False),
        ([0, 1, 2], 0.0, False),
        ([], 0.0, False),
        ([0, 1, 2, 3, 4], 0.2, False),
    ],
)
def test_rows_whose_number_depends_on_the_data_are_compared_as_a_set(
    maker: Any, tmp_path: Path, places: list[int], shift: float, passed: bool, every: int
) -> None:
    got = ROWS[places] + np.float32(shift)
    assert check_rows(maker, tmp_path / "set.edgepkg", got, every=every) == passed


def test_rows_of_another_width_fail(maker: Any, tmp_path: Path) -> None:
    assert not check_rows(maker, tmp_path / "set.edgepkg", ROWS[:, :1])


def test_number_of_rows_has_a_bound_of_its_own(maker: Any, tmp_path: Path) -> None:
    assert not check_rows(maker, tmp_path / "set.edgepkg", ROWS[:4], loose=2, more=0)
    assert not check_rows(maker, tmp_path / "set.edgepkg", ROWS[:3], loose=1, more=2)


@pytest.mark.parametrize("axis", [2, -1, True])
def test_axis_that_cannot_be_is_refused(axis: Any) -> None:
    with pytest.raises(DataError, match="expected an axis of"):
        GoldenOutput(
            name="y", dtype="float32", shape=(5, 2), path="y.bin", atol=0.1, rtol=0.0, every=1, axis=axis
        )


@pytest.mark.parametrize(
    ("axis", "loose", "more"),
    [(0, -1, 0), (0, 2, 0), (0, 3, 0), (0, True, 0), (0, 0, 3), (0, 0, -1), (None, 1, 0)],
)
def test_bounds_with_which_every_output_could_pass_are_refused(axis: Any, loose: int, more: int) -> None:
    with pytest.raises(DataError, match="half of the rows"):
        GoldenOutput(
            name="y",
            dtype="float32",
            shape=(5, 2),
            path="y.bin",
            atol=0.1,
            rtol=0.0,
            every=2,
            axis=axis,
            loose=loose,
            count_atol=more,
        )
