"""Measures a lower bound of how much of the input an attacker can recover from the tensors of a cut.

The attacker is linear, and knows some inputs with the tensors that are sent for them. Two attacks are tried.
One fits a ridge regression from all sent values to the input. The other estimates each input value from a
single sent value, the one with the highest correlation. Since stronger attackers exist, a low result does not
prove that the input is secret.

Source: Hoerl, Kennard, "Ridge regression", Technometrics 12, 1970; solved in its dual form.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgekit_runtime.errors import CutError

MAX_SAMPLES: Final = 2000
MAX_VALUES: Final = 2048  # rebuilt values of an input: a random sample with the mean error of all
MAX_FEATURES: Final = 16_384  # sent values. More are added up in random groups, which weakens the attacker
MAX_DB: Final = 100.0  # counts as rebuilt exactly
LEAST_SAMPLES: Final = 20
LEAST_FOR_LIMIT: Final = 1000
"""The minimum number of samples for a limit on leakage. With fewer samples the attacker learns too little,
and plans that leak would pass."""
_MATCH_SAMPLES: Final = 256  # used to find the sent value most like a wanted one. The fit uses all
_STRENGTHS: Final = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the ridge, in shares of the mean variance
_HELD_OUT_SHARE: Final = 0.2
_CHOICE_SHARE: Final = 0.1  # share of the samples that choose the attack. The figure comes from others

_MEAN, _COPY = "mean", "copy"  # attacks beside the ridge: the mean input; the most similar sent value

_Floats: TypeAlias = NDArray[np.float32]
_Rows: TypeAlias = NDArray[np.generic]  # [samples, values] of any real type
_Order: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leakage:
    """How well an attacker can reconstruct unknown inputs.

    Attributes:
        lower_bound_db: The PSNR of the reconstructed inputs, at most `MAX_DB`. Other attackers may reach
            more.
        mean_db: The PSNR of the mean input, which an attacker can use without sent tensors. If
            `lower_bound_db` is not higher, the attack failed.
        known_samples: The number of inputs that the attacker knew. The bound increases with it.
        held_out_samples: The number of inputs that were reconstructed.
    """

    lower_bound_db: float
    mean_db: float
    known_samples: int
    held_out_samples: int

    def describe(self) -> str:
        """Return a text with the bound and the number of inputs that the attacker knew."""
        return f"at least {self.lower_bound_db:.1f} dB to an attacker who knows {self.known_samples:,} inputs"


def measure_leakage(
    inputs: ArrayLike, sent: Sequence[ArrayLike], *, seed: int = 0, most_values: int = MAX_VALUES
) -> Leakage:
    """Return how well a linear attacker can reconstruct the input from the tensors that a cut sends.

    Time and memory are limited by `MAX_SAMPLES`, `MAX_VALUES` and `MAX_FEATURES` to about 10 s on one core,
    and 500 MB in addition to the arguments. The PSNR is relative to the range of the inputs.

    Args:
        inputs: Real numbers [samples, ...], such as images or windows of sensor data. The samples must be
            distinct and must not overlap, or the attacker would know parts of the inputs to reconstruct.
        sent: The tensors [samples, ...] after decoding on the server, to include the loss of the coding.
        seed: The seed for the order of samples, and for sampling and grouping values.
        most_values: The maximum number of values of an input to reconstruct. A lower number takes less time,
            but the result is less accurate.

    Raises:
        CutError: There are too few samples, `inputs` and `sent` differ in length, all inputs are equal, or a
            value is not finite.
    """
    rng = np.random.default_rng(seed)
    source = _as_rows(inputs, "inputs")
    tensors = [_as_rows(tensor, f"tensor {number} that is sent") for number, tensor in enumerate(sent)]
    count = len(source)
    if count < LEAST_SAMPLES or not tensors or any(len(tensor) != count for tensor in tensors):
        counts = ", ".join(str(len(tensor)) for tensor in tensors) or "no tensors"
        raise CutError(
            f"leakage: got {count} inputs and {counts} per sent tensor; expected at least {LEAST_SAMPLES}, "
            "and equal numbers; pass more samples, each with its sent tensors"
        )
    order = rng.permutation(count)[:MAX_SAMPLES]
    values = np.sort(rng.permutation(source.shape[1])[:most_values])
    target = _finite(source[np.ix_(order, values)], "inputs")
    scale = float(target.max() - target.min())
    if scale <= 0:
        raise CutError(f"leakage: all inputs are {target.flat[0]:g}; pass inputs that differ")
    return _attack(target / scale, tensors, order, rng)


def _attack(target: _Floats, sent: Sequence[_Rows], order: _Order, rng: np.random.Generator) -> Leakage:
    """Choose the attack that is best on known samples, and return how well it recovers the others.

    Args:
        target: float32 [samples, values], scaled so that their range is 1, in random order.
        sent: for each tensor [all samples, features].
        order: for each sample of `target`, the number of its sample in `sent`.
        rng: groups the features if there are too many.
    """
    count = len(target)
    known_count = count - int(count * _HELD_OUT_SHARE)
    fitted = known_count - max(int(count * _CHOICE_SHARE), 1)
    alike, gram = _similar(target, sent, order, fitted), _gram(sent, order, known_count, rng)

    def error(attack: float | str, fit: int, end: int) -> float:
        """The mean squared error on the samples `fit` to `end` of an attacker who knows the first `fit`."""
        mean = target[:fit].mean(axis=0)
        if attack == _MEAN:
            rebuilt = np.zeros((end - fit, target.shape[1]))
        elif attack == _COPY:
            centred = alike - alike[:fit].mean(axis=0)
            power = np.maximum((centred[:fit] ** 2).sum(axis=0), np.float32(1e-30))
            rebuilt = centred[fit:end] * ((centred[:fit] * (target[:fit] - mean)).sum(axis=0) / power)
        else:
            ridge = float(attack) * max(float(np.trace(gram[:fit, :fit])) / fit, 1e-30) * np.eye(fit)
            rebuilt = gram[fit:end, :fit] @ np.linalg.solve(gram[:fit, :fit] + ridge, target[:fit] - mean)
        return float(((target[fit:end] - mean - rebuilt) ** 2).mean())

    attacks: list[float | str] = [_MEAN, _COPY, *_STRENGTHS]
    best = min(attacks, key=lambda attack: error(attack, fitted, known_count))
    return Leakage(
        lower_bound_db=_psnr_db(error(best, known_count, count)),
        mean_db=_psnr_db(error(_MEAN, known_count, count)),
        known_samples=known_count,
        held_out_samples=count - known_count,
    )


def _similar(inputs: _Floats, sent: Sequence[_Rows], order: _Order, fitted: int) -> _Floats:
    """Return for each value of the input the sent value that correlates most with it: float32."""
    rows = slice(0, min(fitted, _MATCH_SAMPLES))
    target = _standardised(inputs[rows])
    similar, best = np.zeros_like(inputs), np.full(inputs.shape[1], -1.0, np.float32)
    for tensor in sent:
        for block in _blocks(tensor, order):
            correlation = np.abs(target.T @ _standardised(block[rows]))
            columns = correlation.argmax(axis=1)
            strongest = correlation[np.arange(len(columns)), columns]
            better = strongest > best
            similar[:, better], best[better] = block[:, columns[better]], strongest[better]
    return similar


def _gram(
    sent: Sequence[_Rows], order: _Order, known_count: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return the inner products of the samples of the sent tensors: float64 [samples, samples].

    Tensors count equally in any unit. If a tensor has more than `MAX_FEATURES` values, they are added up in
    that many random groups with random signs, which keeps inner products in expectation.

    Source: Weinberger et al., "Feature hashing for large scale multitask learning", ICML 2009.
    """
    count = len(order)
    total = np.zeros((count, count))
    for tensor in sent:
        groups = np.zeros((count, min(tensor.shape[1], MAX_FEATURES)), np.float32)
        is_grouped = tensor.shape[1] > MAX_FEATURES
        for block in _blocks(tensor, order):
            if is_grouped:
                signs = rng.choice(np.array([-1.0, 1.0], np.float32), block.shape[1])
                groups[:, rng.permutation(MAX_FEATURES)[: block.shape[1]]] += block * signs
            else:
                groups[:] = block
        groups -= groups[:known_count].mean(axis=0)
        products = (groups @ groups.T).astype(np.float64)
        total += products / max(float(np.trace(products)), 1e-30)
    return total


