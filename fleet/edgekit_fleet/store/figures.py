"""How long figures of devices are kept: a fleet of 100,000 devices reports millions of them a day."""

from collections.abc import Collection
from typing import Final

from sqlalchemy import delete
from sqlalchemy.orm import Session

from edgekit_fleet.store.tables import FigureRow

KEPT_HOURS: Final = 7 * 24
"""Gates compare figures of at most two days; the page of model health shows one."""
_HOUR_S: Final = 3600.0


def forget_old_figures(session: Session, devices: Collection[str], now: float) -> None:
    """Delete figures of these devices from more than `KEPT_HOURS` ago.

    Args:
        session: session of a transaction.
        devices: names of the devices, at most 900.
        now: seconds since 1970.
    """
    oldest = int(now // _HOUR_S) - KEPT_HOURS
    session.execute(delete(FigureRow).where(FigureRow.device.in_(devices), FigureRow.hour < oldest))
