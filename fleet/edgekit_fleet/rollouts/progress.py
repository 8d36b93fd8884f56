"""The progress of a rollout: the sum of its log entries, in their order.

Each entry is written to the audit log before it counts here. So the same entries always give the same
progress, and `replay` can repeat every decision.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

from edgekit_fleet.rollouts.gate_table import Fault, Sample, make_limits
from edgekit_fleet.rollouts.outside_gates import (
    Evidence,
    OutsideFinding,
    OutsideGate,
    check_gates,
    judge_evidence,
)
from edgekit_runtime.dataclass_json import Range, from_plain, to_plain
from edgekit_runtime.errors import FleetError

_FIGURE: Final = Range(-1e12, 1e12)

Outcome: TypeAlias = Literal["succeeded", "failed", "refused", "superseded"]
Approval: TypeAlias = Literal["none", "first", "each"]
Action: TypeAlias = Literal["start", "retry", "wait", "ask", "pause", "succeed", "abort", "return"]
Order: TypeAlias = Literal["approve", "pause", "resume", "abort"]
LoadOrder: TypeAlias = Literal["new-first", "old-first", "unloaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How a rollout changes one model of its release.

    Attributes:
        classes: device classes for which the release has a package of the model.
        order, priority: see `DesiredModel`.
    """

    classes: tuple[str, ...]
    order: LoadOrder = "new-first"
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The settings of a rollout, frozen at its start.

    Attributes:
        waves: number of devices with the release at the end of each wave; the last number is all devices.
        minimum: devices of the first step. Each further step at most doubles the devices that were judged.
        limits: limits of the gates, see `gate_table.make_limits`.
        soak_s: how long a device must have the release before it is judged, unless it has answered enough
            calls.
        patience_s: a device that does not answer for this time counts as offline. The rollout continues; the
            device follows when it is back.
        step_timeout_s: time limit for enough answers, after which the rollout pauses and asks for a person.
        retries: further attempts on a device after one of `TRANSIENT_CODES`.
        spread_s: each device waits for a time drawn from 0 to this before it begins, so that a step of many
            devices does not download at once.
        approval: waves that somebody must approve before they begin: `none`, the `first` or `each`.
        is_dynamic: whether devices that match the selector later join at the end.
        window: local time of day in which devices switch, or None.
        trial: see `DesiredModel`.
        models: models of the release, by their names.
        evidence: gates of outside judges, by their names.
    """

    waves: tuple[int, ...]
    minimum: int
    limits: Mapping[str, float] = field(default_factory=make_limits)
    soak_s: float = 300.0
    patience_s: float = 3600.0
    step_timeout_s: float = 172_800.0
    retries: Annotated[int, Range(0, 10)] = 2
    spread_s: Annotated[float, Range(0.0, 86_400.0)] = 0.0
    approval: Approval = "none"
    is_dynamic: bool = False
    window: str | None = None
    trial: Literal["none", "shadow", "canary"] = "none"
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    evidence: Mapping[str, OutsideGate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_gates(self.evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEntry:
    """The rollout began.

    Attributes:
        devices: the cohort in its order.
        classes: class of each of the devices.
    """

    settings: RolloutSettings
    devices: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEntry:
    """Devices joined at the end of the cohort; the fields are as in `StartEntry`."""

    devices: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The evidence in the figures of one model on a device.

    Attributes:
        stage: stage that its calls have reached, see `gates.find_stage`. The reading also counts for all
            earlier stages without a reading.
        measures: see `gates.measure`.
    """

    model: str
    stage: int
    measures: Mapping[str, Annotated[float, _FIGURE]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEntry:
    """A device answered.

    Attributes:
        outcome: outcome of its execution, or None where only `fault` or `readings` are new.
        code: code of the execution, such as `self-test`.
        fault: fault that the new version has shown.
    """

    device: str
    outcome: Outcome | None = None
    code: str = ""
    fault: Fault = ""
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEntry:
    """A person, named `who`, ordered to approve, pause, resume or abort the rollout."""

    order: Order
    who: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next action, and the reason.

    Attributes:
        action: `start` and `retry` offer the release to `devices`. `abort` tells `devices` to go back to what
            they ran before; `return` repeats that where it failed. `ask` waits for an approval.
        devices: see `action`.
        wave: number of the open wave, from 0.
        sentence: the reason.
        figures: figures behind the decision.
        is_doubt: whether `action` is `pause` because the evidence leans against the release.
    """

    action: Action
    wave: int
    sentence: str
    devices: tuple[str, ...] = ()
    figures: Mapping[str, Annotated[float, _FIGURE]] = field(default_factory=dict)
    is_doubt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawalEntry:
    """Cancels the last decision for `devices`: they were not started or retried."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSetBack:
    """The manager's clock was `ahead_s` seconds ahead, and is right again.

    All later times in the rollout's progress are set to the time of this entry.
    """

    ahead_s: Annotated[float, Range(0.0, 1e12)]


Entry: TypeAlias = (
    StartEntry | JoinEntry | AnswerEntry | OrderEntry | Evidence | Decision | WithdrawalEntry | ClockSetBack
)

TRANSIENT_CODES: Final = frozenset(("timeout", "load", "internal"))
"""Transient failures: not done in time, the service did not serve it, the process of a step was killed.

A device repeats a download that breaks by itself, until the time of its execution is over.
"""

UNTRIED_CODES: Final = frozenset(
    ("disk-full", "memory", "budget", "battery", "pinned", "older", "window", "clock")
)
"""Reasons of a device for which it has not tried the release: they say nothing about it."""

_KINDS: Final[dict[str, type[Any]]] = {
    "started": StartEntry,
    "joined": JoinEntry,
    "answered": AnswerEntry,
    "ordered": OrderEntry,
    "evidence": Evidence,
    "decided": Decision,
    "withdrawn": WithdrawalEntry,
    "clock": ClockSetBack,
}


def entry_to_plain(entry: Entry) -> dict[str, Any]:
    """Return an entry as plain values, for the audit log."""
    name = next(name for name, kind in _KINDS.items() if isinstance(entry, kind))
    return {"kind": name, **to_plain(entry)}


def entry_from_plain(plain: Mapping[str, Any]) -> Entry:
    """Return the entry that `entry_to_plain` wrote.

    Raises:
        FleetError: `plain` is malformed.
    """
    fields = dict(plain)
    kind = _KINDS.get(str(fields.pop("kind", "")))
    if kind is None:
        raise FleetError(f"audit log: entry of an unknown kind {plain.get('kind')!r}")
    entry: Entry = from_plain(kind, fields, "audit log", FleetError)
    return entry


@dataclass(slots=True, kw_only=True)
class Member:
    """A device of the cohort.

    Attributes:
        sample: sample for the gates; None before its first answer.
        state: `pending` until it is offered the release, `started` until it answers, then the outcome.
            `returning` after it was told to go back, then `returned`; if it fails to go back, the outcome.
        started_at, answered_at: times of the last attempt and of its outcome, in seconds since 1970.
        attempts, returns: how often it was offered the release, and how often told to go back.
        code: code of the last outcome.
    """

    device_class: str
    state: Literal[
        "pending", "started", "succeeded", "failed", "refused", "superseded", "returning", "returned"
    ] = "pending"
    sample: Sample | None = None
    started_at: float = 0.0
    answered_at: float = 0.0
    attempts: int = 0
    returns: int = 0
    code: str = ""

    @property
    def is_untried(self) -> bool:
        """Return whether the device ended without trying the release, for one of `UNTRIED_CODES`."""
        return self.state in ("failed", "refused") and self.code in UNTRIED_CODES


@dataclass(slots=True, kw_only=True)
class Progress:
    """Everything known about a rollout.

    Attributes:
        begun_at, newest_at: times of the first and the newest entry, in seconds since 1970.
        members: device -> its state, in the order of the cohort.
        wave: the open wave, from 0.
        started: number of members that were offered the release.
        step_at: begin of `step_timeout_s`: when devices were last started, or a person resumed or approved.
        approved: waves with a number below this are approved.
        pause: the decision that paused it; None if a person paused it or it is not paused.
        resumed_with: value of `started` when a person last resumed the rollout after a pause with `is_doubt`.
        wants_abort: who ordered to abort, or None.
        last: the last decision, or None.
        stop: the decision to abort, or None.
        outside: gate of an outside judge -> what its evidence says.
    """

    settings: RolloutSettings
    begun_at: float = 0.0
    newest_at: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)
    state: Literal["running", "paused", "succeeded", "aborted"] = "running"
    wave: int = 0
    started: int = 0
    step_at: float = 0.0
    approved: int = 0
    pause: Decision | None = None
    resumed_with: int = 0
    wants_abort: str | None = None
    last: Decision | None = None
    stop: Decision | None = None
    outside: dict[str, OutsideFinding] = field(default_factory=dict)

    @property
    def wave_end(self) -> int:
        """Return how many devices of the cohort have the release at the end of the open wave."""
        waves = self.settings.waves
        return len(self.members) if self.wave >= len(waves) - 1 else min(waves[self.wave], len(self.members))

    def samples(self, now: float) -> list[Sample]:
        """Return the samples for the gates: samples of devices that have answered, then `unanswered`.

        `now`: seconds since 1970.
        """
        answered = [member.sample for member in self.members.values() if member.sample is not None]
        return answered + self.unanswered(now)

    def unanswered(self, now: float) -> list[Sample]:
        """Return a sample, counted as good, of each device that has begun and may still answer.

        A device counts for `patience_s` after it began. `now`: seconds since 1970.
        """
        return [
            Sample(device_class=member.device_class, is_failed=False)
            for member in self.members.values()
            if member.state == "started"
            and member.sample is None
            and now - member.started_at < self.settings.patience_s
        ]

    def list_awaited(self, now: float) -> list[str]:
        """Return the names of outside gates whose evidence is awaited at `now`, in seconds since 1970."""
        return [
            name
            for name, gate in sorted(self.settings.evidence.items())
            if (name not in self.outside or self.outside[name].outcome == "unclear")
            and (gate.deadline_s is None or now - self.begun_at < gate.deadline_s)
        ]


