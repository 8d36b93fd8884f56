"""The gates of a rollout, which test whether the answers of devices are evidence against the release.

Only devices that have answered, or may answer at any moment, count. Each is one sample, so its number of
calls does not matter. The tests (`edgekit_fleet.rollouts.betting`) may be repeated after every answer, so a
bad release stops after a few devices. For example, 30 failures in 100 devices stop a group of 1,000. The
probability that a release within all limits is stopped, over the whole rollout, is at most the limit `alpha`.

For latency, energy, errors and drift, the evidence is the change on a device since it got the release, minus
the median change on devices of its class that still run the old version. So neither a slow device nor a busy
evening counts against a release.

Each model of a release has its own tests, and so has each stage of its figures: after 20, 200, 2,000 and
20,000 calls on a device. Within a test, each device counts once, because the bound on wrong stops requires
this. The later stages detect faults that only appear after hours.

An example with the default limits and one model: Alpha is 0.01 and is divided among seven gates. The gate
`install` gets 0.0014, and stops the rollout at a capital of 1 / 0.0014, about 700. Of the first 30 devices, 8
fail to install the release, and the limit is 5 %. `weigh` returns 0.93, and the rollout waits. After a ninth
failure it stops: "9 of 30 devices that began failed to install it, expected at most 5%". The first stage of
latency gets half of its gate's alpha. If the release doubles the latency, 15 devices are enough to stop it.
"""

import bisect
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_fleet.rollouts.betting import log_capital
from edgekit_fleet.rollouts.gate_table import ALPHA, GATES, MIN_REQUESTS, Gate, Sample
from edgekit_runtime.agent.documents import ModelFigures

