"""A limit of failed attempts, so that nobody guesses passwords or codes.

It is in the store, so that all managers count together, and a restart forgets nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from sqlalchemy import delete
from sqlalchemy.orm import Session

from edgekit_fleet.access.digests import digest
from edgekit_fleet.store.tables import FailureRow

PAUSE_S: Final = 60
MAX_FAILURES: Final = 20


def allows(session: Session, limits: Mapping[str, int], now: float) -> bool:
    """Return whether an attempt should be checked.

    Args:
        session: session of the store.
        limits: whom the attempt counts against, such as `login address 10.0.0.1` -> failures a minute.
        now: seconds since 1970.
    """
    rows = ((session.get(FailureRow, digest(key)), limit) for key, limit in limits.items())
    return all(row is None or row.count < limit or now - row.begun_at >= PAUSE_S for row, limit in rows)


def take(session: Session, limits: Mapping[str, int], now: float) -> bool:
    """Count an attempt as failed; returns False, without counting it, if it should not be checked at all."""
    if not allows(session, limits, now):
        return False
    session.execute(delete(FailureRow).where(FailureRow.begun_at <= now - PAUSE_S))
    for key in limits:
        row = session.get(FailureRow, digest(key), populate_existing=True)
        if row is None:
            session.add(FailureRow(key_sha256=digest(key), begun_at=now, count=1))
        else:
            row.count += 1
    return True


def forgive(session: Session, keys: Iterable[str]) -> None:
    """Take the count of an attempt back, since it has succeeded."""
    for key in keys:
        row = session.get(FailureRow, digest(key))
        if row is not None and row.count:
            row.count -= 1
