"""Filters of devices that are kept under a name, for all users."""

import time
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import SavedQueryRow
from edgekit_runtime.errors import FleetError

_MOST: Final = 100
_MAX_CHARS: Final = 60


def list_queries(session: Session) -> list[SavedQueryRow]:
    """Return all, by name."""
    return list(session.scalars(select(SavedQueryRow).order_by(SavedQueryRow.name)))


def save(store: Store, name: str, selector: str, actor: str) -> None:
    """Keep a selector; one of the same name is replaced.

    Raises:
        FleetError: the name is empty or too long, the selector malformed, or there are too many.
    """
    if not name or len(name) > _MAX_CHARS or not name.isprintable():
        raise FleetError(f"name {name[:80]!r}, expected 1 to {_MAX_CHARS} characters")
    parse_selector(selector)
    with store.transaction() as session:
        if session.get(SavedQueryRow, name) is None and len(list_queries(session)) >= _MOST:
            raise FleetError(f"there are {_MOST} saved queries; remove one first")
        session.merge(SavedQueryRow(name=name, selector=selector, created_at=time.time(), created_by=actor))
        audit.record(session, actor, "query.save", name, selector=selector)


def remove(store: Store, name: str, actor: str) -> None:
    """Forget one.

    Raises:
        FleetError: there is none of that name.
    """
    with store.transaction() as session:
        row = session.get(SavedQueryRow, name)
        if row is None:
            raise FleetError(f"no saved query '{name}'")
        session.delete(row)
        audit.record(session, actor, "query.remove", name)
