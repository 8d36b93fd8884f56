"""The self-test: does this device compute what the package promises?

Golden inputs go through a session, and each golden output is compared within its tolerance. It says nothing
about speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.golden import GoldenOutput
from edgekit_runtime.sessions.session import Session

_EXACT_KINDS = "biu"  # bool and integers; float64 cannot hold all of them


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """The comparison of one output.

    Attributes:
        name: name of the output.
        passed: whether all compared values are within the tolerance.
        wrong_count: number of values outside the tolerance, or None when dtype or shape differ.
        max_abs_error: the largest difference of two finite values, or None when dtype or shape differ.
        message: one sentence with the check, the expected and the actual value.
    """

    name: str
    passed: bool
    wrong_count: int | None
    max_abs_error: float | None
    message: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The outcome of a self-test."""

    checks: tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether all outputs are right."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True, eq=False)
class GoldenCase:
    """A copy of a package's golden tensors, which outlives the package.

    Attributes:
        inputs: input name -> array, ready for `Session.run`.
        expected: each golden output with its stored values.
    """

    inputs: Mapping[str, np.ndarray[Any, np.dtype[Any]]]
    expected: tuple[tuple[GoldenOutput, np.ndarray[Any, np.dtype[Any]]], ...]

    def check(self, session: Session) -> SelfTest:
        """Return how the session's outputs compare with the golden outputs.

        Raises:
            DataError: the session takes other inputs.
            BackendError: the engine failed.
        """
        outputs = session.run(self.inputs)
        return SelfTest(tuple(_check(golden, values, outputs) for golden, values in self.expected))


def read_golden(package: OpenedPackage) -> GoldenCase:
    """Return the golden tensors of a package."""
    return GoldenCase(
        read_golden_inputs(package),
        tuple(
            (golden, golden.decode(package.read(golden.path))) for golden in package.manifest.golden.outputs
        ),
    )


def read_golden_inputs(package: OpenedPackage) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Return the golden inputs of a package, ready for `Session.run`."""
    return {
        golden.name: golden.decode(package.read(golden.path)) for golden in package.manifest.golden.inputs
    }


def run_selftest(session: Session, package: OpenedPackage) -> SelfTest:
    """Return how the session's outputs for the golden inputs compare with the golden outputs.

    Args:
        session: session of this package.
        package: the verified package.

    Raises:
        DataError: the session takes other inputs than the package states.
        BackendError: the engine failed.
    """
    return read_golden(package).check(session)


def _check(
    golden: GoldenOutput,
    expected: np.ndarray[Any, np.dtype[Any]],
    outputs: Mapping[str, np.ndarray[Any, np.dtype[Any]]],
) -> OutputCheck:
    name, got = golden.name, outputs.get(golden.name)
    if got is None:
        return OutputCheck(name, False, None, None, f"output '{name}' is missing, got {sorted(outputs)}")
    if got.dtype != expected.dtype or got.shape != golden.shape:
        message = f"output '{name}' is {got.dtype} {got.shape}, expected {expected.dtype} {golden.shape}"
        return OutputCheck(name, False, None, None, message)
    return _compare(golden, expected.reshape(-1), golden.pick(got))


def _compare(
    golden: GoldenOutput, expected: np.ndarray[Any, np.dtype[Any]], got: np.ndarray[Any, np.dtype[Any]]
) -> OutputCheck:
    """Return how the compared values, both [n], differ."""
    atol, rtol = golden.atol, golden.rtol
    with np.errstate(invalid="ignore"):  # inf - inf; equality covers it below
        difference = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        # NaN compares false with everything, so a NaN on either side is wrong; the same infinity is right.
        within = difference <= atol + rtol * np.abs(expected.astype(np.float64))
    right = (got == expected) | (within & np.isfinite(got) & np.isfinite(expected))
    if expected.dtype.kind in _EXACT_KINDS and atol == rtol == 0:
        right = got == expected
    wrong_count = int(right.size - np.count_nonzero(right))
    max_abs_error = float(np.max(difference, initial=0.0, where=np.isfinite(difference)))
    sampled = "" if golden.every == 1 else f" (one in {golden.every} is compared)"
    endless = int(np.count_nonzero(~right & ~np.isfinite(difference)))
    largest = f"the largest difference is {max_abs_error:g}"
    if endless:
        rest = f"the largest difference of the others is {max_abs_error:g}"
        largest = f"{endless} of them are NaN or infinite in one of the two" + (
            f", {rest}" if wrong_count > endless else ""
        )
    message = (
        f"output '{golden.name}': {wrong_count} of {right.size} values{sampled} differ by more than {atol:g}"
        f" + {rtol:g} * |expected|; {largest}"
    )
    return OutputCheck(golden.name, wrong_count == 0, wrong_count, max_abs_error, message)
