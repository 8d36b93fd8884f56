"""Deletes old figures, since a fleet of 100,000 devices reports millions of them a day."""

from collections.abc import Collection
from typing import Final

from sqlalchemy import delete
from sqlalchemy.orm import Session

from edgekit_fleet.store.tables import FigureRow

KEPT_HOURS: Final = 7 * 24
"""How long figures are kept, in hours. Gates compare at most two days, and the page of model health shows one
day."""
_HOUR_S: Final = 3600.0


def forget_old_figures(session: Session, devices: Collection[str], now: float) -> None:
    """Delete the figures of some devices that are older than `KEPT_HOURS`.

    Args:
        session: The session of a transaction.
        devices: The names of at most 900 devices.
        now: The time in seconds since 1970.
    """
    oldest = int(now // _HOUR_S) - KEPT_HOURS
    session.execute(delete(FigureRow).where(FigureRow.device.in_(devices), FigureRow.hour < oldest))
