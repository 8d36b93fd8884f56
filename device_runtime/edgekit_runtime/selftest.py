"""The self-test: does this device compute what the package promises?

Golden inputs go through a session, and each golden output is compared within its tolerance. It says nothing
about speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgekit_runtime.archive import OpenedPackage
from edgekit_runtime.sessions.session import Session

_EXACT_KINDS = "biu"  # bool and integers, of which float64 cannot hold all


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """How one output compares.

    Attributes:
        name: of the output.
        passed: whether all values are within the tolerance.
        wrong_count: how many are not, or None when dtype or shape differ.
        max_abs_error: the largest difference of two finite values, or None when dtype or shape differ.
        message: what, expected and got, in one sentence.
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


def read_golden_inputs(package: OpenedPackage) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Return the golden inputs of a package, ready for `Session.run`."""
    return {
        golden.name: golden.decode(package.read(golden.path)) for golden in package.manifest.golden.inputs
    }


def run_selftest(session: Session, package: OpenedPackage) -> SelfTest:
    """Return how the session's outputs for the golden inputs compare with the golden outputs.

    Args:
        session: of this package.
        package: verified.

    Raises:
        DataError: the session takes other inputs than the package states.
        BackendError: the engine failed.
    """
    got = session.run(read_golden_inputs(package))
    return SelfTest(
        tuple(
            _compare(golden.name, got, golden.decode(package.read(golden.path)), golden.atol, golden.rtol)
            for golden in package.manifest.golden.outputs
        )
    )


def _compare(
    name: str,
    outputs: Mapping[str, np.ndarray[Any, np.dtype[Any]]],
    expected: np.ndarray[Any, np.dtype[Any]],
    atol: float,
    rtol: float,
) -> OutputCheck:
    got = outputs.get(name)
    if got is None:
        return OutputCheck(name, False, None, None, f"output '{name}' is missing, got {sorted(outputs)}")
    if got.dtype != expected.dtype or got.shape != expected.shape:
        message = f"output '{name}' is {got.dtype} {got.shape}, expected {expected.dtype} {expected.shape}"
        return OutputCheck(name, False, None, None, message)
    with np.errstate(invalid="ignore"):  # inf - inf; equality covers it below
        difference = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        # NaN compares false with everything, so a NaN on either side is wrong; the same infinity is right.
        within = difference <= atol + rtol * np.abs(expected.astype(np.float64))
    right = (got == expected) | (within & np.isfinite(got) & np.isfinite(expected))
    if expected.dtype.kind in _EXACT_KINDS and atol == rtol == 0:
        right = got == expected
    wrong_count = int(right.size - np.count_nonzero(right))
    max_abs_error = float(np.max(difference, initial=0.0, where=np.isfinite(difference)))
    message = (
        f"output '{name}': {wrong_count} of {right.size} values differ by more than {atol:g} + {rtol:g} *"
        f" |expected|; the largest difference is {max_abs_error:g}"
    )
    return OutputCheck(name, wrong_count == 0, wrong_count, max_abs_error, message)
