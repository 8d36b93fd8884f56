"""The self-test of a package on a device.

A session runs the golden inputs, and each output is compared with its golden output within a tolerance.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.golden import GoldenOutput, resample
from edgekit_runtime.package.row_sets import AlignedRows, Arrays, align_rows
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.session import Session

if TYPE_CHECKING:
    from edgekit_runtime.tasks.answerer import Answerer

_EXACT_KINDS = "biu"  # bool and integers, as float64 cannot hold all of them


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """The comparison of an output with its golden output.

    Attributes:
        name: The name of the output. In a pipeline it is `STAGE/NAME`. The name `answer` is used if the
            task cannot decode the outputs.
        passed: Whether enough values are within the tolerance.
        wrong_count: The number of values outside the tolerance, or of unmatched rows if the number of rows
            depends on the data. None if the output is missing or has another dtype or shape.
        max_abs_error: The largest difference of two finite values, or None if `wrong_count` is None.
        message: A sentence that states what was compared and how large the difference is.
    """

    name: str
    passed: bool
    wrong_count: int | None
    max_abs_error: float | None
    message: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    checks: tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)


Expected = tuple[tuple[GoldenOutput, np.ndarray[Any, np.dtype[Any]]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class GoldenCase:
    """A copy of a package's golden tensors, which stays valid after the package is closed.

    Attributes:
        inputs: A dict from input name to golden input, ready for `Session.run`.
        expected: The golden outputs for `inputs` with their stored values.
        rows: The other golden rows, each a pair of a seed and the expected outputs. `resample` creates the
            inputs of a row from `inputs` and the seed.
        answerer: Checks that the outputs can be decoded, or None.
        members: A dict from the name of a pipeline stage to the golden tensors of its model.
    """

    inputs: Mapping[str, np.ndarray[Any, np.dtype[Any]]]
    expected: Expected
    rows: tuple[tuple[int, Expected], ...] = ()
    answerer: "Answerer | None" = None
    members: "Mapping[str, GoldenCase]" = field(default_factory=dict)

    def check(self, session: Session) -> SelfTest:
        """Run the session on all golden rows and compare its outputs with the golden outputs.

        If the task of the package cannot decode the outputs, a failed check `answer` is added.

        Raises:
            DataError: The inputs of the session differ from the golden inputs.
        """
        # Those of members first: they say which model is wrong.
        sessions: Mapping[str, Session] = getattr(session, "sessions", {})
        of_members = [
            replace(check, name=f"{name}/{check.name}", message=f"stage '{name}': {check.message}")
            for name, case in self.members.items()
            for check in case.check(sessions[name]).checks
        ]
        checks = {check.name: check for check in self.compare(session.run(self.inputs))}
        for seed, expected in self.rows:
            for check in _check_all(expected, session.run(resample(self.inputs, seed))):
                checks[check.name] = _join(checks[check.name], check, f"golden row of seed {seed}: ")
        return SelfTest((*of_members, *checks.values()))

    def compare(self, outputs: Arrays) -> list[OutputCheck]:
        """Return how outputs for `inputs` compare with the golden outputs.

        If the package's task cannot decode the outputs, a failed check `answer` is added.
        """
        checks = _check_all(self.expected, outputs)
        fault = None if self.answerer is None else self.answerer.find_fault(self.inputs, outputs)
        return checks if fault is None else [*checks, OutputCheck("answer", False, None, None, fault)]


def read_golden(package: OpenedPackage) -> GoldenCase:
    golden = package.manifest.golden
    expected = tuple((output, output.decode(package.read(output.path))) for output in golden.outputs)
    rows: list[tuple[int, Expected]] = []
    for index, seed in enumerate(golden.rows.seeds if golden.rows is not None else ()):
        row = [outputs[index] for outputs in golden.row_outputs()]
        rows.append((seed, tuple((output, _decode_row(package, output, index)) for output in row)))
    members = {name: read_golden(member) for name, member in package.list_members().items()}
    return GoldenCase(read_golden_inputs(package), expected, tuple(rows), find_answerer(package), members)


def find_answerer(package: OpenedPackage) -> "Answerer | None":
    """Return the preprocessing, labels and task of a package, or None if it has none of them."""
    if not package.manifest.needs_answerer:
        return None
    from edgekit_runtime.tasks.answerer import open_answerer  # which models of plain tensors do not need

    return open_answerer(package)


def _decode_row(package: OpenedPackage, output: GoldenOutput, row: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the stored values of the row at this index among the further ones."""
    begin = row * output.size_bytes
    return output.decode(package.read(output.path)[begin : begin + output.size_bytes])


