"""Second-order rounding of the rows of a layer's weights.

A row w is multiplied with patches x. Rounding w to codes times a step causes the mean squared error d H d^T,
where d is the rounding error and H the second moment of the patches. The errors of correlated inputs can
cancel each other. The codes are chosen column by column, and the error of each column is spread over the
columns that are not yet rounded (GPTQ). Then single codes are changed as long as that reduces the error
(coordinate descent).

For example, with H = [[1, .9], [.9, 1]], w = [.4, .4] and a step of 1, rounding to nearest gives the codes
[0, 0] and the error .61. The codes [1, 0] have the error .6^2 - 2 * .9 * .6 * .4 + .4^2 = .09.

All arrays are float64. Rows are grouped, and each group has one second moment: w [G, R, K], H [G, K, K].

Source: E. Frantar et al., GPTQ, 2023, equation 2 and section 3; B. Hassibi and D. Stork, Second order
derivatives for network pruning, 1992, for the step that spreads the error.
"""

from typing import Final

import numpy as np

from edgekit_toolkit.onnx_graph.layers import Floats

# Part of the mean of H's diagonal that is added to it: directions that the samples do not show still count.
_DAMPING: Final = 0.01
# Shorter ranges, as shares of the largest weight, among which the step of few bits is chosen.
_RANGE_SHARES: Final = np.linspace(0.35, 1.0, 27)
_SWEEPS: Final = 2
_BLOCK: Final = 64  # columns whose errors reach the later ones together
_LEAST: Final = 1e-30

# The form for x86 without VNNI has codes of 7 bits.
_MIN_FINE_PEAK: Final = 63


def limits(peak: int) -> tuple[int, int]:
    """Return the smallest and largest code: `(-peak, peak)`, or `(-peak - 1, peak)` if `is_coarse(peak)`."""
    return (-peak - 1 if is_coarse(peak) else -peak), peak


def is_coarse(peak: int) -> bool:
    """Return whether there are so few codes that clipping the largest weights may reduce the error."""
    return peak < _MIN_FINE_PEAK


def damp(moment: Floats) -> Floats:
    """Return the second moment [G, K, K] with a diagonal added to it, so that it can be inverted."""
    diagonal = np.einsum("gii->gi", moment)
    added = np.maximum(_DAMPING * diagonal.mean(axis=1), 1e-12)
    damped: Floats = moment + added[:, None, None] * np.eye(moment.shape[-1])
    return damped


class Spread:
    """How the rounding error of a column is spread over later columns.

    Args:
        moment: The second moment [G, K, K] from `damp`, with G groups and K columns.

    Attributes:
        order: The columns in the order of rounding, [G, K]. The column with the largest moment is the first.
        factor: An upper triangular matrix for each group, [G, K, K], in the same order. Row j contains the
            factors for spreading the error of column j over the later columns.
    """

    def __init__(self, moment: Floats) -> None:
        self.order = np.argsort(-np.einsum("gii->gi", moment), axis=1, kind="stable")
        columns = np.take_along_axis(moment, self.order[:, :, None], 1)
        inverse = np.linalg.inv(np.take_along_axis(columns, self.order[:, None], 2))
        self.factor = np.swapaxes(np.linalg.cholesky((inverse + np.swapaxes(inverse, 1, 2)) / 2), 1, 2)


def choose_scale(rows: Floats, moment: Floats, peak: int) -> Floats:
    """Return the step of each row, [G, R, 1], at which the nearest codes have the least output error.

    Args:
        rows: The weights, [G, R, K], with G groups, R rows in each group and K columns.
        moment: The second moment of the patches, [G, K, K].
        peak: The largest code.
    """
    largest = np.maximum(np.abs(rows).max(axis=2, keepdims=True), _LEAST) / peak
    best: Floats = largest
    error = np.full(largest.shape, np.inf)
    for share in _RANGE_SHARES:
        scale = largest * share
        residual = np.clip(np.rint(rows / scale), *limits(peak)) * scale - rows
        new = measure_errors(residual, moment)
        best, error = np.where(new < error, scale, best), np.minimum(new, error)
    return best


