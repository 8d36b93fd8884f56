"""Tests whether a model computes each row of a batch independently of the other rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.tensors import Array

_ROUNDING: Final = 1e-3  # kernels for other sizes may differ by this share of a row's largest value
_EPSILONS: Final = 16.0  # of a dtype: sums of some hundred values in another order differ by these
# Other rows are larger or smaller by this factor. Beside a row of 16 times its size, the 256 steps of one
# 8-bit scale leave a row 8 or 16, and its answer is off by some per cent.
_FACTOR: Final = 16.0


def has_free_rows(model: Session | Manifest) -> bool:
    """Return whether the first dimension of every input and output is free."""
    return all(spec.shape and isinstance(spec.shape[0], str) for spec in (*model.inputs, *model.outputs))


def rows_are_independent(session: Session, inputs: Mapping[str, Array]) -> bool:
    """Return whether each row of a batch has the same outputs as when it is run alone.

    The batch contains rows with much larger and smaller values, to detect models that compute a scale, a norm
    or a maximum over all rows. Integer and bool inputs may be indices, so their values are taken from
    `inputs`. Float outputs may differ by 0.1 % of the largest value in the row. Other outputs must be equal.

    The result is also False if a first dimension is not free, an input has no row, or the engine refuses the
    batch.

    Args:
        session: The session to test. It runs four times.
        inputs: A dict from input name to an array with at least one row. The test uses up to three rows.

    Raises:
        BackendError: The engine failed on a single row.
    """
    if not has_free_rows(session) or any(len(array) == 0 for array in inputs.values()):
        return False
    judged, company = _vary(inputs, np.random.default_rng(0))
    # On both sides, to reveal an effect of a row on the next or on the one before.
    half = len(company) // 2
    rows = [*company[:half], *judged, *company[half:]]
    try:
        together = session.run(concatenate(rows))
    except BackendError:
        return False
    usual: dict[str, Array] = {}
    for index, row in enumerate(judged, half):
        for name, alone in session.run(row).items():
            if len(alone) != 1 or len(together[name]) != len(rows):
                return False
            if not _agree(alone, together[name][index : index + 1], usual.setdefault(name, alone)):
                return False
    return True


_Row: TypeAlias = dict[str, Array]


def _vary(
    inputs: Mapping[str, Array], random: "np.random.Generator"
) -> tuple[tuple[_Row, ...], tuple[_Row, ...]]:
    """Return rows to judge, the first unchanged, and rows to run in the same batch."""
    first = {name: array[:1] for name, array in inputs.items()}
    mixed = {name: random.permutation(a.reshape(-1)).reshape(a.shape) for name, a in first.items()}

    def scale(row: _Row, factor: float, pick: "Callable[[Array], Any] | None" = None) -> _Row:
        """Return a row with scaled floats; `pick` chooses the integers, by default the old ones."""
        scaled = {}
        for name, array in row.items():
            if array.dtype.kind != "f":
                scaled[name] = array if pick is None else np.full_like(array, pick(inputs[name]))
                continue
            with np.errstate(over="ignore"):  # float16 ends at 65504; infinity is also large
                scaled[name] = (array if array.any() else np.ones_like(array)) * array.dtype.type(factor)
        return scaled

    rows = min(3, *(len(array) for array in inputs.values()))
    others = [{name: a[i : i + 1] for name, a in inputs.items()} for i in range(1, rows)]
    judged = first, scale(mixed, 1 / _FACTOR), scale(first, 0.0, np.min)
    large = scale(first, _FACTOR, np.max), scale(mixed, -_FACTOR, np.min)
    return judged, (large[0], *others, large[1])


def _agree(alone: Array, together: Array, usual: Array) -> bool:
    """Whether both answers to one row agree; `usual` is the session's answer to an ordinary row."""
    if alone.shape != together.shape:
        return False
    if alone.dtype.kind != "f":
        return bool(np.array_equal(alone, together))
    # An answer close to 0 is a difference of values of an ordinary row's size.
    reach = _ROUNDING * _largest(alone) + _EPSILONS * float(np.finfo(alone.dtype).eps) * _largest(usual)
    return bool(np.allclose(together, alone, rtol=0.0, atol=reach, equal_nan=True))


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))


def concatenate(rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return one batch with the inputs of several calls, in the order of the calls."""
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
