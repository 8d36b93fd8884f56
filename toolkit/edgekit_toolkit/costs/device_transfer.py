"""Predicts the latency on a device from a run on this machine, with a ratio for each kind of kernel.

A roofline with published coefficients may be wrong by a factor of two. Two machines that run the same engine
are much more alike, because a kernel is slow on both for the same reasons. There are two main differences.
Data that exceed the caches of the device cost additional time. The device may also use several threads, which
speed up only long kernels. The model therefore has a ratio for each kind of kernel, a time for each byte
beyond the caches, and parameters of thread sharing. All are fitted on whole networks that ran on both
machines. The error for each network is measured with a fit to the other networks.

Source: B. Lu et al., One proxy device is enough for hardware-aware neural architecture search, SIGMETRICS
2022, sections 3 and 4 (latencies on one device predict those on another).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

KernelKind = Literal[
    "conv", "depthwise", "matmul", "int8-conv", "int8-depthwise", "int8-matmul", "recurrent", "other", "call"
]
"""The kinds of kernels in a network. `call` is the engine's overhead for a run and for each kernel."""
CACHE_BYTES: Final = 512 << 10
"""The size of the second-level cache of a Raspberry Pi 5 core. The bytes that a kernel touches beyond this
size count as spilled."""

_UNSHARED: Final = frozenset[KernelKind](("call", "recurrent"))  # a recurrent kernel is many short steps
_PULLS: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # weights of "all ratios are equal" against one network
_SPILL_PULL: Final = 0.001  # weight of "a spilled byte takes no time of its own"
_SPILL_BYTES_PER_S: Final = 20e9  # of a usual host, so that both weights mean the same
_LEAST_UNCERTAINTY: Final = 1.05
_LEAST_RATIO: Final = 0.1  # least ratio of a kind over the common one: no kernel takes no time


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The time of one kernel on this machine with one thread.

    Attributes:
        seconds: The time of one run of the kernel.
        count: The number of runs of the kernel in one inference.
    """

    kind: KernelKind
    seconds: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class HostRun:
    """One inference of a network on this machine with one thread.

    Attributes:
        kernels: The kernels. The sum of their times, each multiplied by `count`, is `whole_s`.
        spilled_bytes: The bytes that kernels read and write in excess of `CACHE_BYTES` per run, summed over
            all runs of all kernels.
    """

    kernels: Sequence[KernelTime]
    spilled_bytes: float = 0.0

    @property
    def whole_s(self) -> float:
        return sum(kernel.count * kernel.seconds for kernel in self.kernels)


@dataclass(frozen=True, slots=True)
class ThreadSharing:
    """How the threads of a device share a kernel.

    Additional threads take time to wake up, so they speed up long kernels only. Recurrent kernels and the
    engine's work outside kernels use one thread.

    Attributes:
        alone_s: The time on this machine, in seconds, of the shortest kernel that additional threads speed
            up.
        share: The time of a long kernel with all threads, divided by its time with one thread. 1 for a device
            with one thread.
    """

    alone_s: float = 1.0
    share: float = 1.0

    def shorten(self, kernel: KernelTime) -> float:
        """Return the time that a kernel run on this machine would take with this sharing, in seconds."""
        if self.share == 1 or kernel.kind in _UNSHARED:
            return kernel.seconds
        alone_s = -self.alone_s * math.expm1(-kernel.seconds / self.alone_s)
        return self.share * kernel.seconds + (1 - self.share) * alone_s


_ONE_THREAD: Final = ThreadSharing()
_SHARINGS: Final = tuple(
    ThreadSharing(alone_s, share)
    for alone_s in (10e-6, 20e-6, 40e-6, 80e-6)
    for share in (0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.12)
)
_MOST_LEFT: Final = 0.5  # of the squared error by one thread, if threads help. Two left 0.09 to 0.15 of it


@dataclass(frozen=True, slots=True)
class FittedRatios:
    """Ratios that convert a run on this machine to a time on a device.

    Attributes:
        ratios: A dict from kind of kernel to its time on the device, divided by its time on this machine.
        s_per_spilled_byte: The additional time on the device for each spilled byte, in seconds.
        sharing: How the threads of the device share kernels. The ratios compare one thread of each machine.
        errors: The relative error of each network's predicted time if the fit leaves this network out.
    """

    ratios: Mapping[KernelKind, float]
    s_per_spilled_byte: float
    errors: tuple[float, ...]
    sharing: ThreadSharing = _ONE_THREAD

    @property
    def uncertainty(self) -> float:
        """The factor by which a prediction may be off: the worst error of a network, at least 1.05."""
        worst = max(max(1 + error, 1 / (1 + error)) for error in self.errors)
        return max(worst, _LEAST_UNCERTAINTY)

    def predict_s(self, run: HostRun) -> float:
        """Return the predicted time of one inference on the device in seconds.

        A kind of kernel without a ratio gets the largest ratio.
        """
        unknown, of_kinds = max(self.ratios.values()), sum_kinds(run, self.sharing)
        kernels_s = sum(seconds * self.ratios.get(kind, unknown) for kind, seconds in of_kinds.items())
        return kernels_s + run.spilled_bytes * self.s_per_spilled_byte


def sum_kinds(run: HostRun, sharing: ThreadSharing = _ONE_THREAD) -> dict[KernelKind, float]:
    """Return a dict from kind of kernel to the total time of `run` in seconds, with this sharing."""
    seconds_by_kind: dict[KernelKind, float] = defaultdict(float)
    for kernel in run.kernels:
        seconds_by_kind[kernel.kind] += kernel.count * sharing.shorten(kernel)
    return seconds_by_kind


def fit_ratios(runs: Sequence[HostRun], device_s: Sequence[float], *, may_share: bool = True) -> FittedRatios:
    """Return the ratios that predict the times of the networks with the least relative errors.

    The ratios of all kinds of kernels are regularized towards one common ratio. Leave-one-out
    cross-validation chooses the strength of the regularization and how threads share kernels.

    Args:
        runs: The runs of at least three networks on this machine.
        device_s: The time of one inference of each network on the device, in seconds.
        may_share: Whether the device's engine may have run the networks on several threads.

    Raises:
        ValueError: There are fewer than three networks, `runs` and `device_s` have different lengths, or a
            time is not positive.
    """
    if len(runs) < 3 or len(runs) != len(device_s):
        raise ValueError(
            f"expected three networks or more, each with a time, got {len(runs)}, {len(device_s)}"
        )
    if not all(0 < duration_s < np.inf for duration_s in (*device_s, *(run.whole_s for run in runs))):
        raise ValueError(f"expected times above 0, got {device_s}")
    kinds = sorted({kernel.kind for run in runs for kernel in run.kernels})
    alone = _fit(runs, kinds, device_s, _ONE_THREAD)
    if not may_share:
        return alone
    shared = min((_fit(runs, kinds, device_s, sharing) for sharing in _SHARINGS), key=_sum_squares)
    return shared if _sum_squares(shared) < _MOST_LEFT * _sum_squares(alone) else alone


def _fit(
    runs: Sequence[HostRun], kinds: Sequence[KernelKind], device_s: Sequence[float], sharing: ThreadSharing
) -> FittedRatios:
    """Return the best fit with one way to share kernels."""
    sums = [sum_kinds(run, sharing) for run in runs]
    parts = np.array(
        [
            [*(of_kinds.get(kind, 0.0) for kind in kinds), run.spilled_bytes / _SPILL_BYTES_PER_S]
            for run, of_kinds in zip(runs, sums, strict=True)
        ]
    )
    parts /= np.array(device_s)[:, None]
    solved, errors = _solve(parts), _errors_left_out(parts)
    fits = (
        FittedRatios(
            dict(zip(kinds, factors[:-1].tolist(), strict=True)),
            float(factors[-1]) / _SPILL_BYTES_PER_S,
            tuple(errors[:, number].tolist()),
            sharing,
        )
        for number, factors in enumerate(solved)
    )
    return min(fits, key=_sum_squares)


def _sum_squares(fitted: FittedRatios) -> float:
    """Return the squared errors of a fit in logarithms: half and twice the time weigh the same."""
    return float(np.square(np.log1p(fitted.errors)).sum())


def _errors_left_out(parts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the relative error of each network from a fit to all others: float64 [networks, pulls]."""
    count, columns = parts.shape
    is_other = ~np.eye(count, dtype=bool)
    others = np.broadcast_to(parts, (count, count, columns))[is_other].reshape(count, count - 1, columns)
    predicted: npt.NDArray[np.float64] = (parts[:, None] * _solve(others)).sum(axis=-1)
    return predicted - 1


def _solve(parts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return factors f that bring `parts @ f` near 1: ratios near a common ratio, and a spill factor near 0.

    Args:
        parts: float64 [..., networks, kinds + 1], times here over the time there; the last column is for
            spilled bytes.

    Returns:
        float64 [..., pulls, kinds + 1], for each weight of the ratios' second aim.
    """
    common = 1 / np.median(parts[..., :-1].sum(axis=-1), axis=-1)[..., None, None]
    kinds = parts.shape[-1] - 1
    # In units of the common ratio, so that the pulls mean the same on every device.
    scaled = parts * common
    pulls = np.array([[*[pull] * kinds, _SPILL_PULL] for pull in _PULLS])
    aims = pulls * ([1.0] * kinds + [0.0])
    # The pulls keep the normal equations well conditioned.
    products = np.swapaxes(scaled, -1, -2) @ scaled
    squares = products[..., None, :, :] + pulls[:, None] * np.eye(kinds + 1)
    sums = scaled.sum(axis=-2)[..., None, :] + aims
    solved = np.linalg.solve(squares, sums[..., None])[..., 0]
    factors: npt.NDArray[np.float64] = np.maximum(solved, [_LEAST_RATIO] * kinds + [0.0]) * common
    return factors
