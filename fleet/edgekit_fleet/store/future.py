"""Repairs times in the store that were written while the manager's clock was fast.

Work that is scheduled for such a time would otherwise be late. The times of rollouts (see `ClockSetBack`),
desired documents and the repository are repaired elsewhere.
"""

from typing import Final

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import (
    CodeRow,
    DeviceRow,
    FailureRow,
    FigureRow,
    LoginRow,
    WebhookRow,
)

CLOCK_STEP_S: Final = 60.0
"""Seconds by which a network-synchronized clock may be set back without harm."""
_LONGEST_WAIT_S: Final = 7200.0  # of a webhook


def forget_future(session: Session, now: float) -> None:
    """Repair times that lie in the future, and record this in the audit log.

    Figures, one-time codes, logins and failed attempts with such times are deleted. They would otherwise
    count as the newest, or be valid for too long. `now` is in seconds since 1970.
    """
    limit = now + CLOCK_STEP_S
    newest = session.scalar(select(func.max(DeviceRow.last_seen_at)))
    for row, column in (
        (FigureRow, FigureRow.reported_at),
        (FailureRow, FailureRow.begun_at),
        (LoginRow, LoginRow.created_at),
        (CodeRow, CodeRow.created_at),
    ):
        session.execute(delete(row).where(column > limit))
    session.execute(update(DeviceRow).where(DeviceRow.last_seen_at > limit).values(last_seen_at=now))
    session.execute(update(WebhookRow).where(WebhookRow.due_at > now + _LONGEST_WAIT_S).values(due_at=now))
    if newest is not None and newest > limit:
        text = (
            f"the clock was {newest - now:.0f} s ahead of now; documents, metadata and waiting times of then"
            " are made again; set the clock by NTP"
        )
        audit.record(session, "manager", "alarm.clock", "manager", text=text, ahead_s=round(newest - now))
