"""The open orders for samples, and the devices that they select."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.rollouts.selector_sql import compile_selector
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.tables import DeviceRow, SampleOrderRow, SampleSettingRow, read_record
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.protocol.samples import SampleOrder, SampleTrigger

SETTING: Final = 1
"""Number of the only row of `SampleSettingRow`."""


def read_setting(session: Session) -> SampleSettingRow | None:
    """Return the fleet's setting for samples, or None if the fleet collects no samples."""
    row = session.get(SampleSettingRow, SETTING)
    return row if row is not None and row.is_on else None


def list_orders(session: Session, since: float) -> list[SampleOrderRow]:
    """Return the orders that nobody stopped and that end after `since`, in seconds since 1970."""
    is_open = (SampleOrderRow.stopped_at.is_(None)) & (SampleOrderRow.ends_at > since)
    return list(session.scalars(select(SampleOrderRow).where(is_open).order_by(SampleOrderRow.id)))


def list_wishes(session: Session, devices: Sequence[str], now: float) -> dict[str, list[dict[str, Any]]]:
    """Return the open `SampleOrder`s of each device, as plain values for its desired document.

    Devices without orders are left out. `now` is in seconds since 1970.
    """
    setting = read_setting(session)
    wishes: dict[str, list[dict[str, Any]]] = {}
    for row in list_orders(session, now) if setting is not None else ():
        order = to_plain(read_order(row, setting.public_key if setting is not None else ""))
        for device in session.scalars(_select_meant(session, row).where(DeviceRow.name.in_(devices))):
            wishes.setdefault(device, []).append(order)
    return wishes


def list_orders_of(session: Session, device: str, since: float) -> list[SampleOrderRow]:
    """Return the orders from `list_orders` whose selector matches a device."""
    return [
        row
        for row in list_orders(session, since)
        if session.scalar(_select_meant(session, row).where(DeviceRow.name == device)) is not None
    ]


def mark_meant(session: Session, row: SampleOrderRow) -> int:
    """Schedule new desired documents for the devices that an order selects, and return their number."""
    devices = session.scalars(_select_meant(session, row)).all()
    mark_due(session, devices)
    return len(devices)


def read_order(row: SampleOrderRow, public_key: str) -> SampleOrder:
    triggers = tuple(from_plain(SampleTrigger, trigger, row.id) for trigger in row.triggers)
    return read_record(SampleOrder, row, triggers=triggers, public_key=public_key)


def _select_meant(session: Session, row: SampleOrderRow) -> Any:
    condition = compile_selector(session, parse_selector(row.selector))
    return select(DeviceRow.name).where(condition, DeviceRow.revoked_at.is_(None))
