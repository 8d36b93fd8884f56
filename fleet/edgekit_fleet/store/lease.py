"""The lease: of several managers on one store, one is in charge.

A holder renews its heartbeat. When that is older than `LEASE_S`, another manager may take the lease, with a
higher epoch; devices refuse documents of a lower one. A holder learns that it was replaced at its next
renewal, and each write of the manager checks the epoch in the same transaction.
"""

from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import LeaseRow
from edgekit_runtime.errors import UnavailableError

LEASE_S: Final = 15.0
_NAME: Final = "manager"


def take(session: Session, holder: str, now: float) -> int:
    """Return the epoch of a lease that `holder` has from now on.

    Args:
        session: of a transaction.
        holder: identifier of the process, unique.
        now: seconds since 1970.

    Raises:
        UnavailableError: another manager is in charge.
    """
    check_free(session, now)
    row = _lock(session)
    if row is None:
        row = LeaseRow(name=_NAME, holder="", epoch=0, heartbeat_at=0.0)
        session.add(row)
    # Above all epochs that a lost store had, where this one was restored from a backup.
    row.holder, row.epoch, row.heartbeat_at = holder, max(row.epoch + 1, int(now)), now
    audit.record(session, "manager", "manager.start", holder, epoch=row.epoch)
    return row.epoch


def check_free(session: Session, now: float) -> None:
    """Check that no other manager is in charge.

    Raises:
        UnavailableError: one is.
    """
    row = _lock(session)
    age_s = LEASE_S if row is None else now - row.heartbeat_at
    if row is not None and row.holder and 0 <= age_s < LEASE_S:
        raise UnavailableError(
            f"another manager ({row.holder}) is in charge of this fleet, and was active {age_s:.0f} s ago;"
            f" stop it, or wait {LEASE_S:.0f} s after its end",
            LEASE_S - age_s,
        )


def renew(session: Session, epoch: int, now: float) -> None:
    """Renew the heartbeat of the lease with this epoch.

    Raises:
        UnavailableError: another manager has taken over.
    """
    check(session, epoch).heartbeat_at = now


def check(session: Session, epoch: int) -> LeaseRow:
    """Return the lease if it still has this epoch, and keep others from taking it until the transaction ends.

    Raises:
        UnavailableError: another manager has taken over.
    """
    row = _lock(session)
    if row is None or row.epoch != epoch:
        holder = "nobody" if row is None else row.holder
        raise UnavailableError(f"another manager ({holder}) has taken charge of this fleet; this one stops")
    return row


def release(session: Session, epoch: int | None) -> None:
    """Let the next manager start at once, if this epoch is still the newest; None releases any."""
    row = _lock(session)
    if row is not None and epoch in (row.epoch, None):
        row.holder = ""


def _lock(session: Session) -> LeaseRow | None:
    return session.scalars(select(LeaseRow).where(LeaseRow.name == _NAME).with_for_update()).first()