_MIN_CONTROLS: Final = 5
_MIN_DEVICES_FOR_TEST: Final = 5
"""With fewer devices no test can decide. A mean above twice its limit is then a doubt that a person
resolves."""
_DOUBT: Final = 0.5
_STAGE_SHARES: Final = (0.5, 0.25, 0.125, 0.125)  # share of each stage in the alpha of a figure
_STAGE_FACTOR: Final = 10  # calls of a stage over those of the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reason why a release stops.

    Attributes:
        gate: The name of the gate.
        sentence: The reason in words.
        figures: The figures in the sentence, by name.
    """

    gate: str
    sentence: str
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Period:
    """The figures of one version on one device in a period.

    Attributes:
        requests: The number of answered calls.
        values: The known figures, by name of the gate.
    """

    requests: int = 0
    values: Mapping[str, float] = field(default_factory=dict)


def find_period(begin: ModelFigures | None, end: ModelFigures) -> Period:
    """Return the figures of the time between two reports of the same version on a device.

    Args:
        begin: The earlier report, or None for the time at which the version was opened. A report with more
            calls than `end` is from before a restart of the service, and is treated as None.
        end: The later report.
    """
    if begin is None or begin.requests > end.requests or begin.failed > end.failed:
        begin = ModelFigures(model=end.model, version=end.version)
    values = {gate.name: gate.figure(begin, end) for gate in GATES if gate.figure is not None}
    return Period(
        end.requests - begin.requests, {name: value for name, value in values.items() if value is not None}
    )


def find_stage(requests: int, limits: Mapping[str, float]) -> int:
    """Return the last stage, from 0, that a model with `requests` calls on a device has reached, or -1."""
    min_requests = limits.get(MIN_REQUESTS.name, MIN_REQUESTS.default)
    needed = [min_requests * _STAGE_FACTOR**stage for stage in range(len(_STAGE_SHARES))]
    return bisect.bisect_right(needed, requests) - 1


def measure(
    before: Period | None, after: Period, controls: Sequence[tuple[Period, Period]]
) -> dict[str, float]:
    """Return the evidence of a device: the change of its figures minus the median change of the controls.

    Args:
        before: The figures of the old version on this device, or None if there was no old version. Then, only
            gates with the comparison `level` have evidence.
        after: The figures of the new version.
        controls: The figures of each control device in the same two periods. Control devices have the same
            class and still run the old version. If fewer than 5 of them have known figures for a gate, the
            median change for this gate is taken as 0.

    Returns:
        A dict from the name of a gate to the evidence, which is larger for worse figures (see
        `gate_table.Gate`). Gates with unknown figures are not included.
    """
    evidence: dict[str, float] = {}
    for gate in GATES:
        if gate.name not in after.values:
            continue
        if gate.compare == "level":
            evidence[gate.name] = gate.find_level(after.values[gate.name])
        elif before is not None and gate.name in before.values:
            change = gate.find_change(before.values[gate.name], after.values[gate.name])
            shifts = [
                gate.find_change(earlier.values[gate.name], later.values[gate.name])
                for earlier, later in controls
                if gate.name in earlier.values and gate.name in later.values
            ]
            shift = statistics.median(shifts) if len(shifts) >= _MIN_CONTROLS else 0.0
            evidence[gate.name] = change - shift
    return evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result of judging the samples.

    Attributes:
        verdict: The reason why the release must stop, or None if no test stops it.
        leaning: How close the worst gate is to a stop, from 0 to 1. It is at least 0.5 if fewer than five
            devices have answered and the mean of their evidence is more than twice the limit.
        suspicion: The statement of the gate that determines `leaning`. It is empty if `leaning` is 0.
    """

    verdict: Verdict | None
    leaning: float
    suspicion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTest:
    """A test whether the mean evidence of devices is above a limit.

    Attributes:
        gate: The gate in `gate_table`.
        limit: The limit of the mean, in the unit of the gate's evidence.
        alpha: The probability of a wrong stop by this test.
        model, stage: The model and the stage that are tested (see `Sample.measures`). They are not used for a
            gate on a share of devices.
        of_model: The text ` of MODEL` in the verdict's sentence, or empty if the release has one model.
    """

    gate: Gate
    limit: float
    alpha: float
    model: str = ""
    stage: int = 0
    of_model: str = ""

    def scale(self, values: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return evidence scaled from `gate.least`..`gate.most` to 0..1, and clipped."""
        least, most = self.gate.least, self.gate.most
        return np.clip((np.asarray(values) - least) / (most - least), 0.0, 1.0)


_NOTHING: Final[Mapping[str, float]] = {}


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Devices that are judged together.

    Attributes:
        where: The text ` of class NAME` in the verdict's sentence, or empty for all devices.
        members: bool [samples], whether a sample is in the group.
        alpha: The share of a test's `alpha` for this group.
    """

    where: str
    members: NDArray[np.bool_]
    alpha: float

    def choose(self, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values of the group's members, without NaN.

        `evidence` is float64 [samples]. It is NaN for a device without an answer.
        """
        values = evidence[self.members]
        return values[~np.isnan(values)]


def list_groups(samples: Sequence[Sample]) -> list[SampleGroup]:
    """Return the group of all devices and, if there are several classes, a group for each class."""
    classes = np.array([sample.device_class for sample in samples])
    names = sorted(set(classes.tolist()))
    everywhere = np.ones(len(samples), np.bool_)
    if len(names) < 2:
        return [SampleGroup("", everywhere, 1.0)]
    # Half of alpha is for the whole fleet, half for all its classes together: a package that is bad for one
    # class must not hide among the good ones.
    groups = [SampleGroup("", everywhere, 0.5)]
    return groups + [SampleGroup(f" of class {name}", classes == name, 0.5 / len(names)) for name in names]


def list_tests(limits: Mapping[str, float], models: Sequence[str]) -> list[GateTest]:
    """Return the tests of a release. A gate without a limit has no test.

    Alpha is divided equally among the gates of the rollout, including those without a test.

    Args:
        limits: The limits of the release (see `gate_table.make_limits`).
        models: The models that the release changes.
    """
    share = limits.get(ALPHA.name, ALPHA.default) / max(sum(gate.limit.name in limits for gate in GATES), 1)
    active = [(gate, limit) for gate in GATES if (limit := gate.find_limit(limits)) is not None]
    tests = [GateTest(gate=gate, limit=limit, alpha=share) for gate, limit in active if gate.figure is None]
    for stage, stage_share in enumerate(_STAGE_SHARES):
        for model in models:
            of_model = f" of {model}" if len(models) > 1 else ""
            alpha = share / len(models) * stage_share
            tests += [
                GateTest(gate=gate, limit=limit, alpha=alpha, model=model, stage=stage, of_model=of_model)
                for gate, limit in active
                if gate.figure is not None
            ]
    return tests


def read_evidence(
    samples: Sequence[Sample], tests: Iterable[GateTest]
) -> Iterator[tuple[GateTest, NDArray[np.float64]]]:
    """Yield the tests, each with the evidence of all devices.

    A test of a figure is skipped if no device has evidence. The evidence is float64 [samples]. It is NaN for
    a device without an answer.

    Args:
        samples: The samples of the devices.
        tests: The tests. Tests of the same model and stage must be adjacent.
    """
    key, measures, has_measures = ("", -1), [_NOTHING], False
    for test in tests:
        if (has_outcome := test.gate.outcome) is not None:
            values = [math.nan if sample.is_failed is None else has_outcome(sample) for sample in samples]
        else:
            if key != (test.model, test.stage):
                key = test.model, test.stage
                measures = [sample.measures.get(key, _NOTHING) for sample in samples]
                has_measures = any(measures)
            if not has_measures:
                continue
            values = [measured.get(test.gate.name, math.nan) for measured in measures]
        yield test, np.array(values, np.float64)


def judge_samples(samples: Iterable[Sample], limits: Mapping[str, float], models: Sequence[str]) -> Judgement:
    """Judge a release by the samples of devices.

    Args:
        samples: The samples, in any order, of all devices that have answered or may answer at any moment.
        limits: See `list_tests`.
        models: See `list_tests`.
    """
    answered = list(samples)
    groups = list_groups(answered)
    leaning, suspicion = 0.0, ""
    for test, evidence in read_evidence(answered, list_tests(limits, models)):
        if not (evidence > 0).any():
            continue
        for group in groups:
            values = group.choose(evidence)
            share = weigh(test, group, values)
            if share >= 1.0:
                verdict = describe(test, values, group.where)
                return Judgement(verdict=verdict, leaning=1.0, suspicion=verdict.sentence)
            is_first = test.stage == 0 and not group.where
            is_small = 0 < len(values) < _MIN_DEVICES_FOR_TEST
            if is_first and is_small and values.mean() > 2 * test.limit:
                share = max(share, _DOUBT)
            if share > leaning:
                leaning, suspicion = share, describe(test, values, group.where).sentence
    return Judgement(verdict=None, leaning=leaning, suspicion=suspicion)


def find_needed(test: GateTest, group: SampleGroup) -> float:
    """Return the natural logarithm of the capital at which a test stops the rollout (see `betting`)."""
    return -math.log(test.alpha * group.alpha)


def weigh(test: GateTest, group: SampleGroup, values: NDArray[np.float64]) -> float:
    """Return how close a test is to stopping the rollout.

    The result is 0 if the mean is within the limit. At 1 or more, the rollout stops. `values` are from
    `SampleGroup.choose`.
    """
    scaled, limit = test.scale(values), float(test.scale(test.limit))
    if not len(values) or scaled.mean() <= limit:  # no bet has won anything yet
        return 0.0
    return max(log_capital(scaled, limit) / find_needed(test, group), 0.0)


def describe(test: GateTest, values: NDArray[np.float64], where: str) -> Verdict:
    """Return the statement of a test about values, for or against the release.

    Args:
        test: A test of the release.
        values: Values from `SampleGroup.choose`, at least one.
        where: See `SampleGroup`.
    """
    gate, devices = test.gate, len(values)
    figures: dict[str, float]
    if gate.figure is None:
        figures = {"count": int(values.sum()), "answered": devices, "limit": test.limit}
        return Verdict(gate=gate.name, sentence=gate.sentence.format(**figures, where=where), figures=figures)
    mean = statistics.fmean(values.tolist())
    sentence = gate.sentence.format(
        model=test.of_model,
        on=f"on {devices} devices{where}",
        mean=gate.to_figure(mean),
        limit=gate.to_figure(test.limit),
    )
    figures = {"mean": mean, "devices": devices, "limit": test.limit}
    return Verdict(gate=gate.name, sentence=sentence, figures=figures)
