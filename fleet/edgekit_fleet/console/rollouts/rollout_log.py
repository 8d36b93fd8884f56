"""The log of a rollout as it is shown on pages. Each entry is read only once."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.console.rollouts.background import Background, Lookup
from edgekit_fleet.console.rollouts.evidence import Course, find_courses
from edgekit_fleet.rollouts.gate_table import Fault
from edgekit_fleet.rollouts.outside_gates import Evidence, OutsideFinding, OutsideGate, judge_evidence
from edgekit_fleet.rollouts.progress import (
    AnswerEntry,
    ClockSetBack,
    Decision,
    Entry,
    JoinEntry,
    OrderEntry,
    Progress,
    Reading,
    StartEntry,
    WithdrawalEntry,
    apply,
    begin,
    entry_from_plain,
)
from edgekit_fleet.rollouts.runner import LOG_ACTION
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.errors import FleetError

_MAX_LOGS: Final = 8
_MOMENTS: Final = 40
_DEVICES: Final = 5
_ORDERS: Final = {
    "approve": "approved",
    "pause": "paused",
    "resume": "resumed",
    "abort": "ordered the way back",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """An entry of the timeline.

    Attributes:
        number: The number of the entry in the audit log.
        at: The time of the entry, in seconds since 1970.
        kind: The kind of event, which determines the style of the entry, such as `start` or `abort`.
        sentence: A description of the event and its reason.
    """

    number: int
    at: float
    actor: str
    kind: str
    sentence: str


@dataclass(frozen=True, slots=True)
class LogView:
    """The part of a log that a page shows.

    Attributes:
        courses: The evidence of each gate over time. Gates without answers from devices are omitted.
        moments: The entries of the timeline, newest first.
        earlier: The number of older entries that `moments` does not contain.
        waits_for: The number of the wave that waits for approval, counted from 1, or 0 if none waits.
        faults: A dict from fault to the number of devices and some of their names.
        outside: The name of each gate with an outside judge, the gate, and its finding. The finding is None
            until the judge has sent evidence.
    """

    courses: Sequence[Course]
    moments: Sequence[Moment]
    earlier: int
    waits_for: int
    faults: Mapping[Fault, tuple[int, Sequence[str]]]
    outside: Sequence[tuple[str, OutsideGate, OutsideFinding | None]]


@dataclass(slots=True, kw_only=True)
class RolloutLog:
    """The log of one rollout, as far as it was read.

    Attributes:
        number: The number of the last audit log entry that was read.
        moments: All entries except the answers of devices, oldest first.
        answered: The devices in the order of their first answers.
        faults: A dict from fault to the names of the devices that reported it.
    """

    number: int = 0
    progress: Progress | None = None
    moments: list[Moment] = field(default_factory=list)
    answered: dict[str, None] = field(default_factory=dict)
    faults: dict[Fault, list[str]] = field(default_factory=dict)
    _courses: tuple[int, list[Course]] = (0, [])

    def follow(self, session: Session, rollout: str) -> None:
        """Read the entries since the last call. The first call reads all entries.

        Raises:
            FleetError: The log does not begin with a start.
        """
        rows = session.execute(
            select(AuditRow.number, AuditRow.at, AuditRow.actor, AuditRow.detail)
            .where(AuditRow.subject == rollout, AuditRow.action == LOG_ACTION, AuditRow.number > self.number)
            .order_by(AuditRow.number)
        )
        for number, at, actor, detail in rows:
            for plain in detail["entries"]:
                self._add(number, at, actor, _read(plain))
            self.number = number

    def find_courses(self) -> list[Course]:
        """Return the evidence over time of each gate for which devices have sent answers.

        The list is empty before the first call of `follow`.
        """
        if self.progress is None:
            return []
        if self._courses[0] != self.number:
            members = (self.progress.members[device] for device in self.answered)
            samples = [member.sample for member in members if member.sample is not None]
            samples += self.progress.unanswered(time.time())
            settings = self.progress.settings
            self._courses = self.number, find_courses(samples, settings.limits, sorted(settings.models))
        return self._courses[1]

    def view(self) -> LogView:
        moments = self.moments[-_MOMENTS:][::-1]
        return LogView(
            courses=self.find_courses(),
            moments=moments,
            earlier=len(self.moments) - len(moments),
            waits_for=self._find_approval(),
            faults={fault: (len(devices), devices[:_DEVICES]) for fault, devices in self.faults.items()},
            outside=[
                (name, gate, self.progress.outside.get(name))
                for name, gate in self.progress.settings.evidence.items()
            ]
            if self.progress
            else [],
        )

    def _find_approval(self) -> int:
        progress = self.progress
        if progress is None or progress.last is None or progress.last.action != "ask":
            return 0
        return progress.last.wave + 1 if progress.approved <= progress.last.wave else 0

    def _add(self, number: int, at: float, actor: str, entry: Entry) -> None:
        if self.progress is None:
            if not isinstance(entry, StartEntry):
                raise FleetError("the log of the rollout does not begin with its start; restore the store")
            self.progress = begin(entry, at)
        else:
            apply(self.progress, entry, at)
        if isinstance(entry, AnswerEntry):
            if entry.device in self.progress.members:
                self.answered[entry.device] = None
                if entry.fault:
                    self.faults.setdefault(entry.fault, []).append(entry.device)
            return
        kind, sentence = _describe(entry, self.progress.settings.evidence)
        self.moments.append(Moment(number, at, actor, kind, sentence))


class RolloutLogs:
    """The logs of the rollouts that were shown most recently.

    Reading a log of 10,000 devices takes almost a second.
    """

    def __init__(self, closing: ExitStack) -> None:
        self._logs: OrderedDict[str, RolloutLog] = OrderedDict()
        self._background: Background[LogView] = Background(closing)

    def find(self, store: Store, rollout: str) -> Lookup[LogView]:
        """Return the entries of a rollout's log that were already read (see `Lookup`).

        A background thread reads the newer entries.

        Raises:
            FleetError: The log does not begin with a start.
        """
        return self._background.find(rollout, lambda: self._follow(store, rollout))

    def _follow(self, store: Store, rollout: str) -> LogView:
        log = self._logs.setdefault(rollout, RolloutLog())  # only the background's one thread runs this
        self._logs.move_to_end(rollout)
        if len(self._logs) > _MAX_LOGS:
            self._logs.popitem(last=False)
        with store.snapshot() as session:
            log.follow(session, rollout)
        return log.view()


def _read(plain: dict[str, Any]) -> Entry:
    # Most entries are answers, and `entry_from_plain` checks each field of each once more.
    if plain["kind"] == "answered":
        fields = {name: value for name, value in plain.items() if name not in ("kind", "readings")}
        return AnswerEntry(
            **fields, readings=tuple(Reading(**reading) for reading in plain.get("readings", ()))
        )
    return entry_from_plain(plain)


def _describe(entry: Entry, gates: Mapping[str, OutsideGate]) -> tuple[str, str]:
    if isinstance(entry, Evidence):
        finding = judge_evidence(gates[entry.gate], entry)
        return f"evidence-{finding.outcome}", f"evidence: {finding.sentence}"
    if isinstance(entry, StartEntry):
        waves = ", ".join(f"{end:,}" for end in entry.settings.waves)
        return "begin", f"began: {len(entry.devices):,} devices in waves that end at {waves}"
    if isinstance(entry, Decision):
        return entry.action, entry.sentence
    if isinstance(entry, OrderEntry):
        return (
            "order",
            f"{entry.who or 'somebody'} {_ORDERS[entry.order]}{': ' * bool(entry.note)}{entry.note}",
        )
    if isinstance(entry, JoinEntry):
        return "join", f"{len(entry.devices):,} devices joined"
    if isinstance(entry, WithdrawalEntry):
        return "withdraw", f"{len(entry.devices):,} devices do not get it after all"
    if isinstance(entry, ClockSetBack):
        return (
            "clock",
            f"the manager's clock was set back by {entry.ahead_s:,.0f} s; waiting times begin again",
        )
    raise TypeError(f"{entry!r} is no moment")
