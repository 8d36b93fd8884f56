"""The gates of a rollout: whether what devices answered speaks against the release.

Only devices that have answered count, or that may answer at any moment, and each is one sample: a device
cannot outvote others by its number of calls. The test (`edgekit_fleet.rollouts.betting`) may be asked after
every answer, so that a bad release stops at the first few devices: 30 failures of 100 devices stop a group of
1,000. Over the whole rollout a release that keeps all limits is stopped with a chance of at most
`GateLimits.alpha`.

Latency, energy, errors and drift are differences: after minus before on the device itself, less the same
difference on devices of its class that still run the old version, in the same hours. So neither a slow device
nor a busy evening speaks against a release.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_fleet.rollouts.betting import log_capital
from edgekit_runtime.agent.documents import ModelFigures

Measure: TypeAlias = Literal["latency", "energy", "errors", "disagreement", "drift"]
GateName: TypeAlias = Measure | Literal["install", "fault"]
Fault: TypeAlias = Literal["", "not-finite", "crash-loop", "fallback"]

_LEAST_CONTROLS: Final = 5
_LARGEST_RATIO: Final = 4.0
# Differences that only scatter have a mean of 0, and keep it near 0 if devices that got better count as such.
_BEST_RATIO: Final = 1.2
_FEWEST_ERRORS: Final = 0.1
_LEAST_DRIFT: Final = 0.1
_MOST_LOG: Final = 20.0
_LARGEST_DRIFT: Final = 2.0
_FEW: Final = 5
"""With fewer devices no test can decide; then a mean of more than twice its limit is a doubt for a person."""
_DOUBT: Final = 0.5
_TESTS: Final = 7  # the measures, failed installs, faults


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """What a release must keep; a limit of 0 (agreement) or infinity is not tested.

    Attributes:
        max_failed_share: of devices that could not install it, or whose own trial rejected it.
        max_faulty_share: of devices with a crash loop, NaN, or a fallback to the old version.
        max_latency_ratio, max_energy_ratio: mean over devices of new over old.
        max_extra_errors: mean over devices of the share of calls that failed, new less old.
        min_agreement: mean over devices of the agreement with the old version on the same inputs.
        max_drift: mean over devices of the population stability index, new less old.
        min_requests: calls that a device must have answered before it counts for latency and the like.
        alpha: chance that a release which keeps all limits is stopped.
    """

    max_failed_share: float = 0.05
    max_faulty_share: float = 0.01
    max_latency_ratio: float = 1.3
    max_energy_ratio: float = 1.3
    max_extra_errors: float = 0.01
    min_agreement: float = 0.95
    max_drift: float = 0.25
    min_requests: int = 20
    alpha: float = 0.01

    def __post_init__(self) -> None:
        shares = ("max_failed_share", "max_faulty_share", "max_extra_errors", "alpha")
        for name in shares:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected more than 0 and at most 1")
        for name in ("max_latency_ratio", "max_energy_ratio"):
            if not getattr(self, name) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected more than 1")
        if not 0 <= self.min_agreement < 1:
            raise ValueError(f"min_agreement is {self.min_agreement}, expected 0 to less than 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one device says about the release; fixed when it is first known, but for `fault`.

    Attributes:
        device_class: of the device.
        is_failed: whether the installation failed; None where it was refused beforehand. While it is under
            way it counts as one that succeeds: failures answer before successes do.
        fault: what went wrong after it.
        measures: see `measure`; empty until the device has answered enough calls.
    """

    device_class: str
    is_failed: bool | None = None
    fault: Fault = ""
    measures: Mapping[Measure, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a release stops.

    Attributes:
        gate: the gate that it missed.
        sentence: the reason in words.
        figures: what it rests on.
    """

    gate: str
    sentence: str
    figures: Mapping[str, float]


def measure(
    before: ModelFigures | None,
    after: ModelFigures,
    controls: Sequence[tuple[ModelFigures, ModelFigures]],
) -> dict[Measure, float]:
    """Return what changed on a device with the new version, less what changed on those without it.

    Args:
        before: the old version's figures on this device, or None if there was none.
        after: the new version's.
        controls: (then, now) of devices of the same class that still run the old version; with fewer than 5
            nothing is subtracted.

    Returns:
        `latency` and `energy` as logarithms of ratios, `errors` and `drift` as differences, `disagreement`
        as a share; without what is not known.
    """
    found: dict[Measure, float] = {}
    if after.agreement is not None and after.compared:
        found["disagreement"] = max(1.0 - after.agreement, 0.0)
    if before is None:
        return found
    shifts = [_difference(*pair) for pair in controls] if len(controls) >= _LEAST_CONTROLS else []
    for name, change in _difference(before, after).items():
        known = [shift[name] for shift in shifts if name in shift]
        found[name] = change - (statistics.median(known) if known else 0.0)
    return found


def _difference(before: ModelFigures, after: ModelFigures) -> dict[Measure, float]:
    found: dict[Measure, float] = {}
    if before.p50_ms and after.p50_ms:
        found["latency"] = _log_ratio(before.p50_ms, after.p50_ms)
    if before.energy_mj and after.energy_mj:
        found["energy"] = _log_ratio(before.energy_mj, after.energy_mj)
    if before.requests and after.requests:
        found["errors"] = after.failed / after.requests - before.failed / before.requests
    if before.drift is not None and after.drift is not None:
        found["drift"] = after.drift - before.drift
    return found


def _log_ratio(before: float, after: float) -> float:
    """Return log(after / before), bounded: a device may state anything, such as 1e-320 ms."""
    return min(max(math.log(after) - math.log(before), -_MOST_LOG), _MOST_LOG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the samples say.

    Attributes:
        verdict: why the release must stop, or None while nothing is shown against it.
        leaning: how far the gate that is worst off has come towards a stop, 0 to 1; at least a half where
            fewer than five devices in all show more than twice its limit.
        suspicion: what that gate would say, or an empty string.
    """

    verdict: Verdict | None
    leaning: float
    suspicion: str


@dataclass(frozen=True, slots=True)
class Gate:
    """One test of a release: whether the mean over devices of one figure is above a limit.

    Attributes:
        name: `install`, `fault`, or a measure.
        limit: of the mean, in the unit of `measure`; a share of devices for `install` and `fault`.
        most: the largest value that counts.
        least: the smallest one, 0 or less: a device that is better than before counts at most so.
    """

    name: GateName
    limit: float
    most: float = 1.0
    least: float = 0.0

    def scale(self, values: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return values as shares of the way from `least` to `most`, within 0..1."""
        return np.clip((np.asarray(values) - self.least) / (self.most - self.least), 0.0, 1.0)

    def read(self, samples: Iterable[Sample]) -> NDArray[np.float64]:
        """Return what the devices that have answered show, in their order."""
        values = self.read_known(samples)
        return values[~np.isnan(values)]

    def read_known(self, samples: Iterable[Sample]) -> NDArray[np.float64]:
        """Return what each device shows, NaN for one that has not answered."""
        if self.name == "install":
            shown = [math.nan if one.is_failed is None else one.is_failed for one in samples]
        elif self.name == "fault":
            shown = [math.nan if one.is_failed is None else one.fault != "" for one in samples]
        else:
            shown = [one.measures.get(self.name, math.nan) for one in samples]
        return np.array(shown, np.float64)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Devices that are judged together.

    Attributes:
        where: empty for all, else ` of class NAME`.
        samples: of the devices.
        needed: evidence that stops the rollout, the logarithm of a capital; see `betting`.
    """

    where: str
    samples: Sequence[Sample]
    needed: float


def list_groups(samples: Iterable[Sample], limits: GateLimits) -> list[SampleGroup]:
    """Return all devices, and those of each class where there are several."""
    everywhere = list(samples)
    of_class: dict[str, list[Sample]] = {}
    for sample in everywhere:
        of_class.setdefault(sample.device_class, []).append(sample)
    # Half of alpha for the whole fleet, half for all its classes together: a package that is bad for one
    # class of many must not hide among the good ones.
    share = 0.5 if len(of_class) > 1 else 1.0
    groups = [SampleGroup("", everywhere, math.log(_TESTS / (limits.alpha * share)))]
    if len(of_class) > 1:
        needed = math.log(_TESTS / (limits.alpha * share / len(of_class)))
        groups += [SampleGroup(f" of class {name}", of_class[name], needed) for name in sorted(of_class)]
    return groups


def list_gates(limits: GateLimits) -> list[Gate]:
    """Return the tests of a release, without those whose limits are off."""
    gates = [Gate("install", limits.max_failed_share), Gate("fault", limits.max_faulty_share)]
    ratios = math.log(_LARGEST_RATIO), -math.log(_BEST_RATIO)
    if limits.max_latency_ratio < _LARGEST_RATIO:
        gates.append(Gate("latency", math.log(limits.max_latency_ratio), *ratios))
    if limits.max_energy_ratio < _LARGEST_RATIO:
        gates.append(Gate("energy", math.log(limits.max_energy_ratio), *ratios))
    if limits.max_extra_errors < 1:
        gates.append(Gate("errors", limits.max_extra_errors, 1.0, -_FEWEST_ERRORS))
    if limits.min_agreement > 0:
        gates.append(Gate("disagreement", 1.0 - limits.min_agreement))
    if limits.max_drift < _LARGEST_DRIFT:
        gates.append(Gate("drift", limits.max_drift, _LARGEST_DRIFT, -_LEAST_DRIFT))
    return gates


def judge_samples(samples: Iterable[Sample], limits: GateLimits) -> Judgement:
    """Return what the samples say about a release.

    Args:
        samples: of all devices that have answered, in any order.
        limits: of the release.
    """
    leaning, suspicion = 0.0, ""
    for group in list_groups(samples, limits):
        for gate in list_gates(limits):
            values = gate.read(group.samples)
            evidence = weigh(gate, values)
            if evidence >= group.needed:
                verdict = describe(gate, values, group.where)
                return Judgement(verdict=verdict, leaning=1.0, suspicion=verdict.sentence)
            leans = evidence / group.needed
            if not group.where and 0 < len(values) < _FEW and values.mean() > 2 * gate.limit:
                leans = max(leans, _DOUBT)
            if leans > leaning:
                leaning = leans
                suspicion = describe(gate, values, group.where).sentence
    return Judgement(verdict=None, leaning=leaning, suspicion=suspicion)


def weigh(gate: Gate, values: NDArray[np.float64]) -> float:
    """Return the evidence that a gate has against the release."""
    return log_capital(gate.scale(values), float(gate.scale(gate.limit))) if (values > 0).any() else 0.0


def describe(gate: Gate, values: NDArray[np.float64], where: str) -> Verdict:
    """Return what a gate says of values, whether it is for or against the release.

    Args:
        gate: which.
        values: what `Gate.read` returns, at least one.
        where: see `SampleGroup`.
    """
    if gate.name != "install" and gate.name != "fault":
        return _describe_mean(gate.name, values.tolist(), gate.limit, where)
    count, answered = int(values.sum()), len(values)
    what = "failed to install it" if gate.name == "install" else "crash with it, answer NaN or fell back"
    text = f"{count} of {answered} devices{where} that began {what}, expected at most {gate.limit:.0%}"
    figures = {"count": count, "answered": answered, "limit": gate.limit}
    return Verdict(gate=gate.name, sentence=text, figures=figures)


def _describe_mean(name: Measure, values: Sequence[float], limit: float, where: str) -> Verdict:
    mean = statistics.fmean(values)
    on = f"on {len(values)} devices{where}"
    if name in ("latency", "energy"):
        ratio, most = math.exp(mean), math.exp(limit)
        text = f"{name} is {ratio:.2f} times the old version's {on}, expected at most {most:.2f}"
    elif name == "disagreement":
        text = f"agreement with the old version is {1 - mean:.3f} {on}, expected at least {1 - limit:.3f}"
    elif name == "errors":
        text = f"{mean:.1%} more calls fail than with the old version {on}, expected at most {limit:.1%}"
    else:
        text = f"drift is {mean:.2f} above the old version's {on}, expected at most {limit:.2f}"
    return Verdict(gate=name, sentence=text, figures={"mean": mean, "devices": len(values), "limit": limit})
