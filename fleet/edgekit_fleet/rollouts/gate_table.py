"""The gates of a rollout, one row each, and the limits that users may set for them.

The decisions, the HTTP interface, the console, the command line and the table in docs/explanation/rollouts.md
are built from `GATES` and `LIMITS`. A gate on the battery would be this row:

    Gate(
        name="battery",
        title="Battery",
        unit="charge, below the old version's",
        limit=Limit("max_battery_loss", 0.2, Range(0.01, 1), "Most charge lost, share of a battery"),
        sentence="charge{model} is {mean:.0%} below the old version's {on}, expected at most {limit:.0%}",
        figure=lambda _begin, end: end.gauges.get("battery"),
        compare="difference",
        worse="lower",
        least=-0.1,
        form="percent",
    )

The device reports its figure in `gauges` (see `edgekit_runtime.agent.figures`). The limits of a rollout are
stored at its start, so a new row does not apply to rollouts that have already started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import FleetError

if TYPE_CHECKING:
    from edgekit_runtime.agent.documents import ModelFigures


Fault: TypeAlias = Literal["", "not-finite", "crash-loop", "fallback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The evidence of one device about the release. Known values never change, except `fault`.

    Attributes:
        is_failed: Whether the first installation failed, or None if the release was not tried. It is False
            while the installation is running, because failures are reported earlier than successes.
        fault: The fault after the installation, or empty.
        measures: The result of `gates.measure` for each (model, stage) with enough answered calls.
    """

    device_class: str
    is_failed: bool | None = None
    fault: Fault = ""
    measures: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limit:
    """A number that users may set when a rollout starts.

    Attributes:
        name: The name in settings, interface and form. The command's option has dashes instead.
        default: The default value.
        range: The range of accepted values.
        label: The meaning, for users.
        default_text: A text to show if the default depends on the release.
        is_whole: Whether only whole numbers are accepted.
    """

    name: str
    default: float
    range: Range
    label: str
    default_text: str = ""
    is_whole: bool = False

    @property
    def shown_default(self) -> str:
        return self.default_text or f"{self.default:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A limit on a figure of the devices, such as their latency.

    The evidence of a device is a number that is larger for a worse figure. It is the logarithm of a ratio, a
    difference, or the distance of a level from its best value.

    Attributes:
        name: The name in decisions and in the audit log. It must never change.
        title, unit: The title and the axis label of its chart.
        sentence: The format string of a verdict, with the fields `{model}`, `{on}`, `{mean}` and `{limit}`.
            For a gate on a share of devices, the fields are `{count}`, `{answered}`, `{limit}` and `{where}`.
        outcome: For a gate on a share of devices, returns whether a device counts as bad. A device is
            included after its first answer.
        figure: For any other gate, returns the figure of a model in the time between two reports, or None if
            it is unknown. A device is included after `min_requests` calls.
        compare: `ratio` or `difference` to the old version on the same device, or `level` for no comparison.
        worse: The direction in which the figure gets worse.
        ideal: The best level.
        most, least: The bounds to which evidence is clipped. For a figure that varies at random, `least` is
            negative, so that the mean evidence of a good release is near 0.
        form: The format of its values.
    """

    name: str
    title: str
    unit: str
    limit: Limit
    sentence: str
    outcome: Callable[[Sample], bool] | None = None
    figure: Callable[[ModelFigures, ModelFigures], float | None] | None = None
    compare: Literal["ratio", "difference", "level"] = "level"
    worse: Literal["higher", "lower"] = "higher"
    ideal: float = 0.0
    most: float = 1.0
    least: float = 0.0
    form: Literal["times", "percent", "number"] = "percent"

    def find_level(self, value: float) -> float:
        return value - self.ideal if self.worse == "higher" else self.ideal - value

    def find_change(self, before: float, after: float) -> float:
        change = after - before
        if self.compare == "ratio":  # bounded: a device may state anything, such as 1e-320 ms
            change = min(max(math.log(after) - math.log(before), -_MAX_LOG_RATIO), _MAX_LOG_RATIO)
        return change if self.worse == "higher" else -change

    def find_limit(self, limits: Mapping[str, float]) -> float | None:
        """Return the limit of this gate in the unit of its evidence, such as the logarithm of a ratio.

        It is None if the rollout sets no limit, or a limit that the evidence cannot exceed (at least `most`).
        """
        value = limits.get(self.limit.name)
        if value is None:
            return None
        if self.compare == "ratio":
            value = self.find_change(1.0, value)
        elif self.compare == "level":
            value = self.find_level(value)
        return value if value < self.most else None

    def to_figure(self, evidence: float) -> float:
        """Convert a mean of evidence to a figure in the unit of the limit that users set."""
        if self.compare == "difference":
            return evidence
        sign = 1.0 if self.worse == "higher" else -1.0
        return math.exp(sign * evidence) if self.compare == "ratio" else self.ideal + sign * evidence


def _latency_ms(begin: ModelFigures, end: ModelFigures) -> float | None:
    succeeded = (end.requests - begin.requests) - (end.failed - begin.failed)
    answer_s = end.answer_s - begin.answer_s
    return 1e3 * answer_s / succeeded if succeeded > 0 and answer_s > 0 else None


def _energy_mj(begin: ModelFigures, end: ModelFigures) -> float | None:
    requests = end.requests - begin.requests
    if end.energy_mj is None or requests <= 0:
        return None
    # The device reports the mean since the opening.
    mean = (end.energy_mj * end.requests - (begin.energy_mj or 0.0) * begin.requests) / requests
    return mean if mean > 0 else None


def _failed_share(begin: ModelFigures, end: ModelFigures) -> float | None:
    requests = end.requests - begin.requests
    return (end.failed - begin.failed) / requests if requests > 0 else None


def _agreement(_begin: ModelFigures, end: ModelFigures) -> float | None:
    return min(max(end.agreement, 0.0), 1.0) if end.agreement is not None and end.compared else None


def _drift(_begin: ModelFigures, end: ModelFigures) -> float | None:
    return end.drift


_MAX_LOG_RATIO: Final = 20.0
_MAX_RATIO: Final = math.log(4.0)
_BEST_RATIO: Final = -math.log(1.2)
_SHARE: Final = Range(1e-6, 1)
_RATIO: Final = Range(1.0001, 1000)
_RATIO_SENTENCE: Final = "{model} is {mean:.2f} times the old version's {on}, expected at most {limit:.2f}"

MIN_AGREEMENT: Final = Limit(
    "min_agreement",
    0.95,
    Range(0, 0.9999),
    "Least agreement with the old version on the same inputs",
    default_text="by the release",
)

GATES: Final = (
    Gate(
        name="install",
        title="Failed installations",
        unit="share of devices",
        limit=Limit("max_failed_share", 0.05, _SHARE, "Most failed installations, share of devices"),
        sentence="{count} of {answered} devices{where} that began failed to install it,"
        " expected at most {limit:.0%}",
        outcome=lambda sample: bool(sample.is_failed),
    ),
    Gate(
        name="fault",
        title="Faulty devices",
        unit="share of devices that crash, answer NaN or fell back",
        limit=Limit("max_faulty_share", 0.01, _SHARE, "Most faulty devices, share of devices"),
        sentence="{count} of {answered} devices{where} that began crash with it, answer NaN or fell back,"
        " expected at most {limit:.0%}",
        outcome=lambda sample: sample.fault != "",
    ),
    Gate(
        name="latency",
        title="Latency",
        unit="times the old version's",
        limit=Limit("max_latency_ratio", 1.3, _RATIO, "Most latency, times the old version's"),
        sentence="latency" + _RATIO_SENTENCE,
        figure=_latency_ms,
        compare="ratio",
        most=_MAX_RATIO,
        least=_BEST_RATIO,
        form="times",
    ),
    Gate(
        name="energy",
        title="Energy",
        unit="times the old version's",
        limit=Limit("max_energy_ratio", 1.3, _RATIO, "Most energy, times the old version's"),
        sentence="energy" + _RATIO_SENTENCE,
        figure=_energy_mj,
        compare="ratio",
        most=_MAX_RATIO,
        least=_BEST_RATIO,
        form="times",
    ),
    Gate(
        name="errors",
        title="Failed calls",
        unit="share, above the old version's",
        limit=Limit("max_extra_errors", 0.01, _SHARE, "Most failed calls, share above the old version's"),
        sentence="{mean:.1%} more calls{model} fail than with the old version {on},"
        " expected at most {limit:.1%}",
        figure=_failed_share,
        compare="difference",
        least=-0.1,
    ),
    Gate(
        name="disagreement",
        title="Disagreement",
        unit="share of answers that differ from the old version's",
        limit=MIN_AGREEMENT,
        sentence="agreement{model} with the old version is {mean:.3f} {on}, expected at least {limit:.3f}",
        figure=_agreement,
        worse="lower",
        ideal=1.0,
    ),
    Gate(
        name="drift",
        title="Drift",
        unit="stability index, above the old version's",
        limit=Limit("max_drift", 0.25, Range(0.001, 1000), "Most drift (PSI), above the old version's"),
        sentence="drift{model} is {mean:.2f} above the old version's {on}, expected at most {limit:.2f}",
        figure=_drift,
        compare="difference",
        most=2.0,
        least=-0.1,
        form="number",
    ),
)

MIN_REQUESTS: Final = Limit(
    "min_requests",
    20,
    Range(1, 10**9),
    "Least calls on a device before its figures count; later looks need 10, 100 and 1,000 times as many",
    is_whole=True,
)
ALPHA: Final = Limit("alpha", 0.01, Range(1e-9, 1), "Chance that a release which keeps all limits is stopped")
LIMITS: Final = (*(gate.limit for gate in GATES), MIN_REQUESTS, ALPHA)


def make_limits(changes: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return all limits of a rollout by name. Limits that are not in `changes` have their defaults.

    Raises:
        FleetError: A limit is unknown or out of range.
    """
    values = {limit.name: limit.default for limit in LIMITS} | dict(changes or {})
    limits = {limit.name: limit for limit in LIMITS}
    for name, value in values.items():
        if name not in limits:
            raise FleetError(f"unknown limit '{name[:80]}', known are {', '.join(limits)}")
        limit = limits[name]
        if value not in limit.range or (limit.is_whole and value != int(value)):
            whole = "a whole number from " * limit.is_whole
            raise FleetError(f"{name} is {value}, expected {whole}{limit.range}")
        values[name] = int(value) if limit.is_whole else value
    return values