def begin(entry: StartEntry, at: float) -> Progress:
    """Return the progress at the start of a rollout; `at` is in seconds since 1970."""
    progress = Progress(settings=entry.settings, begun_at=at, newest_at=at, step_at=at)
    _join(progress, entry)
    return progress


def apply(progress: Progress, entry: Entry, at: float) -> None:
    """Add an entry; answers from outside the cohort, and evidence for undeclared gates, change nothing.

    Args:
        progress: progress to change.
        entry: the next entry.
        at: when the entry was written, in seconds since 1970.
    """
    if isinstance(entry, AnswerEntry):
        _apply_answer(progress, entry, at)
    elif isinstance(entry, Decision):
        _apply_decision(progress, entry, at)
    elif isinstance(entry, OrderEntry):
        _apply_order(progress, entry, at)
    elif isinstance(entry, Evidence):
        _apply_evidence(progress, entry)
    elif isinstance(entry, JoinEntry):
        _join(progress, entry)
    elif isinstance(entry, WithdrawalEntry):
        _withdraw(progress, entry)
    else:
        _set_back(progress, at)
    progress.newest_at = at


def _join(progress: Progress, entry: StartEntry | JoinEntry) -> None:
    for device, device_class in zip(entry.devices, entry.classes, strict=True):
        progress.members.setdefault(device, Member(device_class=device_class))


