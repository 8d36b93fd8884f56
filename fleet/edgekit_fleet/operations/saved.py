"""Saved device filters and switching windows, which have names and are shared by all users."""

import time
from typing import Any, Final, TypeAlias

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import SavedQueryRow, SavedWindowRow
from edgekit_runtime.agent.conditions import is_window
from edgekit_runtime.errors import FleetError

_MOST: Final = 100
_MAX_CHARS: Final = 60

_Kind: TypeAlias = type[SavedQueryRow] | type[SavedWindowRow]
_WORDS: Final[dict[Any, tuple[str, str]]] = {
    SavedQueryRow: ("query", "saved query"),
    SavedWindowRow: ("window", "window"),
}


def check_window(window: str) -> None:
    """Check that a window has the form `01:00-04:00` and is not empty.

    Raises:
        FleetError: The window is malformed or empty.
    """
    if not is_window(window):
        raise FleetError(f"window {window[:40]!r} is not of the form 01:00-04:00, or is empty")


def list_queries(session: Session) -> list[SavedQueryRow]:
    """Return all saved device filters, sorted by name."""
    return list(session.scalars(select(SavedQueryRow).order_by(SavedQueryRow.name)))


def list_windows(session: Session) -> list[SavedWindowRow]:
    """Return all saved windows, sorted by name."""
    return list(session.scalars(select(SavedWindowRow).order_by(SavedWindowRow.name)))


def save_query(store: Store, name: str, selector: str, actor: str) -> None:
    """Save a selector under a name for all users. An earlier selector of that name is replaced.

    Raises:
        FleetError: The name is empty or too long, the selector is malformed, or there are too many filters.
    """
    parse_selector(selector)
    _save(store, SavedQueryRow, name, actor, selector=selector)


def save_window(store: Store, name: str, window: str, actor: str) -> None:
    """Save a window, such as `01:00-04:00` in a device's local time, or replace the window of that name.

    Raises:
        FleetError: The name is empty or too long, the window is malformed, or there are too many windows.
    """
    check_window(window)
    _save(store, SavedWindowRow, name, actor, window=window)


def remove_query(store: Store, name: str, actor: str) -> None:
    """Delete a saved filter.

    Raises:
        FleetError: There is no filter of that name.
    """
    _remove(store, SavedQueryRow, name, actor)


def remove_window(store: Store, name: str, actor: str) -> None:
    """Delete a saved window. Rollouts that were started with it keep it.

    Raises:
        FleetError: There is no window of that name.
    """
    _remove(store, SavedWindowRow, name, actor)


def _save(store: Store, kind: _Kind, name: str, actor: str, **values: str) -> None:
    action, words = _WORDS[kind]
    if not name or len(name) > _MAX_CHARS or not name.isprintable():
        raise FleetError(f"name {name[:80]!r}, expected 1 to {_MAX_CHARS} characters")
    with store.transaction() as session:
        count = session.scalar(select(func.count()).select_from(kind)) or 0
        if session.get(kind, name) is None and count >= _MOST:
            raise FleetError(f"there are {_MOST}; remove a {words} first")
        session.merge(kind(name=name, created_at=time.time(), created_by=actor, **values))
        audit.record(session, actor, f"{action}.save", name, **values)


def _remove(store: Store, kind: _Kind, name: str, actor: str) -> None:
    action, words = _WORDS[kind]
    with store.transaction() as session:
        row = session.get(kind, name)
        if row is None:
            raise FleetError(f"no {words} '{name}'")
        session.delete(row)
        audit.record(session, actor, f"{action}.remove", name)
