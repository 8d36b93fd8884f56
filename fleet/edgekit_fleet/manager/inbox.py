"""Receives the documents of devices: verifies and orders them, and writes them to the store in batches.

A document is accepted only if the device in its topic has signed it, and if its number is higher than that of
the last document of its kind. So a broker cannot forge, replay or reorder messages. Refused messages are
counted, and written to the audit log once a minute for each device. A device that has lost its journal starts
again with low numbers. The manager tells it the highest number that it has used (`Desired.sequence`).

A device with valid keys may still be malicious or faulty. So each device has limits on its messages a
second, its audit log entries a day, and the number of versions for which it reports figures.
"""

import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import ColumnElement, select, true
from sqlalchemy.orm import Session

from edgekit_fleet.manager.device_logs import keep_logs
from edgekit_fleet.store import audit
from edgekit_fleet.store.attributes import list_stable, replace_attributes
from edgekit_fleet.store.audit import COPY_ALARM
from edgekit_fleet.store.database import update_many, upsert_many
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.shards import LEASE_S, Shards
from edgekit_fleet.store.tables import (
    SHARDS,
    DesiredRow,
    DeviceRow,
    ExecutionRow,
    FigureRow,
    shard_of,
)
from edgekit_runtime.agent.documents import ENDED, Event, Execution, Hello, Logs, ModelFigures, Reported
from edgekit_runtime.agent.signing import key_id, unseal
from edgekit_runtime.agent.trusted_time import format_utc
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import SignatureError
from edgekit_runtime.system.shown_text import clean_line

_HOUR_S: Final = 3600.0
_ALARM_S: Final = 60.0
REPORT_S: Final = 15.0
_LATE_S: Final = 60.0
_MAX_STRANGERS: Final = 1000
_DAY_S: Final = 86_400.0
_MESSAGES_A_SECOND: Final = 2.0  # an agent sends one in 10 s, and four a second while a step begins or ends
BURST: Final = 100  # messages
_EVENTS_A_MINUTE: Final = 10
_ENTRIES_A_DAY: Final = 300  # of a device in the audit log, from which nothing can be deleted
_VERSIONS_A_DAY: Final = 128  # five times the models that one document holds
_MAX_NAME: Final = 128  # characters. See `tables.NAME`
_INSTANCES: Final = 4
_FOREIGN_S: Final = 4 * LEASE_S
_MAX_FOREIGN_BYTES: Final = 32 << 20
MAX_PENDING: Final = 100_000  # messages. The broker's own queue is behind it
_MAX_PENDING_BYTES: Final = 128 << 20
_MOST_HELD: Final = 1 << 52
_IS_MEMBER: Final = DeviceRow.revoked_at.is_(None)
_IS_OPEN: Final = ExecutionRow.ended_at.is_(None)
_log = logging.getLogger(__name__)

Refusal: TypeAlias = Literal["topic", "unknown", "revoked", "forged", "impersonated", "replayed", "flood"]
Document: TypeAlias = Hello | Reported | Event | Logs
Excess: TypeAlias = Literal["alarm.events", "alarm.flood", "alarm.figures"]
_EXCESSES: Final[Mapping[Excess, str]] = {
    "alarm.events": f"more than {_EVENTS_A_MINUTE} events a minute, or {_ENTRIES_A_DAY} a day",
    "alarm.flood": f"more than {_MESSAGES_A_SECOND:.0f} messages a second; is its key stolen?",
    "alarm.figures": f"figures of more than {_VERSIONS_A_DAY} versions a day",
}
_KINDS: Final[dict[str, type[Document]]] = {
    "hello": Hello,
    "reported": Reported,
    "event": Event,
    "logs": Logs,
}


