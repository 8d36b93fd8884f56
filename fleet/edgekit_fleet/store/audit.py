"""The audit log of all actions, in which each entry contains the digest of the previous entry.

The database refuses to change or delete entries. The owner of the database can remove this protection. The
chain of digests then still reveals changed entries and missing entries, except at the end of the log. Only a
backup elsewhere reveals that the newest entries were removed.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.canonical_json import encode_json

COPY_ALARM: Final = "alarm.copied"  # two machines have one identity
_PENDING: Final = "audit"
FIRST_SHA256: Final = "0" * 64
_LOCK: Final = 7203185  # lock of PostgreSQL: otherwise two writers would use the same number


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An entry before it is written, see `AuditRow`."""

    action: str
    subject: str
    detail: Mapping[str, Any]


def append(
    session: Session,
    actor: str,
    entries: Sequence[AuditEntry],
    now: float | None = None,
    on_written: Callable[[int], None] | None = None,
) -> None:
    """Append entries to the audit log when the transaction of `session` commits.

    Entries are numbered without gaps, so other transactions with entries wait while this one commits.

    Args:
        session: A session from `Store.transaction`.
        actor: The user or program that acts.
        entries: The entries in order.
        now: The time in seconds since 1970, by default the current time.
        on_written: A function that is called with the number of the last entry.
    """
    if entries:
        at = time.time() if now is None else now
        session.info.setdefault(_PENDING, []).append((actor, entries, at, on_written))


def write(session: Session) -> None:
    """Write the appended entries. `Store.transaction` calls this before it commits."""
    pending = session.info.pop(_PENDING, ())
    if not pending:
        return
    if session.get_bind().dialect.name == "postgresql":
        session.flush()  # everything that may wait for others comes first
        session.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    last = session.execute(
        select(AuditRow.number, AuditRow.sha256).order_by(AuditRow.number.desc()).limit(1)
    ).first()
    number, previous = (0, FIRST_SHA256) if last is None else last
    for actor, entries, at, on_written in pending:
        for entry in entries:
            number += 1
            row = AuditRow(
                number=number,
                at=at,
                actor=actor,
                action=entry.action,
                subject=entry.subject,
                detail=dict(entry.detail),
                previous_sha256=previous,
            )
            row.sha256 = previous = _digest(row)
            session.add(row)
        if on_written is not None:
            on_written(number)
    session.flush()


def record(session: Session, actor: str, action: str, subject: str, **detail: Any) -> None:
    """Append an entry with the current time and the fields in `detail`. See `append`."""
    append(session, actor, [AuditEntry(action=action, subject=subject, detail=detail)])


def find_break(session: Session) -> int | None:
    """Return the number of the first entry that is missing, changed or wrongly chained, or None."""
    previous = FIRST_SHA256
    rows = session.scalars(select(AuditRow).order_by(AuditRow.number).execution_options(yield_per=1000))
    with contextlib.closing(rows):
        for number, row in enumerate(rows, 1):
            if (row.number, row.previous_sha256, row.sha256) != (number, previous, _digest(row)):
                return number
            previous = row.sha256
    return None


def _digest(row: AuditRow) -> str:
    content: dict[str, Any] = {
        "number": row.number,
        "at": repr(row.at),
        "actor": row.actor,
        "action": row.action,
        "subject": row.subject,
        "detail": row.detail,
        "previous_sha256": row.previous_sha256,
    }
    return hashlib.sha256(encode_json(content)).hexdigest()