def round_rows(
    rows: Floats, moment: Floats, scale: Floats, peak: int, spread: Spread | None = None
) -> Floats:
    """Round rows to codes with a small output error.

    Args:
        rows: The weights, [G, R, K], with G groups, R rows in each group and K columns.
        moment: The second moment of the patches, [G, K, K], after `damp`.
        scale: The step of each row, [G, R, 1].
        peak: The largest code.
        spread: The `Spread` of the moment. Pass it if the moment is used more than once, to save time.

    Returns:
        Whole numbers within `limits(peak)`, float64 [G, R, K].
    """
    nearest = np.clip(np.rint(rows / scale), *limits(peak))
    starts = nearest, _round_in_order(rows, spread or Spread(moment), scale, peak)
    ends = [_descend(codes, rows, moment, scale, peak) for codes in starts]
    errors = [measure_errors(codes * scale - rows, moment) for codes in ends]
    return np.where(errors[0] < errors[1], *ends)  # of few columns, the nearest codes may be the better start


def measure_errors(differences: Floats, moment: Floats) -> Floats:
    """Return the mean squared error d H d^T of each row's output, [G, R, 1].

    Args:
        differences: The weight errors d, [G, R, K], with G groups, R rows in each group and K columns.
        moment: The second moment H of the patches, [G, K, K].
    """
    errors: Floats = ((differences @ moment) * differences).sum(axis=2, keepdims=True)
    return errors


def fit_scale(codes: Floats, rows: Floats, moment: Floats, scale: Floats) -> Floats:
    """Return the step of each row, [G, R, 1], at which the given codes have the least output error.

    Args:
        codes: The codes of the weights, [G, R, K], with G groups, R rows in each group and K columns.
        rows: The weights, [G, R, K].
        moment: The second moment of the patches, [G, K, K].
        scale: The steps for rows without a best step, such as rows whose codes are all 0.
    """
    projected_codes = codes @ moment
    power, product = ((values * projected_codes).sum(axis=2, keepdims=True) for values in (codes, rows))
    return np.where((power > 0) & (product > 0), product / np.where(power > 0, power, 1), scale)


def _round_in_order(rows: Floats, spread: Spread, scale: Floats, peak: int) -> Floats:
    """Round column after column."""
    order, factor = spread.order, spread.factor
    open_rows = np.take_along_axis(rows, order[:, None], axis=2)
    codes = np.zeros_like(rows)
    count = rows.shape[2]
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        errors = np.zeros((*rows.shape[:2], end - begin))
        for column in range(begin, end):
            weights = factor[:, None, column]
            codes[:, :, column] = np.clip(np.rint(open_rows[:, :, column] / scale[:, :, 0]), *limits(peak))
            error = open_rows[:, :, column] - codes[:, :, column] * scale[:, :, 0]
            error /= weights[:, :, column]
            open_rows[:, :, column:end] -= error[:, :, None] * weights[:, :, column:end]
            errors[:, :, column - begin] = error
        open_rows[:, :, end:] -= errors @ factor[:, begin:end, end:]
    result = np.empty_like(codes)
    np.put_along_axis(result, np.broadcast_to(order[:, None], codes.shape), codes, axis=2)
    return result


def _descend(codes: Floats, rows: Floats, moment: Floats, scale: Floats, peak: int) -> Floats:
    """Move each code to where the error is least while all others stay, a few times over."""
    step = scale[:, :, 0]
    slope = (codes * scale - rows) @ moment
    for _ in range(_SWEEPS):
        for column in range(rows.shape[2]):
            curvature = moment[:, column, column, None]
            best = codes[:, :, column] - slope[:, :, column] / (curvature * step)
            change = np.clip(np.rint(best), *limits(peak)) - codes[:, :, column]
            if not change.any():
                continue
            codes[:, :, column] += change
            slope += (change * step)[:, :, None] * moment[:, None, column]
    return codes
