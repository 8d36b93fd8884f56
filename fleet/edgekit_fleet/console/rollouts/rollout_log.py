"""The log of a rollout as pages show it. It is read once, and then only what is new of it."""

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.console.rollouts.evidence import Course, find_courses
from edgekit_fleet.rollouts.gates import Fault
from edgekit_fleet.rollouts.progress import (
    Answered,
    Decision,
    Entry,
    Joined,
    Ordered,
    Progress,
    Started,
    Withdrawn,
    apply,
    begin,
    entry_from_plain,
)
from edgekit_fleet.rollouts.runner import LOG_ACTION
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.errors import FleetError

_KEPT: Final = 8
_ORDERS: Final = {
    "approve": "approved",
    "pause": "paused",
    "resume": "resumed",
    "abort": "ordered the way back",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """A line of the timeline.

    Attributes:
        number: of the entry of the audit log.
        at: in seconds since 1970.
        actor: who did it.
        kind: `start`, `retry`, `ask`, `pause`, `succeed`, `abort`, `order`, `join`, `begin` or `withdraw`.
        sentence: what was done, and why.
    """

    number: int
    at: float
    actor: str
    kind: str
    sentence: str


@dataclass(slots=True)
class RolloutLog:
    """What the log of one rollout says.

    Attributes:
        number: of the last entry of the audit log that was read.
        progress: of the rollout.
        moments: all but the answers of devices, the oldest first.
        answered: devices in the order in which they first answered.
        faults: fault -> devices.
    """

    number: int = 0
    progress: Progress | None = None
    moments: list[Moment] = field(default_factory=list)
    answered: dict[str, None] = field(default_factory=dict)
    faults: dict[Fault, list[str]] = field(default_factory=dict)
    _courses: tuple[int, list[Course]] = (0, [])

    def follow(self, session: Session, rollout: str) -> None:
        """Read what was written since.

        Raises:
            FleetError: the log does not begin with a start.
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
        """Return the course of each gate that has answers."""
        if self.progress is None:
            return []
        if self._courses[0] != self.number:
            members = (self.progress.members[device] for device in self.answered)
            samples = [member.sample for member in members if member.sample is not None]
            self._courses = self.number, find_courses(samples, self.progress.settings.limits)
        return self._courses[1]

    def count_states(self) -> Counter[str]:
        """Return state -> number of devices, the states as `Member` names them."""
        members = self.progress.members.values() if self.progress is not None else ()
        return Counter(member.state for member in members)

    def _add(self, number: int, at: float, actor: str, entry: Entry) -> None:
        if self.progress is None:
            if not isinstance(entry, Started):
                raise FleetError("the log of the rollout does not begin with its start; restore the store")
            self.progress = begin(entry, at)
        else:
            apply(self.progress, entry, at)
        if isinstance(entry, Answered):
            if entry.device in self.progress.members:
                self.answered[entry.device] = None
                if entry.fault:
                    self.faults.setdefault(entry.fault, []).append(entry.device)
            return
        kind, sentence = _describe(entry)
        self.moments.append(Moment(number, at, actor, kind, sentence))


class RolloutLogs:
    """The logs of the rollouts that pages showed last; any thread may ask."""

    def __init__(self) -> None:
        self._logs: OrderedDict[str, tuple[threading.Lock, RolloutLog]] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, session: Session, rollout: str) -> Iterator[RolloutLog]:
        """Yield the log of a rollout with all that the session sees; nobody else changes it in the block."""
        with self._lock:
            lock, log = self._logs.setdefault(rollout, (threading.Lock(), RolloutLog()))
            self._logs.move_to_end(rollout)
            if len(self._logs) > _KEPT:
                self._logs.popitem(last=False)
        with lock:
            log.follow(session, rollout)
            yield log


def _read(plain: dict[str, Any]) -> Entry:
    # Most entries are answers, and `entry_from_plain` checks each field of each once more.
    if plain["kind"] == "answered":
        return Answered(**{name: value for name, value in plain.items() if name != "kind"})
    return entry_from_plain(plain)


def _describe(entry: Entry) -> tuple[str, str]:
    if isinstance(entry, Started):
        waves = ", ".join(f"{end:,}" for end in entry.settings.waves)
        return "begin", f"began: {len(entry.devices):,} devices in waves that end at {waves}"
    if isinstance(entry, Decision):
        return entry.action, entry.sentence
    if isinstance(entry, Ordered):
        return (
            "order",
            f"{entry.who or 'somebody'} {_ORDERS[entry.order]}{': ' * bool(entry.note)}{entry.note}",
        )
    if isinstance(entry, Joined):
        return "join", f"{len(entry.devices):,} devices joined"
    if isinstance(entry, Withdrawn):
        return "withdraw", f"{len(entry.devices):,} devices do not get it after all"
    raise TypeError(f"{entry!r} is no moment")
