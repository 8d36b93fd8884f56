"""Finds devices by selector in the database, one page at a time."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from sqlalchemy import ColumnElement, and_, func, not_, select, true
from sqlalchemy.orm import Session

from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.rollouts.selector_sql import Lookup, compile_selector, count_by_attributes
from edgekit_fleet.store.tables import DeviceRow

ATTENTION: Final = ("faulty", "diverged", "stale", "working", "new", "converged", "revoked")
"""The statuses of devices. Those that need a person come first."""
SILENT_S: Final = 7 * 86_400.0
EXPIRING_S: Final = 30 * 86_400.0

Special: TypeAlias = Literal["", "silent", "expiring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The devices to find. An empty field matches all devices.

    Attributes:
        selector: A selector, such as `class=rpi5 and site=lyon`.
        status: The status of the devices.
        special: `silent` finds devices without a message for a week. `expiring` finds devices whose
            certificate expires within a month.
    """

    selector: str = ""
    status: str = ""
    special: Special = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePage:
    """A page of the devices that were found.

    Attributes:
        after: The argument `after` of `find_devices` for the next page. It is empty on the last page.
    """

    rows: Sequence[DeviceRow]
    after: str


def find_devices(
    session: Session,
    search: Search,
    *,
    by_name: bool = False,
    after: str = "",
    limit: int = 50,
    counts: Mapping[tuple[str, bool], int] | None = None,
    max_listed: int = 5000,
) -> DevicePage:
    """Return a page of devices, sorted by status in the order of `ATTENTION`.

    Within each status, connected devices come first.

    Args:
        session: A session of the store.
        search: The devices to find.
        by_name: Whether to sort by name instead.
        after: The `DevicePage.after` of the previous page, or empty for the first page.
        limit: The maximum number of devices on the page.
        counts: The result of `count_devices` or None. It speeds up the search.
        max_listed: The number of devices above which SQLite uses an index (see `selector_sql.Lookup`).

    Raises:
        FleetError: The selector is malformed.
    """
    lookup: Lookup = "index" if counts is not None and sum(counts.values()) > max_listed else "names"
    condition = _make_condition(session, search, lookup)
    if by_name:
        statement = select(DeviceRow).where(condition, DeviceRow.name > after).order_by(DeviceRow.name)
        rows = list(session.scalars(statement.limit(limit + 1)))
        return DevicePage(rows=rows[:limit], after=rows[limit - 1].name if len(rows) > limit else "")
    rows, next_after = [], ""
    for status, is_online, name in _places(after):
        if search.status and search.status != status:
            continue
        if counts is not None and not counts.get((status, is_online)):
            continue
        statement = (
            select(DeviceRow)
            .where(
                DeviceRow.status == status,
                DeviceRow.is_online.is_(is_online),
                DeviceRow.name > name,
                condition,
            )
            .order_by(DeviceRow.name)
            .limit(limit + 1 - len(rows))
        )
        rows += session.scalars(statement)
        if len(rows) > limit:
            last = rows[limit - 1]
            next_after = f"{last.status}:{int(last.is_online)}:{last.name}"
            break
    return DevicePage(rows=rows[:limit], after=next_after)


def count_devices(session: Session, search: Search) -> dict[tuple[str, bool], int]:
    """Return a dict from (status, is_online) to the number of devices. `search.status` is ignored.

    Raises:
        FleetError: The selector is malformed.
    """
    total = None
    if search.selector.strip() and not search.special:
        total = count_by_attributes(session, parse_selector(search.selector))
    if total is None:
        return _count(session, _make_condition(session, search, "list"))
    # The largest group is the total less all others: in a calm fleet it has most of the devices.
    everything = _count(session, true())
    largest = max(everything, key=lambda group: everything[group], default=("new", False))
    is_largest = and_(DeviceRow.status == largest[0], DeviceRow.is_online.is_(largest[1]))
    others = _count(session, and_(not_(is_largest), _make_condition(session, search, "index")))
    # PostgreSQL may have changed a device in between.
    return {**others, largest: max(total - sum(others.values()), 0)}


def _count(session: Session, condition: ColumnElement[bool]) -> dict[tuple[str, bool], int]:
    statement = (
        select(DeviceRow.status, DeviceRow.is_online, func.count())
        .where(condition)
        .group_by(DeviceRow.status, DeviceRow.is_online)
    )
    return {(status, bool(is_online)): count for status, is_online, count in session.execute(statement)}


def _make_condition(session: Session, search: Search, lookup: Lookup) -> ColumnElement[bool]:
    """Return the condition on `DeviceRow` for the matching devices, without that on `status`.

    Raises:
        FleetError: The selector is malformed.
    """
    parts: list[ColumnElement[bool]] = []
    if search.selector.strip():
        parts.append(compile_selector(session, parse_selector(search.selector), lookup=lookup))
    now = time.time()
    if search.special == "silent":
        parts += [DeviceRow.is_online.is_(False), DeviceRow.last_seen_at < now - SILENT_S]
    elif search.special == "expiring":
        parts.append(DeviceRow.certificate_expires_at < now + EXPIRING_S)
    if search.special:
        parts.append(DeviceRow.status != "revoked")
    return and_(true(), *parts)


def _places(after: str) -> Iterator[tuple[str, bool, str]]:
    """Yield (status, is_online, name to begin after) in the order of attention, from a place on."""
    status, _, remainder = after.partition(":")
    online, _, name = remainder.partition(":")
    groups = [(status_of_group, is_online) for status_of_group in ATTENTION for is_online in (True, False)]
    begin = (status, online == "1")
    first = groups.index(begin) if begin in groups else 0
    for group in groups[first:]:
        yield (*group, name if group == begin else "")
