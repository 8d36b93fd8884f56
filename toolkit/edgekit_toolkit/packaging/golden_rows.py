"""Chooses additional golden rows that best detect a wrong model, and sets their tolerances.

A golden row may not detect a wrong model if a softmax saturates or an input does not affect the output. So
many random rows are tried. In the chosen rows, the outputs differ most from the outputs of the first row, and
the values along the last axis (classes) differ most from each other. The differences are divided by the noise
that the rounding of another engine causes. For quantized models, this noise is estimated by changing inputs
by one 8-bit code, see docs/adr/0030.
"""

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.golden import GoldenRows, RowsOutput, resample
from edgekit_toolkit.models.model import Runner
from edgekit_toolkit.packaging.golden_branches import Conditions
from edgekit_toolkit.samples.generated import Feeds

_CANDIDATES_A_ROW: Final = 20
_MAX_CHOOSING: Final = 2e10  # multiply-adds, about a second on a core
JITTERS: Final = 3
_CODES: Final = 255
_MAX_VALUES: Final = 1024  # values that are stored per output and row
_MAX_PAIRS_OF: Final = 48  # values of the last axis that are compared pair by pair
# A larger contrast, in tolerances, counts as this one, because it shows nothing more.
_ENOUGH: Final = 1000.0
# The tolerance as a share of the output's range, or of each value if the output holds scores of 0..1. Then a
# score of 1e-6 can also show a fault. Measured: docs/benchmarks.md, `benchmarks/golden_power.py`.
_SHARE: Final = {"float": 0.005, "int8": 0.01}
_SCORE_SHARE: Final = {"float": 0.05, "int8": 0.1}
NOISE_FACTOR: Final = 2.0
_DIGITS_A_TOLERANCE: Final = 16.0
_ROUNDING: Final = 32 / 31  # rounding to these digits moves expected values by 1/32 of the stated tolerance
_FINEST_DIGIT: Final = 2.0**-22  # of a value: float32 has no more
_LEAST_SCORE: Final = 1e-9
# Engines compute a sigmoid as 0.5 + …: four roundings, which do not shrink with the score.
_SIGMOID_ERROR: Final = 2.0**-22
_FLOORS: Final = (1e-6, 1e-4, 1e-2)  # where rounding moves small scores too far
_MIN_ROWS: Final = 2
_MAX_ROWS: Final = 5
# If a row costs at most this many multiply-adds, all rows are taken. They take half as long as opening.
_CHEAP_ROW_MACS: Final = 8e6  # of onnxruntime. `EngineSupport.cheap_row_macs` has that of each engine

Outputs = Sequence[NDArray[Any]]


def count_rows(macs: float, cheap_row_macs: float = _CHEAP_ROW_MACS) -> int:
    """Return the number of additional golden rows, which is smaller for slow models.

    Args:
        macs: The number of multiply-accumulates of one inference.
        cheap_row_macs: The largest `macs` of a model that gets `_MAX_ROWS` rows. It is larger for engines
            that take long to open a model.
    """
    return int(np.clip(_MAX_ROWS * cheap_row_macs / max(macs, 1.0), _MIN_ROWS, _MAX_ROWS))


