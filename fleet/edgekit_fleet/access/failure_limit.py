"""Limits the number of failed attempts, so that nobody can guess passwords or codes.

Failures expire one by one. With a limit of 20 failures a minute, one failure expires every 3 s.

The counts are in the store, so all managers share them, and they survive a restart.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from edgekit_fleet.access.digests import digest
from edgekit_fleet.store.tables import FailureRow
from edgekit_runtime.errors import RequestError

_MINUTE_S: Final = 60
MAX_FAILURES: Final = 20
_PAUSE_S: Final = _MINUTE_S // MAX_FAILURES  # until an attempt is checked again


def too_many(attempts: str) -> RequestError:
    """Return an error with status 429. `attempts` is a plural for the error message, such as `logins`."""
    return RequestError(429, f"too many {attempts}; wait {_PAUSE_S} s", retry_after_s=_PAUSE_S)


def allows(session: Session, limits: Mapping[str, int], now: float) -> bool:
    """Return True if none of the limits of an attempt is reached. The attempt is not counted.

    Args:
        session: A session of the store.
        limits: A dict from the counters of the attempt, such as `login address 10.0.0.1`, to their limits per
            minute.
        now: The time in seconds since 1970.
    """
    return _allows(_read(session, limits), limits, now)


def take(session: Session, limits: Mapping[str, int], now: float) -> bool:
    """Count an attempt as failed before it is checked. Return False if one of its limits is reached.

    Call this before a password or code is checked, and call `forgive` after a success. If a limit is reached,
    the attempt is not counted. The arguments are those of `allows`.
    """
    rows = _read(session, limits)
    if not _allows(rows, limits, now):
        return False
    session.execute(delete(FailureRow).where(FailureRow.begun_at <= now - _MINUTE_S))
    for key, limit in limits.items():
        row = rows.get(digest(key))
        if row is None or row.begun_at <= now - _MINUTE_S:  # deleted just now
            session.add(FailureRow(key_sha256=digest(key), begun_at=now, count=1))
        else:
            forgiven = _count_forgiven(row, limit, now)
            row.count += 1 - forgiven
            row.begun_at = now if row.count == 1 else row.begun_at + forgiven * _MINUTE_S / limit
    return True


def _read(session: Session, keys: Iterable[str]) -> dict[str, FailureRow]:
    """Return the rows of the keys that have failures, by digest of the key."""
    statement = select(FailureRow).where(FailureRow.key_sha256.in_([digest(key) for key in keys]))
    return {row.key_sha256: row for row in session.scalars(statement)}


def _allows(rows: Mapping[str, FailureRow], limits: Mapping[str, int], now: float) -> bool:
    counted = ((rows.get(digest(key)), limit) for key, limit in limits.items())
    return all(row is None or row.count - _count_forgiven(row, limit, now) < limit for row, limit in counted)


def _count_forgiven(row: FailureRow, limit: int, now: float) -> int:
    return min(row.count, int((now - row.begun_at) * limit / _MINUTE_S))


def forgive(session: Session, keys: Iterable[str]) -> None:
    """Undo `take` after a successful attempt. `keys` are the counters that were passed to `take`."""
    for row in _read(session, keys).values():
        if row.count:
            row.count -= 1