def _set_back(progress: Progress, at: float) -> None:
    progress.begun_at, progress.step_at = min(progress.begun_at, at), min(progress.step_at, at)
    for member in progress.members.values():
        member.started_at, member.answered_at = min(member.started_at, at), min(member.answered_at, at)


def _apply_evidence(progress: Progress, entry: Evidence) -> None:
    gate = progress.settings.evidence.get(entry.gate)
    if gate is not None:
        finding = judge_evidence(gate, entry)
        if finding.outweighs(progress.outside.get(entry.gate)):
            progress.outside[entry.gate] = finding


def _withdraw(progress: Progress, entry: WithdrawalEntry) -> None:
    for device in entry.devices:
        member = progress.members[device]
        member.attempts -= 1
        member.state = "failed" if member.attempts else "pending"
        progress.started -= member.state == "pending"


def _apply_answer(progress: Progress, entry: AnswerEntry, at: float) -> None:
    member = progress.members.get(entry.device)
    if member is None or member.state in ("pending", "returned"):
        return
    if member.returns:
        if entry.outcome is not None and member.state == "returning":
            member.state = "returned" if entry.outcome == "succeeded" else entry.outcome
            member.code, member.answered_at = entry.code, at
        return
    sample = member.sample or Sample(device_class=member.device_class)
    is_failed, fault, measures = sample.is_failed, sample.fault, dict(sample.measures)
    if entry.outcome is not None and member.state == "started":
        member.state, member.code, member.answered_at = entry.outcome, entry.code, at
        # The first attempt is the sample: a release that needs three attempts everywhere is no good release.
        if is_failed is None and entry.outcome in ("succeeded", "failed") and not member.is_untried:
            is_failed = entry.outcome == "failed"
    if entry.fault:
        fault, is_failed = entry.fault, is_failed or False
    for reading in entry.readings:
        for stage in range(reading.stage + 1):  # the first reading of a stage counts
            measures.setdefault((reading.model, stage), reading.measures)
    member.sample = Sample(
        device_class=member.device_class, is_failed=is_failed, fault=fault, measures=measures
    )


def _apply_decision(progress: Progress, entry: Decision, at: float) -> None:
    progress.last, progress.wave = entry, entry.wave
    if entry.action in ("start", "retry"):
        progress.step_at = at
        for device in entry.devices:
            member = progress.members[device]
            progress.started += member.state == "pending"
            member.state, member.started_at, member.attempts = "started", at, member.attempts + 1
    elif entry.action == "pause":
        progress.state, progress.pause = "paused", entry
    elif entry.action == "succeed":
        progress.state = "succeeded"
    elif entry.action in ("abort", "return"):
        if entry.action == "abort":
            progress.state, progress.stop = "aborted", entry
        for device in entry.devices:
            member = progress.members[device]
            member.state, member.started_at, member.returns = "returning", at, member.returns + 1


def _apply_order(progress: Progress, entry: OrderEntry, at: float) -> None:
    if entry.order == "abort":
        progress.wants_abort = entry.who or "somebody"
    elif progress.state == "running" and entry.order == "pause":
        progress.state = "paused"
    elif progress.state == "paused" and entry.order == "resume":
        progress.state, progress.step_at = "running", at
        if progress.pause is not None and progress.pause.is_doubt:
            progress.resumed_with = progress.started
        progress.pause = None
    elif entry.order == "approve":
        progress.approved = progress.wave + 1
        progress.step_at = at
