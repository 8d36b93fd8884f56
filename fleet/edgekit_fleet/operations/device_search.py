"""Devices by selector, a page at a time; the store does the search, so it may hold 100,000 devices.

`Selector.matches` says what a selector means; a test holds both against each other.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeAlias

from sqlalchemy import ColumnElement, and_, false, func, not_, or_, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session

from edgekit_fleet.rollouts.selector import (
    Either,
    Equals,
    Every,
    Everything,
    Has,
    Negation,
    Test,
    parse_selector,
)
from edgekit_fleet.store.attributes import CHANGING
from edgekit_fleet.store.tables import AttributeRow, DeviceRow

ATTENTION: Final = ("faulty", "diverged", "stale", "working", "new", "converged", "revoked")
"""Statuses, those first that need a person."""
SILENT_S: Final = 7 * 86_400.0
EXPIRING_S: Final = 30 * 86_400.0
_SET: Final = re.compile(r"\[(!?)(\]?[^\]]*)\]")

Special: TypeAlias = Literal["", "silent", "expiring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Which devices are meant.

    Attributes:
        selector: as in `selector`; empty for all.
        status: only of this one, or empty.
        special: only those that are `silent` for a week, or whose certificate is `expiring` within a month.
    """

    selector: str = ""
    status: str = ""
    special: Special = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePage:
    """Some of the devices that were found.

    Attributes:
        rows: of the page.
        after: where the next page begins, for `find_devices`; empty on the last one.
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
) -> DevicePage:
    """Return a page of devices: those that need attention first, the connected ones before the others.

    Args:
        session: of the store.
        search: which.
        by_name: sorted by name instead.
        after: of the page before.
        limit: most devices of a page.
        counts: of `count_devices`, to look for no devices where there are none.

    Raises:
        FleetError: the selector is malformed.
    """
    condition = make_condition(session, search)
    if by_name:
        statement = select(DeviceRow).where(condition, DeviceRow.name > after).order_by(DeviceRow.name)
        rows = list(session.scalars(statement.limit(limit + 1)))
        return DevicePage(rows=rows[:limit], after=rows[limit - 1].name if len(rows) > limit else "")
    rows, place = [], ""
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
            place = f"{last.status}:{int(last.is_online)}:{last.name}"
            break
    return DevicePage(rows=rows[:limit], after=place)


def count_devices(session: Session, search: Search) -> dict[tuple[str, bool], int]:
    """Return (status, is_online) -> number of devices, whatever `search.status` is.

    Raises:
        FleetError: the selector is malformed.
    """
    statement = (
        select(DeviceRow.status, DeviceRow.is_online, func.count())
        .where(make_condition(session, search))
        .group_by(DeviceRow.status, DeviceRow.is_online)
    )
    return {(status, bool(is_online)): count for status, is_online, count in session.execute(statement)}


def make_condition(session: Session, search: Search) -> ColumnElement[bool]:
    """Return the condition that a device matches, for a statement on `DeviceRow`; leaves `status` out.

    Raises:
        FleetError: the selector is malformed.
    """
    parts: list[ColumnElement[bool]] = []
    if search.selector.strip():
        parts.append(_Compiler(session.get_bind().dialect.name).compile(parse_selector(search.selector).test))
    now = time.time()
    if search.special == "silent":
        parts += [DeviceRow.is_online.is_(False), DeviceRow.last_seen_at < now - SILENT_S]
    elif search.special == "expiring":
        parts.append(DeviceRow.certificate_expires_at < now + EXPIRING_S)
    if search.special:
        parts.append(DeviceRow.status != "revoked")
    return and_(true(), *parts)


def _places(after: str) -> Iterator[tuple[str, bool, str]]:
    """Yield (status, is_online, name after which it begins) in the order of attention, from a place on."""
    status, _, rest = after.partition(":")
    online, _, name = rest.partition(":")
    places = [(each, is_online) for each in ATTENTION for is_online in (True, False)]
    begin = (status, online == "1")
    first = places.index(begin) if begin in places else 0
    for place in places[first:]:
        yield (*place, name if place == begin else "")


class _Compiler:
    """Turns the tree of a selector into a condition."""

    def __init__(self, dialect: str) -> None:
        self._has_glob = dialect == "sqlite"

    def compile(self, test: Test) -> ColumnElement[bool]:
        """Return the condition that a device matches."""
        match test:
            case Everything():
                return true()
            case Has(name=name):
                return true() if name in _OWN else self._attribute(name)
            case Equals(name=name, patterns=patterns):
                return self._equals(name, patterns)
            case Negation(test=inner):
                return not_(self.compile(inner))
            case Every(tests=tests):
                return and_(*map(self.compile, tests))
            case Either(tests=tests):
                return or_(*map(self.compile, tests))

    def _equals(self, name: str, patterns: tuple[str, ...]) -> ColumnElement[bool]:
        if name == "online":
            return or_(
                false(),
                *(DeviceRow.is_online.is_(value == "yes") for value in _match(("yes", "no"), patterns)),
            )
        if name == "status":
            return DeviceRow.status.in_(_match(ATTENTION, patterns))
        if name in _OWN:
            return self._match(_OWN[name], patterns)
        return self._attribute(name, patterns)

    def _attribute(self, name: str, patterns: tuple[str, ...] = ("*",)) -> ColumnElement[bool]:
        named = select(AttributeRow.device).where(AttributeRow.name == name)
        if patterns != ("*",):
            named = named.where(self._match(AttributeRow.value, patterns))
        found = DeviceRow.name.in_(named)
        if name not in CHANGING:
            return found
        # A tag of such a name is an attribute; the fact is read from the JSON of every device.
        fact = DeviceRow.facts[name].as_string()
        is_tag = DeviceRow.name.in_(select(AttributeRow.device).where(AttributeRow.name == name))
        return or_(found, and_(not_(is_tag), fact.is_not(None), self._match(fact, patterns)))

    def _match(
        self, column: InstrumentedAttribute[str] | ColumnElement[str], patterns: tuple[str, ...]
    ) -> ColumnElement[bool]:
        plain = [pattern for pattern in patterns if not set(pattern) & set("*?[")]
        globs = [pattern for pattern in patterns if set(pattern) & set("*?[")]
        tests: list[ColumnElement[bool]] = [column.in_(plain)] if plain else []
        for pattern in globs:
            operator, text = ("GLOB", _to_glob(pattern)) if self._has_glob else ("~", _to_regex(pattern))
            tests.append(column.bool_op(operator)(text))
        return or_(false(), *tests)


_OWN: Final[dict[str, InstrumentedAttribute[str]]] = {
    "class": DeviceRow.target,
    "name": DeviceRow.name,
    "status": DeviceRow.status,
    "online": DeviceRow.status,  # not used: see `_equals`
}


def _match(values: Sequence[str], patterns: tuple[str, ...]) -> list[str]:
    return [value for value in values if any(fnmatchcase(value, pattern) for pattern in patterns)]


def _split(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of a pattern as in file names: `any`, `one`, `set`, `not-set` or `text`."""
    at = 0
    while at < len(pattern):
        found = _SET.match(pattern, at)
        if found is not None:
            yield ("not-set" if found[1] else "set"), found[2]
            at = found.end()
            continue
        yield {"*": "any", "?": "one"}.get(pattern[at], "text"), pattern[at]
        at += 1


def _to_glob(pattern: str) -> str:
    """Return a pattern as SQLite's GLOB wants it."""
    signs = {"any": "*", "one": "?"}
    parts = []
    for kind, text in _split(pattern):
        if kind in ("set", "not-set"):
            parts.append(f"[{'^' if kind == 'not-set' else ''}{text}]")
        else:
            parts.append(signs.get(kind, "[[]" if text == "[" else text))
    return "".join(parts)


def _to_regex(pattern: str) -> str:
    """Return a pattern as a regular expression of PostgreSQL."""
    signs = {"any": ".*", "one": "."}
    parts = []
    for kind, text in _split(pattern):
        if kind in ("set", "not-set"):
            inner = text.replace("\\", "\\\\")
            parts.append(f"[{'^' if kind == 'not-set' else ''}{inner}]")
        else:
            parts.append(signs.get(kind) or re.escape(text))
    return f"^(?:{''.join(parts)})$"
