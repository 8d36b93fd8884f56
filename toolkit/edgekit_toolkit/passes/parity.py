"""Compares the outputs of a candidate with the outputs of the reference model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.package.row_sets import align_rows

Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed difference of an output, which is the sum of two terms.

    Attributes:
        range_fraction: A fraction of the range of the output, which is the largest minus the smallest finite
            value.
        ulps: A number of units in the last place (ulp) of the largest absolute value of the output, or of 1
            if all values are smaller. This term is needed for outputs with a large offset and a small range.
            It is also needed for sigmoid, tanh and softmax, because engines compute even small results with
            the rounding errors of values near 1.
    """

    range_fraction: float = 1e-5
    ulps: float = 4.0


@dataclass(frozen=True, slots=True)
class Parity:
    """The result of a comparison of outputs.

    Attributes:
        max_abs_error: The largest absolute difference, or infinity if names, shapes or dtypes differ.
        relative_to_range: The largest absolute difference of an output relative to the range of the output.
        ok: Whether all outputs are within the tolerance.
        reason: Why the outputs are not equal, or an empty string.
    """

    max_abs_error: float
    relative_to_range: float
    ok: bool
    reason: str


def compare(
    reference: Outputs,
    outputs: Outputs,
    tolerance: Tolerance | None = None,
    axes: Mapping[str, int] | None = None,
) -> Parity:
    """Compare `outputs` with `reference`.

    Names, dtypes, shapes, integers and booleans must be equal. Finite values must remain finite, and NaN and
    infinities must be equal.

    Args:
        reference: The outputs of the reference model, by name.
        outputs: The outputs of the candidate, by name.
        tolerance: The tolerance of float outputs, by default `Tolerance()`.
        axes: A dict from the names of outputs with a variable number of rows to the axis of the rows. These
            rows are compared as a set, in any order.
    """
    tolerance = tolerance or Tolerance()
    if list(reference) != list(outputs):
        return _refused(f"outputs are {list(outputs)}, expected {list(reference)}")
    sets = {name: axis for name, axis in (axes or {}).items() if outputs[name].shape == reference[name].shape}
    outputs = {**outputs, **align_rows(outputs, reference, sets).outputs}
    return worst([_compare_one(name, want, outputs[name], tolerance) for name, want in reference.items()])


def worst(verdicts: Sequence[Parity]) -> Parity:
    """Combine results into one with the largest errors and the first reason. It is ok if all are ok."""
    return Parity(
        max_abs_error=max((v.max_abs_error for v in verdicts), default=0.0),
        relative_to_range=max((v.relative_to_range for v in verdicts), default=0.0),
        ok=all(v.ok for v in verdicts),
        reason=next((v.reason for v in verdicts if not v.ok), ""),
    )


def _refused(reason: str) -> Parity:
    return Parity(math.inf, math.inf, ok=False, reason=reason)


def _compare_one(name: str, want: NDArray[Any], output: NDArray[Any], tolerance: Tolerance) -> Parity:
    if want.dtype != output.dtype:
        return _refused(f"output '{name}' has dtype {output.dtype}, expected {want.dtype}")
    if want.shape != output.shape:
        return _refused(f"output '{name}' has shape {list(output.shape)}, expected {list(want.shape)}")
    if want.dtype.kind != "f":
        return _compare_exact(name, want, output)
    finite = np.isfinite(want)
    if (
        not np.array_equal(want[~finite], output[~finite], equal_nan=True)
        or not np.isfinite(output[finite]).all()
    ):
        changed = int(np.count_nonzero(np.isfinite(output) != finite))
        return _refused(f"output '{name}' has {changed} values that are NaN or infinite in one model only")
    values = want[finite].astype(np.float64)
    if values.size == 0:
        return Parity(0.0, 0.0, ok=True, reason="")
    error = float(np.abs(values - output[finite].astype(np.float64)).max())
    largest = float(np.abs(values).max())
    # One number alone (a regression of one sample) has no span; its range is taken to begin at 0.
    span = float(values.max() - values.min()) if values.size > 1 else largest
    resolution = float(np.finfo(want.dtype).eps) * max(largest, 1.0)
    allowed = tolerance.range_fraction * span + tolerance.ulps * resolution
    ok = error <= allowed
    return Parity(
        max_abs_error=error,
        relative_to_range=error / (span or largest or 1.0),
        ok=ok,
        reason="" if ok else f"output '{name}' differs by {error:.3g}, allowed {allowed:.3g}",
    )


def _compare_exact(name: str, want: NDArray[Any], output: NDArray[Any]) -> Parity:
    different = int(np.count_nonzero(want != output))
    if different == 0:
        return Parity(0.0, 0.0, ok=True, reason="")
    # In float64, because a difference of integers can overflow their own dtype.
    error = float(np.abs(want.astype(np.float64) - output.astype(np.float64)).max())
    span = float(want.max()) - float(want.min())
    reason = f"output '{name}' ({want.dtype}) differs in {different} of {want.size} values"
    return Parity(error, error / (span or 1.0), ok=False, reason=reason)