def choose_seeds(
    run: Runner, first: Feeds, *, macs: float, conditions: Conditions = lambda _: {}
) -> tuple[int, ...]:
    """Return the seeds of the additional golden rows that best detect a wrong model, best first.

    Args:
        run: Runs the float model.
        first: The inputs of the first golden row.
        macs: The number of multiply-accumulates of one inference. For slow models, fewer rows are tried and
            chosen.
        conditions: Returns the branches that inputs take, see `open_conditions`. Rows that take other
            branches than the first row are preferred.
    """
    count, reference = count_rows(macs), run(first)
    jitters = [off_by_codes(first, turn) for turn in range(2)]
    branches = conditions(first)
    affordable = _MAX_CHOOSING / max(macs * (1 + len(jitters) + bool(branches)), 1.0)
    if affordable < count:  # nothing to compare
        jitters = []
    rows, seeds = [], []
    for seed in range(int(np.clip(affordable, count, _CANDIDATES_A_ROW * count))):
        feeds = resample(first, seed)
        try:
            outputs = run(feeds)
            noisy = [run(add_steps(feeds, jitter)) for jitter in jitters]
            branch_values = conditions(feeds)
        except BackendError:  # values that the model does not take together
            continue
        if all(_comparable(row, reference) for row in (outputs, *noisy)):
            contrasts = _contrasts(outputs, reference, noisy)
            others = [
                np.log1p(_ENOUGH) * (branch_values[name] != branch) for name, branch in branches.items()
            ]
            rows.append(np.concatenate([contrasts, np.repeat(others, contrasts.size)]))
            seeds.append(seed)
    return tuple(seeds[position] for position in _cover(np.asarray(rows), count)) if rows else ()


