"""Selectors as conditions of SQL: a store of 100,000 devices does the search itself.

`Selector.matches` says what a selector means; a test holds both against each other.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from sqlalchemy import ColumnElement, UnaryExpression, and_, false, not_, or_, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.operators import custom_op

from edgekit_fleet.rollouts.selector import (
    SET,
    Either,
    Equals,
    Every,
    Everything,
    Has,
    Negation,
    Selector,
    Test,
)
from edgekit_fleet.store.tables import AttributeRow, DeviceRow

# As the documentation of SQLite's query planner has it.
_WITHOUT_INDEX: Final["custom_op[str]"] = custom_op("+")


def compile_selector(session: Session, selector: Selector, *, counts: bool = False) -> ColumnElement[bool]:
    """Return the condition that a device matches, for a statement on `DeviceRow`.

    Args:
        session: of the store.
        selector: of the devices.
        counts: whether the statement only counts: then SQLite does not look each of 80,000 matching devices
            up by name, but goes through the index that it counts by.
    """
    return _Compiler(session.get_bind().dialect.name, counts).compile(selector.test)


class _Compiler:
    """Turns the tree of a selector into a condition."""

    def __init__(self, dialect: str, counts: bool) -> None:
        self._has_glob = dialect == "sqlite"
        self._device: ColumnElement[str] = DeviceRow.__table__.c.name
        if counts and dialect == "sqlite":
            self._device = UnaryExpression(self._device, operator=_WITHOUT_INDEX)

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
            values = [value for value in ("yes", "no") if any(fnmatchcase(value, one) for one in patterns)]
            return or_(false(), *(DeviceRow.is_online.is_(value == "yes") for value in values))
        if name in _OWN:
            return self._match(_OWN[name], patterns)
        return self._attribute(name, patterns)

    def _attribute(self, name: str, patterns: tuple[str, ...] = ("*",)) -> ColumnElement[bool]:
        named = select(AttributeRow.device).where(AttributeRow.name == name)
        if patterns != ("*",):
            named = named.where(self._match(AttributeRow.value, patterns))
        return self._device.in_(named)

    def _match(self, column: InstrumentedAttribute[str], patterns: tuple[str, ...]) -> ColumnElement[bool]:
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


def _split(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of a pattern as in file names: `any`, `one`, `set`, `not-set` or `text`."""
    at = 0
    while at < len(pattern):
        found = SET.match(pattern, at)
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
