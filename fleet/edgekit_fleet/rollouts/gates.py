"""The gates of a rollout: whether the answers of devices speak against the release.

Only devices that have answered count, or that may answer at any moment, and each is one sample: a device
cannot outvote others by its number of calls. The test (`edgekit_fleet.rollouts.betting`) may be asked after
every answer, so that a bad release stops at the first few devices: 30 failures of 100 devices stop a group of
1,000. The chance that a release that keeps all limits is stopped, over the whole rollout, is at most
`GateLimits.alpha`.

Latency, energy, errors and drift are differences: after minus before on the device itself, less the same
difference on devices of its class that still run the old version, in the same periods. So neither a slow
device nor a busy evening speaks against a release.

Each model of a release has tests of its own, and so has each stage of its figures: after 20 calls on a
device, 200, 2,000 and 20,000. Within a test each device counts once, as the bound on wrong stops demands; a
later stage sees faults that show only after hours.
"""

import bisect
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# Random differences have a mean of 0, which stays near 0 only if improved devices count as such.
_BEST_RATIO: Final = 1.2
_FEWEST_ERRORS: Final = 0.1
_LEAST_DRIFT: Final = 0.1
_MOST_LOG: Final = 20.0
_LARGEST_DRIFT: Final = 2.0
_FEW: Final = 5
"""With fewer devices no test can decide; then a mean of more than twice its limit is a doubt for a person."""
_DOUBT: Final = 0.5
_TESTS: Final = 7  # the measures, failed installs, faults
_STAGE_SHARES: Final = (0.5, 0.25, 0.125, 0.125)  # share of each stage in the alpha of a measure
_STAGE_FACTOR: Final = 10  # calls of a stage over those of the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """Limits that a release must keep; a limit of 0 (agreement) or infinity is not tested.

    Attributes:
        max_failed_share: share of devices that could not install it, or whose own trial rejected it.
        max_faulty_share: share of devices with a crash loop, NaN, or a fallback to the old version.
        max_latency_ratio, max_energy_ratio: mean over devices of new over old.
        max_extra_errors: mean over devices of the share of calls that failed, new less old.
        min_agreement: mean over devices of the agreement with the old version on the same inputs.
        max_drift: mean over devices of the population stability index, new less old.
        min_requests: calls that a device must have answered before it counts for latency and the like; each
            later stage needs ten times as many.
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
    """The evidence of one device about the release; each field but `fault` is fixed when it is first known.

    Attributes:
        device_class: class of the device.
        is_failed: whether the installation failed; None where it was refused beforehand. While it is under
            way it counts as one that succeeds: failures answer before successes do.
        fault: what went wrong after the installation.
        measures: (model, stage) -> result of `measure`, for stages with enough answered calls.
    """

    device_class: str
    is_failed: bool | None = None
    fault: Fault = ""
    measures: Mapping[tuple[str, int], Mapping[Measure, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a release stops.

    Attributes:
        gate: the gate that it missed.
        sentence: the reason in words.
        figures: figures that it rests on.
    """

    gate: str
    sentence: str
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Period:
    """Figures of one version on one device in a period.

    Attributes:
        requests: calls that were answered.
        latency_ms, energy_mj: means of a call, or None where they are not known.
        errors: share of the calls that failed, or None without calls.
        drift: drift at the end of the period, or None.
    """

    requests: int = 0
    latency_ms: float | None = None
    energy_mj: float | None = None
    errors: float | None = None
    drift: float | None = None


def find_period(begin: ModelFigures | None, end: ModelFigures) -> Period:
    """Return the figures between two reports of the same version.

    Args:
        begin: the earlier report, or None for the time at which the version was opened. A report with more
            calls than the later one was made before a restart of the service, and counts as None.
        end: the later report.
    """
    if begin is None or begin.requests > end.requests or begin.failed > end.failed:
        begin = ModelFigures(model=end.model, version=end.version)
    requests, failed = end.requests - begin.requests, end.failed - begin.failed
    good = requests - failed
    answer_s = end.answer_s - begin.answer_s
    energy_mj = None
    if end.energy_mj is not None and requests > 0:  # the device reports the mean since the opening
        total = end.energy_mj * end.requests - (begin.energy_mj or 0.0) * begin.requests
        energy_mj = total / requests
    return Period(
        requests=requests,
        latency_ms=1e3 * answer_s / good if good > 0 and answer_s > 0 else None,
        energy_mj=energy_mj if energy_mj is not None and energy_mj > 0 else None,
        errors=failed / requests if requests > 0 else None,
        drift=end.drift,
    )


def find_stage(requests: int, limits: GateLimits) -> int:
    """Return the last stage that a model has reached by its calls on a device, from 0; -1 before it."""
    needed = [limits.min_requests * _STAGE_FACTOR**stage for stage in range(len(_STAGE_SHARES))]
    return bisect.bisect_right(needed, requests) - 1


def measure(
    before: Period | None, after: Period, controls: Sequence[tuple[Period, Period]]
) -> dict[Measure, float]:
    """Return the changes on a device with the new version, less those on devices without it.

    Args:
        before: the old version's figures on this device, or None if there was none.
        after: the new version's.
        controls: (before, after) for devices of the same class that still run the old version, in the same
            periods; with fewer than 5 nothing is subtracted.

    Returns:
        `latency` and `energy` as logarithms of ratios, `errors` and `drift` as differences; unknown ones are
        left out.
    """
    if before is None:
        return {}
    found: dict[Measure, float] = {}
    shifts = [_difference(*pair) for pair in controls]
    for name, change in _difference(before, after).items():
        known = [shift[name] for shift in shifts if name in shift]
        found[name] = change - (statistics.median(known) if len(known) >= _LEAST_CONTROLS else 0.0)
    return found


def _difference(before: Period, after: Period) -> dict[Measure, float]:
    found: dict[Measure, float] = {}
    if before.latency_ms is not None and after.latency_ms is not None:
        found["latency"] = _log_ratio(before.latency_ms, after.latency_ms)
    if before.energy_mj is not None and after.energy_mj is not None:
        found["energy"] = _log_ratio(before.energy_mj, after.energy_mj)
    if before.errors is not None and after.errors is not None:
        found["errors"] = after.errors - before.errors
    if before.drift is not None and after.drift is not None:
        found["drift"] = after.drift - before.drift
    return found


def _log_ratio(before: float, after: float) -> float:
    """Return log(after / before), bounded: a device may state anything, such as 1e-320 ms."""
    return min(max(math.log(after) - math.log(before), -_MOST_LOG), _MOST_LOG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict of the samples.

    Attributes:
        verdict: why the release must stop, or None while nothing is shown against it.
        leaning: how far the worst gate has come towards a stop, 0 to 1; at least a half if fewer than five
            devices in all show more than twice its limit.
        suspicion: statement of that gate, or an empty string.
    """

    verdict: Verdict | None
    leaning: float
    suspicion: str


@dataclass(frozen=True, slots=True)
class Gate:
    """One test of a release: whether the mean over devices of one figure is above a limit.

    Attributes:
        name: `install`, `fault`, or a measure.
        limit: limit of the mean, in the unit of `measure`; a share of devices for `install` and `fault`.
        alpha: its share of the chance of a wrong stop.
        most: the largest value that counts.
        least: the smallest value that counts, 0 or less: an improved device counts with no less.
        model, stage: model and stage of a measure, see `Sample.measures`.
        of_model: empty if the release has one model, else ` of MODEL`.
    """

    name: GateName
    limit: float
    alpha: float
    most: float = 1.0
    least: float = 0.0
    model: str = ""
    stage: int = 0
    of_model: str = ""

    def scale(self, values: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return values as shares of the way from `least` to `most`, within 0..1."""
        return np.clip((np.asarray(values) - self.least) / (self.most - self.least), 0.0, 1.0)


_NOTHING: Final[Mapping[Measure, float]] = {}


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Devices that are judged together.

    Attributes:
        where: empty for all, else ` of class NAME`.
        members: which of all samples are in the group: bool [number of samples].
        alpha: its share of the chance of a wrong stop.
    """

    where: str
    members: NDArray[np.bool_]
    alpha: float

    def choose(self, known: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values of its devices that have answered, from the values of all (`read_gates`)."""
        values = known[self.members]
        return values[~np.isnan(values)]


def list_groups(samples: Sequence[Sample]) -> list[SampleGroup]:
    """Return the group of all devices, and one for each class if there are several."""
    classes = np.array([sample.device_class for sample in samples])
    names = sorted(set(classes.tolist()))
    everywhere = np.ones(len(samples), np.bool_)
    if len(names) < 2:
        return [SampleGroup("", everywhere, 1.0)]
    # Half of alpha is for the whole fleet, half for all its classes together: a package that is bad for one
    # class must not hide among the good ones.
    groups = [SampleGroup("", everywhere, 0.5)]
    return groups + [SampleGroup(f" of class {name}", classes == name, 0.5 / len(names)) for name in names]


def list_gates(limits: GateLimits, models: Sequence[str]) -> list[Gate]:
    """Return the tests of a release, without those whose limits are off.

    Args:
        limits: limits of the release.
        models: models that it changes.
    """
    share = limits.alpha / _TESTS
    gates = [
        Gate("install", limits.max_failed_share, share),
        Gate("fault", limits.max_faulty_share, share),
    ]
    for stage, stage_share in enumerate(_STAGE_SHARES):
        for model in models:
            of_model = f" of {model}" if len(models) > 1 else ""
            alpha = share / len(models) * stage_share
            gates += [
                Gate(name, limit, alpha, most, least, model, stage, of_model)
                for name, limit, most, least in _list_measured(limits)
            ]
    return gates


def _list_measured(limits: GateLimits) -> list[tuple[Measure, float, float, float]]:
    """Return (measure, limit, most, least) of the measures whose limits are on."""
    most, least = math.log(_LARGEST_RATIO), -math.log(_BEST_RATIO)
    found: list[tuple[Measure, float, float, float]] = []
    if limits.max_latency_ratio < _LARGEST_RATIO:
        found.append(("latency", math.log(limits.max_latency_ratio), most, least))
    if limits.max_energy_ratio < _LARGEST_RATIO:
        found.append(("energy", math.log(limits.max_energy_ratio), most, least))
    if limits.max_extra_errors < 1:
        found.append(("errors", limits.max_extra_errors, 1.0, -_FEWEST_ERRORS))
    if limits.min_agreement > 0:
        found.append(("disagreement", 1.0 - limits.min_agreement, 1.0, 0.0))
    if limits.max_drift < _LARGEST_DRIFT:
        found.append(("drift", limits.max_drift, _LARGEST_DRIFT, -_LEAST_DRIFT))
    return found


def read_gates(
    samples: Sequence[Sample], gates: Iterable[Gate]
) -> Iterator[tuple[Gate, NDArray[np.float64]]]:
    """Yield each gate for which there are answers, with the value of each device; NaN without an answer.

    Args:
        samples: samples of the devices.
        gates: measures of the same model and stage stand together.
    """
    place, at_place, is_known = ("", -1), [_NOTHING], False
    for gate in gates:
        if gate.name == "install":
            shown = [math.nan if one.is_failed is None else one.is_failed for one in samples]
        elif gate.name == "fault":
            shown = [math.nan if one.is_failed is None else one.fault != "" for one in samples]
        else:
            if place != (gate.model, gate.stage):
                place = gate.model, gate.stage
                at_place = [one.measures.get(place, _NOTHING) for one in samples]
                is_known = any(at_place)
            if not is_known:
                continue
            shown = [each.get(gate.name, math.nan) for each in at_place]
        yield gate, np.array(shown, np.float64)


def judge_samples(samples: Iterable[Sample], limits: GateLimits, models: Sequence[str]) -> Judgement:
    """Return the judgement of the samples about a release.

    Args:
        samples: samples of all devices that have answered, in any order.
        limits: limits of the release.
        models: models that it changes.
    """
    everyone = list(samples)
    groups = list_groups(everyone)
    leaning, suspicion = 0.0, ""
    for gate, known in read_gates(everyone, list_gates(limits, models)):
        if not (known > 0).any():
            continue
        for group in groups:
            values = group.choose(known)
            share = weigh(gate, group, values)
            if share >= 1.0:
                verdict = describe(gate, values, group.where)
                return Judgement(verdict=verdict, leaning=1.0, suspicion=verdict.sentence)
            is_first = gate.stage == 0 and not group.where
            if is_first and 0 < len(values) < _FEW and values.mean() > 2 * gate.limit:
                share = max(share, _DOUBT)
            if share > leaning:
                leaning, suspicion = share, describe(gate, values, group.where).sentence
    return Judgement(verdict=None, leaning=leaning, suspicion=suspicion)


def find_needed(gate: Gate, group: SampleGroup) -> float:
    """Return the evidence at which the rollout stops: the logarithm of a capital, see `betting`."""
    return -math.log(gate.alpha * group.alpha)


def weigh(gate: Gate, group: SampleGroup, values: NDArray[np.float64]) -> float:
    """Return how far the evidence of a gate has come towards a stop, which is at 1; 0 if it has not begun."""
    scaled, limit = gate.scale(values), float(gate.scale(gate.limit))
    if not len(values) or scaled.mean() <= limit:  # no bet has won anything yet
        return 0.0
    return max(log_capital(scaled, limit) / find_needed(gate, group), 0.0)


def describe(gate: Gate, values: NDArray[np.float64], where: str) -> Verdict:
    """Return the statement of a gate about values, for or against the release.

    Args:
        gate: which.
        values: values from `SampleGroup.choose`, at least one.
        where: see `SampleGroup`.
    """
    if gate.name != "install" and gate.name != "fault":
        return _describe_mean(gate, gate.name, values.tolist(), where)
    count, answered = int(values.sum()), len(values)
    what = "failed to install it" if gate.name == "install" else "crash with it, answer NaN or fell back"
    text = f"{count} of {answered} devices{where} that began {what}, expected at most {gate.limit:.0%}"
    figures = {"count": count, "answered": answered, "limit": gate.limit}
    return Verdict(gate=gate.name, sentence=text, figures=figures)


def _describe_mean(gate: Gate, name: Measure, values: Sequence[float], where: str) -> Verdict:
    mean, limit, model = statistics.fmean(values), gate.limit, gate.of_model
    on = f"on {len(values)} devices{where}"
    if name in ("latency", "energy"):
        ratio, most = math.exp(mean), math.exp(limit)
        text = f"{name}{model} is {ratio:.2f} times the old version's {on}, expected at most {most:.2f}"
    elif name == "disagreement":
        text = (
            f"agreement{model} with the old version is {1 - mean:.3f} {on}, expected at least {1 - limit:.3f}"
        )
    elif name == "errors":
        text = (
            f"{mean:.1%} more calls{model} fail than with the old version {on}, expected at most {limit:.1%}"
        )
    else:
        text = f"drift{model} is {mean:.2f} above the old version's {on}, expected at most {limit:.2f}"
    return Verdict(gate=name, sentence=text, figures={"mean": mean, "devices": len(values), "limit": limit})