def _blocks(tensor: _Rows, order: _Order) -> Iterator[_Floats]:
    """Yield at most `MAX_FEATURES` columns at a time, in `order`: float32 [samples, columns]."""
    for start in range(0, tensor.shape[1], MAX_FEATURES):
        yield _finite(tensor[:, start : start + MAX_FEATURES][order], "what is sent")


def _standardised(rows: _Floats) -> _Floats:
    """Return the columns with mean 0 and length 1; a column that does not vary becomes 0."""
    centred = rows - rows.mean(axis=0)
    lengths = np.sqrt((centred**2).sum(axis=0))
    floor = np.abs(rows).max(axis=0) * np.float32(1e-5)  # deviations of a constant column by rounding
    return np.asarray(centred / np.where(lengths > floor, lengths, np.inf), np.float32)


def _as_rows(array: ArrayLike, label: str) -> _Rows:
    values: NDArray[np.generic] = np.asarray(array)
    if values.ndim < 2 or values.size == 0 or values.dtype.kind not in "biuf":
        raise CutError(
            f"leakage: {label} is {values.dtype} {list(values.shape)}; expected real numbers "
            "[samples, ...], none of the sizes 0"
        )
    return values.reshape(len(values), -1)


def _finite(values: _Rows, label: str) -> _Floats:
    floats = values.astype(np.float32)
    if not np.isfinite(floats).all():
        raise CutError(f"leakage: {label} holds NaN or infinity; pass finite values")
    return floats


def _psnr_db(error: float) -> float:
    return min(-10 * float(np.log10(max(error, 1e-30))), MAX_DB)
