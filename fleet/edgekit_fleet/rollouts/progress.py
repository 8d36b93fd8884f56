"""The progress of a rollout, which is computed from its log entries.

Each entry is written to the audit log before it is applied here. The same entries always give the same
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
        classes: The device classes for which the release has a package of the model.
        order, priority: See `DesiredModel`.
    """

    classes: tuple[str, ...]
    order: LoadOrder = "new-first"
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The settings of a rollout, which do not change after its start.

    Attributes:
        waves: How many devices have the release at the end of each wave. The last wave includes all devices.
        minimum: The number of devices in the first step. A later step starts at most as many devices as were
            judged before.
        limits: The limits of the gates, see `gate_table.make_limits`.
        soak_s: The time after which a device with the release is judged. It is judged earlier if each of its
            models has answered enough calls.
        patience_s: The time after which a device that does not answer counts as offline. The rollout
            continues, and the device gets the release when it is online again.
        step_timeout_s: The time limit for a step. After this time, the rollout pauses until a person decides.
        retries: The maximum number of further attempts on a device that fails with one of `TRANSIENT_CODES`.
        spread_s: The maximum random delay before a device begins. It spreads the downloads of a step over
            time.
        approval: Which waves need an approval before they begin: `none`, the `first` or `each`.
        is_dynamic: Whether devices that match the selector only after the start are added to the cohort.
        window: The local time of day in which devices switch, or None.
        trial: See `DesiredModel`.
        models: The models of the release by name.
        evidence: The outside gates by name, see `OutsideGate`.
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
        devices: The devices of the cohort in rollout order.
        classes: The class of each device, in the same order.
    """

    settings: RolloutSettings
    devices: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEntry:
    """Devices joined at the end of the cohort. The fields are the same as in `StartEntry`."""

    devices: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The evidence from the figures of one model on a device.

    Attributes:
        stage: The stage that the number of calls has reached, see `gates.find_stage`. The reading also counts
            for earlier stages that have no reading.
        measures: See `gates.measure`.
    """

    model: str
    stage: int
    measures: Mapping[str, Annotated[float, _FIGURE]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEntry:
    """A device answered.

    Attributes:
        outcome: The outcome of its execution, or None if the entry only adds a fault or readings.
        code: The code of the execution, such as `self-test`.
        fault: The fault of the new version, if there is one.
    """

    device: str
    outcome: Outcome | None = None
    code: str = ""
    fault: Fault = ""
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEntry:
    """The user `who` ordered to approve, pause, resume or abort the rollout."""

    order: Order
    who: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next action of a rollout and its reason.

    Attributes:
        action: `start` and `retry` offer the release to `devices`. `abort` tells `devices` to go back to
            their previous version. `return` repeats this for `devices` that failed to go back. `ask` waits
            for an approval.
        wave: The index of the open wave, from 0.
        sentence: The reason.
        figures: The figures behind the decision.
        is_doubt: Whether the rollout pauses because the evidence suggests that the release is bad.
    """

    action: Action
    wave: int
    sentence: str
    devices: tuple[str, ...] = ()
    figures: Mapping[str, Annotated[float, _FIGURE]] = field(default_factory=dict)
    is_doubt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawalEntry:
    """The last decision was cancelled for `devices`, which were not started or retried."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSetBack:
    """The manager's clock was `ahead_s` seconds fast and has been corrected.

    When this entry is applied to a `Progress`, each time in the `Progress` that is later than the time of the
    entry is replaced by the time of the entry.
    """

    ahead_s: Annotated[float, Range(0.0, 1e12)]


Entry: TypeAlias = (
    StartEntry | JoinEntry | AnswerEntry | OrderEntry | Evidence | Decision | WithdrawalEntry | ClockSetBack
)

TRANSIENT_CODES: Final = frozenset(("timeout", "load", "internal"))
"""Codes of transient failures: a time limit, a service that does not serve the version, or a killed step.

After a broken download, the device itself tries again until the time of its execution is over.
"""

UNTRIED_CODES: Final = frozenset(
    ("disk-full", "memory", "budget", "battery", "pinned", "older", "window", "clock")
)
"""The reasons why a device has not tried the release. They say nothing about the release."""

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
    """Return an entry as plain values for the audit log."""
    name = next(name for name, kind in _KINDS.items() if isinstance(entry, kind))
    return {"kind": name, **to_plain(entry)}


def entry_from_plain(plain: Mapping[str, Any]) -> Entry:
    """Return the entry from the plain values of `entry_to_plain`.

    Raises:
        FleetError: The values are malformed.
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
        sample: The sample for the gates, or None before the first answer.
        state: The state is `pending` until the release is offered, `started` until the device answers, and
            then the outcome, such as `succeeded`. A device that is told to go back is `returning` until it
            answers. Then the state is `returned`, or the outcome if the device failed to go back.
        started_at, answered_at: The times of the last attempt and of its outcome, in seconds since 1970.
        attempts: The number of times that the device was offered the release.
        returns: The number of times that the device was told to go back.
        code: The code of the last outcome.
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
        """Whether the device ended with one of `UNTRIED_CODES`, without trying the release."""
        return self.state in ("failed", "refused") and self.code in UNTRIED_CODES


@dataclass(slots=True, kw_only=True)
class Progress:
    """The progress of a rollout.

    Attributes:
        begun_at, newest_at: The times of the first and the newest entry, in seconds since 1970.
        members: The devices of the cohort by name, in rollout order.
        wave: The index of the open wave, from 0.
        started: The number of members that were offered the release.
        step_at: When devices were last started, or when a person last resumed or approved the rollout. The
            step times out `step_timeout_s` later.
        approved: The number of approved waves, counted from the first wave.
        pause: The decision that paused the rollout, or None if a person paused it or it is not paused.
        resumed_with: The value of `started` when a person last resumed the rollout after a decision with
            `is_doubt`, or 0.
        wants_abort: The user who ordered to abort, or None.
        last: The last decision, or None.
        stop: The decision to abort, or None.
        outside: The finding about each outside gate, by the name of the gate. See `OutsideFinding.outweighs`
            for which finding is kept.
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
        """The number of devices that have the release at the end of the open wave."""
        waves = self.settings.waves
        return len(self.members) if self.wave >= len(waves) - 1 else min(waves[self.wave], len(self.members))

    def samples(self, now: float) -> list[Sample]:
        """Return the samples of devices that have answered, followed by the samples from `unanswered`.

        `now` is in seconds since 1970.
        """
        answered = [member.sample for member in self.members.values() if member.sample is not None]
        return answered + self.unanswered(now)

    def unanswered(self, now: float) -> list[Sample]:
        """Return a sample for each device that was started and has not answered yet.

        In these samples, `is_failed` is False. Devices that were started `patience_s` ago or earlier are left
        out. `now` is in seconds since 1970.
        """
        return [
            Sample(device_class=member.device_class, is_failed=False)
            for member in self.members.values()
            if member.state == "started"
            and member.sample is None
            and now - member.started_at < self.settings.patience_s
        ]

    def list_awaited(self, now: float) -> list[str]:
        """Return the names of outside gates that the rollout waits for at `now`, in seconds since 1970."""
        return [
            name
            for name, gate in sorted(self.settings.evidence.items())
            if (name not in self.outside or self.outside[name].outcome == "unclear")
            and (gate.deadline_s is None or now - self.begun_at < gate.deadline_s)
        ]


def begin(entry: StartEntry, at: float) -> Progress:
    """Return the progress at the start of a rollout. `at` is the time in seconds since 1970."""
    progress = Progress(settings=entry.settings, begun_at=at, newest_at=at, step_at=at)
    _join(progress, entry)
    return progress


def apply(progress: Progress, entry: Entry, at: float) -> None:
    """Apply an entry to the progress.

    Answers of devices outside the cohort and evidence for undeclared gates change nothing.

    Args:
        progress: The progress to change.
        entry: The next entry.
        at: The time of the entry, in seconds since 1970.
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