@dataclass(slots=True, kw_only=True)
class KnownDevice:
    """A device in the manager's memory. The fields are described in `DeviceRow` and `Hello`."""

    name: str
    keys: dict[str, Ed25519PublicKey]
    is_revoked: bool
    sequence: int
    hello_sequence: int
    event_sequence: int
    is_online: bool
    desired_held: int
    desired_sent: int
    last_seen_at: float
    reported: int = 0
    will_sha256: str = ""
    sent_at: float = 0.0
    asked_at: float = 0.0
    alarmed_at: dict[str, float] = field(default_factory=dict)  # time of the last alarm by action
    envelope_hashes: dict[str, int] = field(default_factory=dict)  # hash of the last envelope by kind
    events: list[float] = field(default_factory=list)
    is_late: bool = False  # a document had a lower number than one before, or was dropped
    attributes_hash: int = 0
    paid_until: float = 0.0  # monotonic time up to which the messages have used the allowed rate
    day: int = 0
    entries: int = 0  # number of entries in the audit log on this day
    instances: dict[str, tuple[int, str]] = field(default_factory=dict)
    notice: str = ""  # see `Desired`
    notice_ends_at: float = 0.0
    versions: frozenset[int] = frozenset()  # hashes of (model, version) whose figures were kept on this day

    @property
    def highest_sequence(self) -> int:
        """The highest sequence number of the accepted documents of this device."""
        return max(self.sequence, self.hello_sequence, self.event_sequence)

    def lacks_report(self, now: float) -> bool:
        """Return True if the manager should send a new document, which makes the device report.

        This is the case if a connected device has announced a report that was not received within 15 s. It is
        also the case, at most once a minute, if a message was dropped or came in the wrong order (`is_late`).
        `now` is in seconds since 1970.
        """
        is_behind = self.is_online and self.sequence < self.reported
        is_missing = is_behind and now - max(self.last_seen_at, self.asked_at) >= REPORT_S
        is_lost = self.is_late and now - self.asked_at >= _LATE_S
        return (is_missing or is_lost) and not self.is_revoked

    def is_too_fast(self, clock: float) -> bool:
        """Return True if another message exceeds the rate or burst limit of the device. Otherwise, count it.

        `clock` is the monotonic clock in seconds.

        Source: ITU-T I.371, generic cell rate algorithm.
        """
        begin = max(self.paid_until, clock)
        if begin - clock > BURST / _MESSAGES_A_SECOND:
            return True
        self.paid_until = begin + 1 / _MESSAGES_A_SECOND
        return False

    def find_copy(self, hello: Hello) -> str:
        """Record a hello, and return the address of another machine that uses the same identity.

        Return an empty text if there is no such machine. A restarted agent has a new `instance`, and its old
        instance sends no more hellos. So if two instances send hellos in turn, with rising numbers, both are
        running. Late and repeated hellos are ignored.
        """
        before, _ = self.instances.get(hello.instance, (-1, ""))
        if hello.sequence < self.hello_sequence or hello.sequence <= before:
            return ""
        last = next(reversed(self.instances), "")
        is_back = self.instances.pop(hello.instance, None) is not None and last != hello.instance
        self.instances[hello.instance] = hello.sequence, clean_line(hello.address, _MAX_NAME)
        if len(self.instances) > _INSTANCES:
            del self.instances[next(iter(self.instances))]
        return self.instances[last][1] if is_back else ""

    @property
    def address(self) -> str:
        """The address in the last hello, or empty before the first one."""
        return next((address for _, address in reversed(self.instances.values())), "")

    def begin_day(self, now: float) -> None:
        """Reset the daily counts if a new day has begun at `now`, in seconds since 1970."""
        day = int(now // _DAY_S)
        if day != self.day:
            self.day, self.entries, self.versions = day, 0, frozenset()

    def keeps_figures(self, figures: ModelFigures) -> bool:
        """Return True if these figures may be stored, and count their version.

        A device can report figures for a limited number of versions a day.
        """
        version = hash((figures.model, figures.version))
        if version not in self.versions:
            if len(self.versions) >= _VERSIONS_A_DAY:
                return False
            self.versions |= {version}
        return True


_WRITTEN: Final = (
    "sequence",
    "hello_sequence",
    "event_sequence",
    "is_online",
    "desired_held",
    "last_seen_at",
)


class DeviceIndex:
    """The enrolled devices of this manager's shards, in memory. No message needs a database query."""

    def __init__(self, shards: Shards) -> None:
        self.devices: dict[str, KnownDevice] = {}
        self._shards = shards

    def load(self, session: Session, names: Iterable[str]) -> None:
        """Read these devices from the store again. Devices of other managers are skipped."""
        own = [name for name in names if self._shards.holds(name)]
        if own:
            self._read(session, DeviceRow.name.in_(own))

    def load_shards(self, session: Session, shards: Collection[int]) -> None:
        """Add all devices of these shards from the store."""
        if shards:
            is_all = len(shards) == SHARDS
            self._read(session, true() if is_all else DeviceRow.shard.in_(sorted(shards)))

    def drop_shards(self, shards: Collection[int]) -> None:
        if shards:
            remaining = {name: entry for name, entry in self.devices.items() if shard_of(name) not in shards}
            self.devices = remaining

    def _read(self, session: Session, condition: ColumnElement[bool]) -> None:
        statement = select(
            DeviceRow.name,
            DeviceRow.public_key,
            DeviceRow.revoked_at,
            DesiredRow.version,
            *(getattr(DeviceRow, name) for name in _WRITTEN),
        ).outerjoin(DesiredRow, DesiredRow.device == DeviceRow.name)
        for row in session.execute(statement.where(condition)):
            key = Ed25519PublicKey.from_public_bytes(row.public_key)
            entry = self.devices.get(row.name)
            if entry is not None and key_id(key) in entry.keys:  # other fields may be newer than the store
                entry.is_revoked = row.revoked_at is not None
                continue
            state = {name: getattr(row, name) for name in _WRITTEN}
            state["last_seen_at"] = state["last_seen_at"] or 0.0
            self.devices[row.name] = KnownDevice(
                name=row.name,
                keys={key_id(key): key},
                is_revoked=row.revoked_at is not None,
                desired_sent=row.version or 0,
                **state,
            )


class Inbox:
    """Receives messages, and writes their content to the store.

    Attributes:
        refused: A counter of refused messages by reason.
        accepted: The number of accepted messages.
        skipped: The number of messages since the last `take` that were dropped or are for other managers.
    """

    def __init__(self, index: DeviceIndex, shards: Shards) -> None:
        self.refused: Counter[Refusal] = Counter()
        self.accepted = 0
        self._index = index
        self._shards = shards
        self._foreign: deque[tuple[float, str, bytes]] = deque()
        self._foreign_bytes = 0
        self._pending: list[tuple[str, bytes]] = []
        self._pending_bytes = 0
        self._changed: set[str] = set()
        self._noticed: set[str] = set()  # devices whose next document bears a new notice
        self._reports: dict[str, Reported] = {}
        self._figures: dict[str, Sequence[ModelFigures]] = {}
        self._logs: dict[str, Logs] = {}
        self._entries: list[audit.AuditEntry] = []
        self._attribute_hashes: dict[str, int] = {}
        self._excesses: Counter[tuple[str, Excess]] = Counter()  # of a device; no alarm has counted them yet
        self.skipped = 0
        self._floods: Counter[str] = Counter()  # of a device, since the last `take_floods`
        self._dropped = 0  # messages that no alarm has counted yet
        self._overloaded_at = float("-inf")
        self._strangers: set[str] = set()  # members of no store, which an alarm has named

    def put(self, topic: str, payload: bytes) -> None:
        """Store a message for `take`, or for `take_over` if it is for another manager.

        Messages of a device that exceeds its rate limit are dropped. The manager later requests the newest
        report of this device. If the queue is full, messages of all devices are dropped.
        """
        device = self._index.devices.get(_device_of(topic))
        if device is not None and device.is_too_fast(time.monotonic()):
            self.refused["flood"] += 1
            self.skipped += 1
            self._floods[device.name] += 1
            self._excesses[device.name, "alarm.flood"] += 1
            device.is_late = True
            return
        if not self._shards.is_complete and not self._shards.holds(_device_of(topic)):
            self._put_foreign(topic, payload)
        elif len(self._pending) < MAX_PENDING and self._pending_bytes < _MAX_PENDING_BYTES:
            self._pending.append((topic, payload))
            self._pending_bytes += len(payload)
        else:
            self.refused["flood"] += 1
            self._dropped += 1

    def _put_foreign(self, topic: str, payload: bytes) -> None:
        self.skipped += 1
        now, foreign = time.monotonic(), self._foreign
        foreign.append((now, topic, payload))
        self._foreign_bytes += len(payload)
        while self._foreign_bytes > _MAX_FOREIGN_BYTES or now - foreign[0][0] > _FOREIGN_S:
            self._foreign_bytes -= len(foreign.popleft()[2])

    def take_over(self) -> None:
        """Call `put` again for the messages that were stored for other managers.

        Call this when this manager has taken over devices of another manager.
        """
        foreign, self._foreign, self._foreign_bytes = self._foreign, deque(), 0
        for _, topic, payload in foreign:
            self.put(topic, payload)

    def list_unknown(self, limit: int) -> set[str]:
        """Return the unknown or revoked devices that have sent pending messages.

        These devices may have enrolled since the index was loaded. `limit` is the maximum number of pending
        messages to check, starting with the oldest.
        """
        names = {_device_of(topic) for topic, _ in self._pending[:limit]}
        return {
            name for name in names if (entry := self._index.devices.get(name)) is None or entry.is_revoked
        }

    def take(self, now: float, limit: int = 1000) -> list[Hello]:
        """Verify pending messages for `write`, and return the hellos among them.

        Args:
            now: The time in seconds since 1970.
            limit: The maximum number of messages, so that the loop stays responsive.
        """
        self.skipped = 0
        batch, self._pending = self._pending[:limit], self._pending[limit:]
        self._pending_bytes -= sum(len(payload) for _, payload in batch)
        hellos: list[Hello] = []
        for topic, payload in batch:
            refusal = self._take(topic, payload, now, hellos.append)
            if refusal is None:
                self.accepted += 1
            else:
                self.refused[refusal] += 1
                if refusal == "unknown":
                    self._alarm_stranger(_device_of(topic))
        self._alarm_excesses(now)
        self._alarm_overload(now)
        return hellos

    def count_pending(self) -> int:
        """Return the number of messages that wait for `take`."""
        return len(self._pending)

    def take_floods(self) -> Counter[str]:
        """Return and reset the number of dropped messages of each device since the last call."""
        floods, self._floods = self._floods, Counter()
        return floods

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to `write`."""
        return not (self._changed or self._reports or self._entries or self._logs)

    def write(self, session: Session, now: float) -> bool:
        """Write the messages from `take` to the store. Return True if a device has ended an execution.

        Call `forget` after the commit. After an error, call this again in a new transaction. `now` is in
        seconds since 1970.
        """
        rows = [self._state(name) for name in sorted(self._changed - self._reports.keys())]
        update_many(session, DeviceRow, rows, keys=("name",), condition=_IS_MEMBER)
        has_ended = False
        if self._reports:
            rows = [
                {
                    **self._state(name),
                    **_find_status(report),
                    "facts": dict(report.facts),
                    "reported": to_plain(report),
                    "pinned": {model.model: model.pinned for model in report.models if model.pinned},
                }
                for name, report in sorted(self._reports.items())
            ]
            update_many(session, DeviceRow, rows, keys=("name",), condition=_IS_MEMBER)
            self._write_attributes(session)
            executions = [
                (report.device, execution)
                for report in self._reports.values()
                for execution in report.executions
            ]
            has_ended = _update_executions(session, executions, now)
            _upsert_figures(session, self._figures, now)
        for logs in self._logs.values():
            keep_logs(session, logs, now)
        mark_due(session, sorted(self._noticed), content_sha256="")
        audit.append(session, "devices", self._entries, now)
        return has_ended

    def _state(self, name: str) -> dict[str, Any]:
        entry = self._index.devices[name]
        return {"name": name, **{field_name: getattr(entry, field_name) for field_name in _WRITTEN}}

    def _write_attributes(self, session: Session) -> None:
        """Write the search attributes of devices whose last report changed them."""
        changed = {}
        for name, report in self._reports.items():
            stable = list_stable(report.facts, {model.model: model.version for model in report.models})
            digest = hash(frozenset(stable.items()))
            if digest != self._index.devices[name].attributes_hash:
                changed[name] = stable
                self._attribute_hashes[name] = digest
        replace_attributes(session, changed)

    def forget(self) -> None:
        """Forget the written messages. Call this only after the transaction of `write` was committed."""
        for name, digest in self._attribute_hashes.items():
            self._index.devices[name].attributes_hash = digest
        self._attribute_hashes.clear()
        self._changed.clear()
        self._noticed.clear()
        self._reports.clear()
        self._figures.clear()
        self._logs.clear()
        self._entries.clear()

    def _take(
        self, topic: str, payload: bytes, now: float, on_hello: Callable[[Hello], None]
    ) -> Refusal | None:
        parts = topic.split("/")
        if len(parts) != 5 or parts[:3] != ["ek", "v1", "d"] or parts[4] not in _KINDS:
            return "topic"
        name, kind = parts[3], parts[4]
        device = self._index.devices.get(name)
        if device is None:
            return "unknown"
        if device.is_revoked:
            return "revoked"
        # The verified hello of this connection has announced exactly these bytes as its last will.
        if kind == "hello" and hashlib.sha256(payload).hexdigest() == device.will_sha256:
            device.is_online, device.will_sha256, device.last_seen_at = False, "", now
            self._changed.add(name)
            return None
        if device.envelope_hashes.get(kind) == hash(payload):  # a retained one, again after a reconnect
            return "replayed"
        try:
            document = unseal(payload, kind, _KINDS[kind], device.keys, topic)  # type: ignore[arg-type]
        except SignatureError as error:
            self._alarm(device, "alarm.forged", str(error), now)
            return "forged"
        if document.device != name:
            self._alarm(device, "alarm.impersonated", f"{topic}: names '{document.device[:80]}'", now)
            return "impersonated"
        if isinstance(document, Hello) and document.instance and (other := device.find_copy(document)):
            text = (
                f"two machines use the identity of {name}, at {other} and at {device.address}:"
                " stop one of them, delete `fleet/device.key` there, and enrol it under a name of its own"
            )
            if self._alarm(device, COPY_ALARM, text, now):
                device.notice, device.notice_ends_at = f"at {format_utc(now)}, {text}", now + _DAY_S
                self._noticed.add(name)
        if not self._apply(device, document, now):
            last = {
                "hello": device.hello_sequence,
                "reported": device.sequence,
                "event": device.event_sequence,
            }
            device.is_late = device.is_late or document.sequence < last[kind]
            return "replayed"
        device.envelope_hashes[kind] = hash(payload)
        device.last_seen_at = now
        self._changed.add(name)
        if isinstance(document, Hello) and document.online:
            on_hello(document)
        return None

    def _apply(self, device: KnownDevice, document: Document, now: float) -> bool:
        """Apply a verified document. Return whether it was newer than the last document of its kind."""
        if isinstance(document, Hello):
            is_end = not document.online and device.is_online
            if document.sequence < device.hello_sequence + (not is_end):
                return False
            device.hello_sequence, device.is_online = document.sequence, document.online
            device.will_sha256 = document.will_sha256
            if document.online:
                device.desired_held = _read_held(document, device.desired_sent)
                device.reported = document.reported
        elif isinstance(document, Reported):
            if document.sequence <= device.sequence:
                return False
            device.sequence = document.sequence
            device.desired_held = _read_held(document, device.desired_sent)
            self._reports[device.name] = document
            self._figures[device.name] = self._choose_figures(device, document, now)
        elif isinstance(document, Logs):  # its request is answered once, so an old one changes nothing
            self._logs[device.name] = document
        else:
            if document.sequence <= device.event_sequence:
                return False
            device.event_sequence = document.sequence
            device.begin_day(now)
            device.events = [at for at in device.events if now - at < _ALARM_S]
            if len(device.events) < _EVENTS_A_MINUTE and device.entries < _ENTRIES_A_DAY:
                device.events.append(now)
                detail = {"kind": document.kind[:64], "text": document.text[:500], "at": document.at}
                self._write_entry(device, "device.event", detail)
            else:
                self.refused["flood"] += 1
                self._excesses[device.name, "alarm.events"] += 1
        return True

    def _choose_figures(self, device: KnownDevice, report: Reported, now: float) -> list[ModelFigures]:
        """Return the figures to store: those of the device's models, for a limited number of versions."""
        device.begin_day(now)
        models = {model.model for model in report.models}
        chosen = []
        for figures in report.figures:
            if figures.model in models and max(len(figures.model), len(figures.version)) <= _MAX_NAME:
                if device.keeps_figures(figures):
                    chosen.append(figures)
                else:
                    self._excesses[device.name, "alarm.figures"] += 1
        return chosen

    def _alarm_excesses(self, now: float) -> None:
        """Write the numbers of dropped messages to the audit log, as often as `_alarm` allows."""
        for (name, action), count in list(self._excesses.items()):
            device = self._index.devices.get(name)
            text = f"{count} dropped: it sent {_EXCESSES[action]}"
            if device is None or self._alarm(device, action, text, now, dropped=count):
                del self._excesses[name, action]

    def _alarm_overload(self, now: float) -> None:
        """Count messages for which there was no memory, once a minute."""
        if not self._dropped or now - self._overloaded_at < _ALARM_S:
            return
        text = (
            f"{self._dropped} messages of devices were dropped, since too many waited: events in them are"
            " lost, states follow with later reports"
        )
        _log.warning("%s", text)
        detail = {"text": text, "dropped": self._dropped}
        self._entries.append(audit.AuditEntry(action="alarm.overload", subject="manager", detail=detail))
        self._dropped, self._overloaded_at = 0, now

    def _alarm_stranger(self, name: str) -> None:
        """Name a device that the broker let in and the store does not know, once in a run of the manager."""
        if name in self._strangers or len(self._strangers) >= _MAX_STRANGERS:
            return
        self._strangers.add(name)
        text = (
            f"{name} has a certificate of this fleet and is not in the store, as after a backup older than"
            f" its enrolment was restored: enrol it again by `edgekit fleet enroll --name {name}`, and"
            " `edgekit-device enroll --code CODE` there"
        )
        _log.warning("%s", text)
        detail = {"text": text}
        self._entries.append(audit.AuditEntry(action="alarm.unknown", subject="manager", detail=detail))

    def _alarm(self, device: KnownDevice, action: str, text: str, now: float, **counts: int) -> bool:
        """Write an alarm, at most once a minute for a device and action. Return whether it was written.

        The limit is once an hour for a flood, and for a device with many entries today.
        """
        device.begin_day(now)
        is_rare = action == "alarm.flood" or device.entries >= _ENTRIES_A_DAY
        if now - device.alarmed_at.get(action, float("-inf")) < (_HOUR_S if is_rare else _ALARM_S):
            return False
        device.alarmed_at[action] = now
        _log.warning("%s: %s", device.name, text)
        self._write_entry(device, action, {"text": text[:500], **counts})
        return True

    def _write_entry(self, device: KnownDevice, action: str, detail: Mapping[str, Any]) -> None:
        device.entries += 1
        self._entries.append(audit.AuditEntry(action=action, subject=device.name, detail=detail))


def _device_of(topic: str) -> str:
    """Return the name of the device in a topic, or an empty text."""
    parts = topic.split("/", 5)
    return parts[3] if len(parts) == 5 else ""


def _read_held(document: Hello | Reported, sent: int) -> int:
    """Return the number of the document that a device has, or 0 if the number is implausible.

    With a stolen key of the manager, an attacker could send documents with the highest numbers, so that no
    higher number is available. Such a number is ignored, unless this manager has sent it, because a device
    accepts any number after a rotation of the key.

    Args:
        document: A document from the device.
        sent: The number of the newest document that this manager sent to the device.
    """
    desired_version = document.desired_version
    return desired_version if desired_version < _MOST_HELD or desired_version <= sent else 0


def _find_status(report: Reported) -> dict[str, str]:
    """Return status and reason as lists show them: `faulty` if the desired version runs and fails."""
    faulty = next((model for model in report.models if model.health == "faulty"), None)
    if report.status == "converged" and faulty is not None:
        return {"status": "faulty", "because": faulty.because or f"{faulty.model} is faulty"}
    return {"status": report.status, "because": report.because}


def _update_executions(session: Session, executions: list[tuple[str, Execution]], now: float) -> bool:
    """Update the running executions of these devices. Return whether any of them has ended.

    An execution of another device has no row, so a device cannot report for another one.
    """
    rows = [
        {
            "execution": execution.execution,
            "device": device,
            "state": execution.state,
            "reason": execution.reason,
            "code": execution.code[:64],
            "done_bytes": execution.done_bytes,
            "sent_bytes": execution.sent_bytes,
            "changed_at": now,
            "ended_at": now if execution.state in ENDED else None,
        }
        for device, execution in executions
    ]
    update_many(session, ExecutionRow, rows, keys=("execution", "device"), condition=_IS_OPEN)
    return any(execution.state in ENDED for _, execution in executions)


def _upsert_figures(session: Session, figures: Mapping[str, Sequence[ModelFigures]], now: float) -> None:
    """Keep the last figures of each device, model and version in this hour."""
    rows = {
        (device, execution.model, execution.version): {
            "device": device,
            "model": execution.model,
            "version": execution.version,
            "hour": int(now // _HOUR_S),
            "figures": to_plain(execution),
            "reported_at": now,
        }
        for device, of_device in figures.items()
        for execution in of_device
    }
    upsert_many(session, FigureRow, list(rows.values()))
