"""Marks devices that need a new desired document, which the manager of their shard then writes."""

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from edgekit_fleet.store.tables import DesiredRow

_BATCH: Final = 500


def mark_due(session: Session, devices: Iterable[str], **changes: Any) -> None:
    """Schedule new desired documents for devices whose desired models have changed.

    Args:
        session: The session of a transaction.
        devices: The names of the devices.
        changes: New values for other columns of `DesiredRow`.
    """
    names = sorted(set(devices))
    for begin in range(0, len(names), _BATCH):
        is_some = DesiredRow.device.in_(names[begin : begin + _BATCH])
        if session.get_bind().dialect.name == "postgresql":
            # All managers take the locks in one order, since two that wait for each other would never end.
            session.execute(
                select(DesiredRow.device).where(is_some).order_by(DesiredRow.device).with_for_update()
            )
        session.execute(update(DesiredRow).where(is_some).values(is_due=True, **changes))