def golden_rows(
    run: Runner, first: Feeds, floats: Mapping[int, Outputs], names: Sequence[str], *, integer: bool
) -> tuple[GoldenRows | None, dict[str, bytes]]:
    """Return the additional golden rows and the artifacts with their outputs.

    The result is (None, {}) if no row is usable.

    Args:
        run: Runs the packaged model.
        first: The inputs of the first golden row.
        floats: A dict from the seed of each additional row to the outputs of the float model, in the order of
            `names`.
        names: The names of the outputs.
        integer: Whether the packaged model computes with 8-bit codes.
    """
    jitters = [off_by_codes(first, turn) for turn in range(JITTERS)] if integer else []
    outputs_by_seed: dict[int, Outputs] = {}
    noisy: list[list[Outputs]] = []
    for seed, reference in floats.items():
        with suppress(BackendError):  # a form may refuse values that the float model takes
            feeds = resample(first, seed)
            outputs_of_row = run(feeds)
            if _comparable(outputs_of_row, reference):
                noisy.append([run(add_steps(feeds, jitter)) for jitter in jitters if jitter])
                outputs_by_seed[seed] = outputs_of_row
    if not outputs_by_seed:
        return None, {}
    outputs, artifacts = [], {}
    for index, name in enumerate(names):
        values = np.stack([output[index] for output in outputs_by_seed.values()])
        every = max(1, -(-values[0].size // _MAX_VALUES))
        path = f"golden/rows{index}.bin"
        least_score, least_atol = None, 0.0
        if all(_holds_scores(floats[seed][index]) for seed in outputs_by_seed):
            # An output of codes holds 0 where a score is less than a code, and float16 few digits there.
            least = max(_LEAST_SCORE, float(np.finfo(values.dtype).smallest_normal))
            least_score = float(values.min(initial=1.0, where=values > least))
            least_atol = max(sigmoid_error(floats[seed][index]) for seed in outputs_by_seed)
        others = [[jitter[index] for jitter in row] for row in noisy]
        tolerances = [
            _tolerance(value, other, "int8" if integer else "float", least_score, least_atol)
            for value, other in zip(values, others, strict=True)
        ]
        atol, rtol = zip(*tolerances, strict=True)
        stored = values.reshape(len(values), -1)[:, ::every]
        artifacts[path] = pack_values(stored, np.array(atol)[:, None], np.array(rtol)[:, None])
        outputs.append(
            RowsOutput(name=name, path=path, atol=atol, rtol=rtol if any(rtol) else (), every=every)
        )
    return GoldenRows(tuple(outputs_by_seed), tuple(outputs)), artifacts


def pack_values(
    values: NDArray[Any], atol: float | NDArray[np.float64], rtol: float | NDArray[np.float64] = 0.0
) -> bytes:
    """Return the bytes of expected values for a package.

    Each float32 value is rounded to a multiple of a power of two, which is at most 1/16 of the tolerance of
    the value. Values near the largest float are not rounded if rounding would make them infinite.
    """
    stored = np.ascontiguousarray(values)
    if stored.dtype == np.float32:
        exact = stored.astype(np.float64)
        finite = np.where(np.isfinite(exact), exact, 0.0)
        tolerance = np.maximum(atol + rtol * np.abs(finite), _FINEST_DIGIT * np.abs(finite) + 1e-44)
        digit = 2.0 ** np.floor(np.log2(tolerance / _DIGITS_A_TOLERANCE))
        rounded = np.rint(finite / digit) * digit
        is_rounded = np.isfinite(exact) & (np.abs(rounded) <= np.finfo(np.float32).max)
        stored = np.where(is_rounded, rounded, exact).astype(np.float32)
    return stored.astype(stored.dtype.newbyteorder("<")).tobytes()


def _tolerance(
    value: NDArray[Any],
    jittered: Outputs,
    kind: str,
    least_score: float | None,
    least_atol: float = 0.0,
) -> tuple[float, float]:
    """Return `atol` and `rtol` of one output in one row.

    Args:
        value: the output.
        jittered: the same for inputs that are off by codes, as far as its noise counts.
        kind: `int8` or `float`.
        least_score: the smallest score that is compared, or None for an output that holds no scores.
        least_atol: the least absolute tolerance of scores.
    """
    if value.dtype.kind != "f" or not value.size:
        return float(max((distance(value, other).max() for other in jittered), default=0.0)), 0.0
    size, distances = _size(value), [distance(value, other) for other in jittered]
    extent = max(float(np.ptp(value[np.isfinite(value)])), float(size.max()), 1e-6) if size.any() else 1.0
    share = _SHARE[kind] + NOISE_FACTOR * _noise(distances, extent)
    choices = [(state_tolerance(max(share * extent, least_atol)), 0.0)]
    floors = (
        () if least_score is None else (least_score, *(floor for floor in _FLOORS if floor > least_score))
    )
    for floor in floors:
        share = _SCORE_SHARE[kind] + NOISE_FACTOR * _noise(distances, size + floor)
        choices.append((state_tolerance(max(share * floor, least_atol)), state_tolerance(share)))
    return min(choices, key=lambda choice: float(np.log(choice[0] + choice[1] * size).mean()))


def state_tolerance(tolerance: float) -> float:
    """Add the rounding error of `pack_values` to a tolerance, and keep three significant digits."""
    return float(f"{tolerance * _ROUNDING:.2e}")


def _noise(distances: Sequence[NDArray[np.float64]], unit: float | NDArray[np.float64]) -> float:
    return max((float((distance / unit).max()) for distance in distances), default=0.0)


def _holds_scores(value: NDArray[Any]) -> bool:
    return bool(value.dtype.kind == "f" and value.size and value.min() >= 0 and value.max() <= 1 + 1e-6)


def sigmoid_error(value: NDArray[Any]) -> float:
    """Return the largest rounding difference between engines if `value` looks like a sigmoid, else 0."""
    return _SIGMOID_ERROR if _holds_scores(value) and not _excludes(value) else 0.0


def _excludes(scores: NDArray[Any]) -> bool:
    """Return whether scores sum to 1 along an axis, as of a softmax, whose small scores are exact too."""
    axes = (axis for axis, size in enumerate(scores.shape) if size > 1)
    return any(np.allclose(scores.sum(axis=axis, dtype=np.float64), 1, atol=1e-3) for axis in axes)


def _comparable(outputs: Outputs, reference: Outputs) -> bool:
    """Return whether shapes are the same and no value is NaN, or infinite where the reference is finite."""
    return all(
        output.shape == want.shape
        and (
            output.dtype.kind != "f"
            or np.isfinite(output).all()
            or not (np.isnan(output).any() or np.isinf(output).sum() > np.isinf(want).sum())
        )
        for output, want in zip(outputs, reference, strict=True)
    )


def _size(value: NDArray[Any]) -> NDArray[np.float64]:
    """Return the absolute values, and 0 for those that are not finite."""
    return np.abs(np.where(np.isfinite(value), value, 0.0).astype(np.float64))


def distance(value: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """Return the absolute differences of two arrays. They are 0 where a value is not finite.

    For empty arrays or arrays of different shapes, return [0].
    """
    if value.shape != other.shape or not value.size:
        return np.zeros(1)
    with np.errstate(invalid="ignore"):
        distance = np.abs(value.astype(np.float64) - other.astype(np.float64))
    return np.where(np.isfinite(distance), distance, 0.0)


def off_by_codes(first: Feeds, turn: int) -> Feeds:
    """Return random changes of inputs by one 8-bit code.

    Each value of a float input changes by -1, 0 or 1 times 1/255 of the range of the input. Each value of an
    8-bit image changes by -1, 0 or 1. Other inputs are not included. `turn` is the random seed.
    """
    stream = np.random.PCG64(turn)
    steps: Feeds = {}
    for name, value in first.items():
        is_pixels = value.dtype.kind in "iu" and value.dtype.itemsize == 1 and value.ndim > 2
        if value.size and (value.dtype.kind == "f" or is_pixels):
            codes = stream.random_raw(value.size).astype(np.uint64) % np.uint64(3)
            code = 1.0 if is_pixels else (float(value.max()) - float(value.min())) / _CODES
            steps[name] = (codes.astype(np.float64) - 1).reshape(value.shape) * code
    return steps


def add_steps(feeds: Feeds, steps: Feeds) -> Feeds:
    """Add the changes from `off_by_codes` to inputs, and clip the sums to the range of the dtype."""
    shifted = dict(feeds)
    for name, step in steps.items():
        value = feeds[name]
        limits = np.iinfo(value.dtype) if value.dtype.kind in "iu" else np.finfo(value.dtype)
        shifted[name] = np.asarray(np.clip(value + step, limits.min, limits.max), value.dtype)
    return shifted


def _contrasts(outputs: Outputs, reference: Outputs, noisy: Sequence[Outputs]) -> NDArray[np.float64]:
    """Return the differences that a row would reveal, as logarithms of tolerances, float64 [contrasts].

    Swapped values of the last axis (classes), and outputs that stay as they are in the first row.
    """
    contrasts = [np.zeros(1)]
    for index, value in enumerate(outputs):
        if value.dtype.kind != "f" or not value.size:
            continue
        least_score = _LEAST_SCORE if _holds_scores(value) else None
        noise = [other[index] for other in noisy]
        atol, rtol = _tolerance(value, noise, "int8", least_score, sigmoid_error(value))
        allowed = atol + rtol * _size(value)
        every = -(-value.size // _MAX_VALUES)
        contrasts.append((distance(value, reference[index]) / allowed).reshape(-1)[::every])
        if value.ndim and 1 < value.shape[-1] <= _MAX_PAIRS_OF:
            first, right = _pairs(value.shape[-1])
            lines, limits = (array.reshape(-1, value.shape[-1])[:_MAX_VALUES] for array in (value, allowed))
            swapped = distance(lines[:, first], lines[:, right])
            contrasts.append((swapped / np.minimum(limits[:, first], limits[:, right])).max(axis=0))
    return np.log1p(np.minimum(np.concatenate(contrasts), _ENOUGH))


@functools.cache
def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.triu_indices(count, 1)


def _cover(contrasts: NDArray[np.float64], count: int) -> list[int]:
    """Return indices of rows [rows, contrasts]; each row reveals differences that earlier rows do not."""
    covered, chosen = np.zeros(contrasts.shape[1]), list[int]()
    while len(chosen) < min(count, len(contrasts)):
        gains = np.maximum(contrasts, covered).sum(axis=1)
        gains[chosen] = -1.0
        chosen.append(int(np.argmax(gains)))
        covered = np.maximum(covered, contrasts[chosen[-1]])
    return chosen