def read_golden_inputs(package: OpenedPackage) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Return the golden inputs of a package, ready for `Session.run`."""
    return {
        golden.name: golden.decode(package.read(golden.path)) for golden in package.manifest.golden.inputs
    }


def run_selftest(session: Session, package: OpenedPackage) -> SelfTest:
    """Run the session on the golden inputs and compare its outputs with the golden outputs.

    Raises:
        DataError: The inputs of the session differ from the golden inputs.
    """
    return read_golden(package).check(session)


def _join(first: OutputCheck, row: OutputCheck, where: str) -> OutputCheck:
    """Return the check of an output extended by a row; the message is that of the first failure."""
    if first.max_abs_error is None or first.wrong_count is None or row.wrong_count is None:
        return first if not first.passed else replace(row, message=where + row.message)
    return OutputCheck(
        first.name,
        first.passed and row.passed,
        first.wrong_count + row.wrong_count,
        max(first.max_abs_error, row.max_abs_error or 0.0),
        first.message if row.passed or not first.passed else where + row.message,
    )


def _check_all(expected: Expected, outputs: Arrays) -> list[OutputCheck]:
    """Return the checks of all outputs; those whose rows are a set are aligned first."""
    sets = {
        golden.name: (golden.axis, values)
        for golden, values in expected
        if golden.axis is not None and _fits(golden, outputs.get(golden.name))
    }
    aligned = align_rows(
        outputs,
        {name: values for name, (_, values) in sets.items()},
        {name: axis for name, (axis, _) in sets.items()},
    )
    return [_check(golden, values, outputs, aligned) for golden, values in expected]


def _fits(golden: GoldenOutput, output: np.ndarray[Any, np.dtype[Any]] | None) -> bool:
    """Whether dtype and shape are right, apart from a number of rows that depends on the data."""
    return (
        output is not None
        and output.dtype == golden.dtype
        and output.ndim == len(golden.shape)
        and all(
            size == want or axis == golden.axis
            for axis, (size, want) in enumerate(zip(output.shape, golden.shape, strict=True))
        )
    )


def _check(
    golden: GoldenOutput,
    expected: np.ndarray[Any, np.dtype[Any]],
    outputs: Arrays,
    sets: AlignedRows,
) -> OutputCheck:
    name, output = golden.name, outputs.get(golden.name)
    if output is None:
        return OutputCheck(name, False, None, None, f"output '{name}' is missing, got {sorted(outputs)}")
    if not _fits(golden, output):
        message = (
            f"output '{name}' is {output.dtype} {output.shape}, expected {expected.dtype} {golden.shape}"
        )
        return OutputCheck(name, False, None, None, message)
    if golden.axis is None:
        return _compare(golden, expected.reshape(-1), golden.pick(output))[0]
    check, right = _compare(golden, expected.reshape(-1), sets.outputs[name].reshape(-1))
    rows = np.moveaxis(right.reshape(expected.shape), golden.axis, -1)
    wrong = int(np.count_nonzero(~rows.all(axis=tuple(range(rows.ndim - 1))) | sets.missing[name]))
    count, expected_count = output.shape[golden.axis], golden.shape[golden.axis]
    message = (
        f"output '{name}': {wrong} of {rows.shape[-1]} rows have no counterpart within {golden.atol:g}; it"
        f" has {count} rows, expected {expected_count}; {golden.loose} and {golden.count_atol} may differ"
    )
    passed = wrong <= golden.loose and abs(count - expected_count) <= golden.count_atol
    return replace(check, passed=passed, wrong_count=wrong, message=message)


def _compare(
    golden: GoldenOutput, expected: np.ndarray[Any, np.dtype[Any]], output: np.ndarray[Any, np.dtype[Any]]
) -> tuple[OutputCheck, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return how the compared values, both [n], differ, and which are right."""
    atol, rtol = golden.atol, golden.rtol
    with np.errstate(invalid="ignore"):  # inf - inf; equality covers it below
        difference = np.abs(output.astype(np.float64) - expected.astype(np.float64))
        # NaN compares false with everything, so a NaN on either side is wrong; the same infinity is right.
        within = difference <= atol + rtol * np.abs(expected.astype(np.float64))
    right = (output == expected) | (within & np.isfinite(output) & np.isfinite(expected))
    if expected.dtype.kind in _EXACT_KINDS and atol == rtol == 0:
        right = output == expected
    wrong_count = int(right.size - np.count_nonzero(right))
    max_abs_error = float(np.max(difference, initial=0.0, where=np.isfinite(difference)))
    sampled = "" if golden.every == 1 else f" (one in {golden.every} is compared)"
    endless = int(np.count_nonzero(~right & ~np.isfinite(difference)))
    largest = f"the largest difference is {max_abs_error:g}"
    if endless:
        comparison = f"the largest difference of the others is {max_abs_error:g}"
        largest = f"{endless} of them are NaN or infinite in one of the two" + (
            f", {comparison}" if wrong_count > endless else ""
        )
    message = (
        f"output '{golden.name}': {wrong_count} of {right.size} values{sampled} differ by more than {atol:g}"
        f" + {rtol:g} * |expected|; {largest}"
    )
    return OutputCheck(golden.name, wrong_count == 0, wrong_count, max_abs_error, message), right
