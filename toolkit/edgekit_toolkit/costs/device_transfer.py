"""Latency on a device from a run here: a ratio for each kind of kernel, fitted on networks that ran on both.

A roofline of published coefficients is off by up to twice. Two machines that run the same engine are much
more alike: most of what makes a kernel slow here makes it slow there. What differs most is memory: data that
a kernel cannot keep in the device's caches costs time beside that. So there is a ratio for each kind, and a
time for each byte beyond caches. They are fitted on whole networks, not on single kernels. Their error shows
when a network is left out of the fit. This module measures nothing.

Source: B. Lu et al., One proxy device is enough for hardware-aware neural architecture search, SIGMETRICS
2022, sections 3 and 4 (latencies on one device predict those on another).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

KernelKind = Literal[
    "conv", "depthwise", "matmul", "int8-conv", "int8-depthwise", "int8-matmul", "recurrent", "other", "call"
]
"""Kernels of a network; `call` is what the engine takes beside them, to begin and end a run."""
CACHE_BYTES: Final = 512 << 10
"""What a kernel touches beyond this is spilled: the second-level cache of a core of a Raspberry Pi 5."""

_PULLS: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # weights of "all ratios are equal" against one network
_SPILL_PULL: Final = 0.001  # weight of "a spilled byte takes no time of its own"
_SPILL_BYTES_PER_S: Final = 20e9  # of a usual host, so that both weights mean the same
_LEAST_UNCERTAINTY: Final = 1.05
_LEAST_RATIO: Final = 0.1  # least ratio of a kind over the common one: no kernel takes no time


@dataclass(frozen=True, slots=True)
class HostRun:
    """One inference of a network on this machine, by one thread.

    Attributes:
        seconds: time of each kind of kernel; their sum is the whole run.
        spilled_bytes: bytes beyond `CACHE_BYTES` that its kernels read and write.
    """

    seconds: Mapping[KernelKind, float]
    spilled_bytes: float = 0.0

    @property
    def whole_s(self) -> float:
        """Time of the whole run."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class FittedRatios:
    """What turns a run here into a time on a device.

    Attributes:
        ratios: time there over time here, for each kind of kernel.
        s_per_spilled_byte: time there of each spilled byte, beside that of its kernel.
        errors: for each network its predicted over its measured time, less 1, by a fit without that network.
    """

    ratios: Mapping[KernelKind, float]
    s_per_spilled_byte: float
    errors: tuple[float, ...]

    @property
    def uncertainty(self) -> float:
        """Factor by which a prediction may be off: the worst error of a left-out network, at least 1.05."""
        worst = max(max(1 + each, 1 / (1 + each)) for each in self.errors)
        return max(worst, _LEAST_UNCERTAINTY)

    def predict_s(self, run: HostRun) -> float:
        """Return the time of one inference on the device.

        Kinds without a ratio count with the largest one.

        Args:
            run: the same network here.
        """
        unknown = max(self.ratios.values())
        kernels_s = sum(seconds * self.ratios.get(kind, unknown) for kind, seconds in run.seconds.items())
        return kernels_s + run.spilled_bytes * self.s_per_spilled_byte


def fit_ratios(runs: Sequence[HostRun], device_s: Sequence[float]) -> FittedRatios:
    """Return what predicts networks best, by relative error, and how well it does.

    Kinds are pulled towards one common ratio. How strongly is chosen by the error of networks left out.

    Args:
        runs: networks here, at least three.
        device_s: the same networks on the device.

    Raises:
        ValueError: fewer than three networks, or a time that is not above 0.
    """
    if len(runs) < 3 or len(runs) != len(device_s):
        raise ValueError(
            f"expected three networks or more, each with a time, got {len(runs)}, {len(device_s)}"
        )
    if not all(0 < each < np.inf for each in (*device_s, *(run.whole_s for run in runs))):
        raise ValueError(f"expected times above 0, got {device_s}")
    kinds = sorted({kind for run in runs for kind in run.seconds})
    parts = np.array(
        [
            [*(run.seconds.get(kind, 0.0) for kind in kinds), run.spilled_bytes / _SPILL_BYTES_PER_S]
            for run in runs
        ]
    )
    parts /= np.array(device_s)[:, None]
    errors = {pull: _errors_left_out(parts, pull) for pull in _PULLS}
    best = min(_PULLS, key=lambda pull: float(np.square(np.log1p(errors[pull])).sum()))
    *ratios, spill = _solve(parts, best).tolist()
    return FittedRatios(
        dict(zip(kinds, ratios, strict=True)), spill / _SPILL_BYTES_PER_S, tuple(errors[best].tolist())
    )


def _errors_left_out(parts: npt.NDArray[np.float64], pull: float) -> npt.NDArray[np.float64]:
    """Return the relative error of each network from a fit to all others."""
    networks = range(len(parts))
    return np.array([parts[one] @ _solve(np.delete(parts, one, axis=0), pull) - 1 for one in networks])


def _solve(parts: npt.NDArray[np.float64], pull: float) -> npt.NDArray[np.float64]:
    """Return factors f that bring `parts @ f` near 1: ratios near one common ratio, then the spill's, near 0.

    Args:
        parts: float64 [networks, kinds + 1], times here over the time there; the last one is that of spilled
            bytes.
        pull: weight of the ratios' second aim.
    """
    common = 1 / np.median(parts[:, :-1].sum(axis=1))
    kinds = parts.shape[1] - 1
    # In units of the common ratio, so that the pulls mean the same on every device.
    aims = np.append(np.full(kinds, np.sqrt(pull)), 0.0)
    pulls = np.append(np.full(kinds, np.sqrt(pull)), np.sqrt(_SPILL_PULL))
    left = np.vstack([parts * common, np.diag(pulls)])
    right = np.concatenate([np.ones(len(parts)), aims])
    solved: npt.NDArray[np.float64] = np.linalg.lstsq(left, right, rcond=None)[0]
    least = np.append(np.full(kinds, _LEAST_RATIO), 0.0)
    factors: npt.NDArray[np.float64] = np.maximum(solved, least) * common
    return factors
