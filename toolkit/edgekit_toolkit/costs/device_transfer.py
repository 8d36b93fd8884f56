"""Latency on a device from a run here: a ratio for each kind of kernel, fitted on networks that ran on both.

A roofline of published coefficients is off by up to twice. Two machines that run the same engine are much
more alike: most of what makes a kernel slow here makes it slow there. The ratios are fitted on whole
networks, not on single kernels. Their error shows when a network is left out of the fit. This module measures
nothing.

Source: B. Lu et al., One proxy device is enough for hardware-aware neural architecture search, SIGMETRICS
2022, sections 3 and 4 (latencies on one device predict those on another).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgekit_toolkit.targets.spec import KernelKind

_PULLS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # weights of "all ratios are equal" against one network's error
_LEAST_UNCERTAINTY = 1.05
_LEAST_RATIO = 0.1  # least ratio of a kind over the common one: no kernel takes no time


@dataclass(frozen=True, slots=True)
class HostRun:
    """One inference of a network on this machine, by one thread.

    Attributes:
        seconds: time of each kind of kernel; their sum is the whole run. It is the time at the speed that the
            processor had when it did the fixed work in `Transfer.work`.
    """

    seconds: Mapping[KernelKind, float]

    @property
    def whole_s(self) -> float:
        """Time of the whole run."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class FittedRatios:
    """Ratios of times on a device to times here.

    Attributes:
        ratios: ratios of each kind of kernel.
        errors: for each network its predicted over its measured time, less 1, by a fit without that network.
    """

    ratios: Mapping[KernelKind, float]
    errors: tuple[float, ...]

    @property
    def uncertainty(self) -> float:
        """Factor by which a prediction may be off: the worst error of a left-out network, at least 1.05."""
        worst = max(max(1 + each, 1 / (1 + each)) for each in self.errors)
        return max(worst, _LEAST_UNCERTAINTY)


def predict_latency_s(run: HostRun, ratios: Mapping[KernelKind, float]) -> float:
    """Return the time of one inference on the device.

    Kinds without a ratio count with the largest one.

    Args:
        run: the same network here.
        ratios: ratios of each kind of kernel.
    """
    unknown = max(ratios.values())
    return sum(seconds * ratios.get(kind, unknown) for kind, seconds in run.seconds.items())


def fit_ratios(runs: Sequence[HostRun], device_s: Sequence[float]) -> FittedRatios:
    """Return the ratios that predict networks best, by relative error, and how well they do it.

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
    shares = np.array([[run.seconds.get(kind, 0.0) for kind in kinds] for run in runs])
    shares /= np.array(device_s)[:, None]
    errors = {pull: _errors_left_out(shares, pull) for pull in _PULLS}
    best = min(_PULLS, key=lambda pull: float(np.square(np.log1p(errors[pull])).sum()))
    ratios = _solve(shares, best)
    return FittedRatios(dict(zip(kinds, ratios.tolist(), strict=True)), tuple(errors[best].tolist()))


def _errors_left_out(shares: npt.NDArray[np.float64], pull: float) -> npt.NDArray[np.float64]:
    """Return the relative error of each network from a fit to all others."""
    networks = range(len(shares))
    return np.array([shares[one] @ _solve(np.delete(shares, one, axis=0), pull) - 1 for one in networks])


def _solve(shares: npt.NDArray[np.float64], pull: float) -> npt.NDArray[np.float64]:
    """Return ratios r that bring `shares @ r` near 1, and near one common ratio.

    Args:
        shares: float64 [networks, kinds], time here over time there.
        pull: weight of the second aim.
    """
    common = 1 / np.median(shares.sum(axis=1))
    kinds = shares.shape[1]
    # In units of the common ratio, so that the pull means the same on every device.
    left = np.vstack([shares * common, np.sqrt(pull) * np.eye(kinds)])
    right = np.concatenate([np.ones(len(shares)), np.full(kinds, np.sqrt(pull))])
    solved: npt.NDArray[np.float64] = np.linalg.lstsq(left, right, rcond=None)[0]
    ratios: npt.NDArray[np.float64] = solved.clip(min=_LEAST_RATIO) * common
    return ratios
