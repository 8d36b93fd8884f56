"""Compiles selectors to SQL conditions, so that the database can search 100,000 devices.

`Selector.matches` defines the meaning of a selector. A test checks that the conditions agree.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeAlias

from sqlalchemy import (
    ColumnElement,
    UnaryExpression,
    and_,
    case,
    false,
    func,
    intersect,
    literal,
    not_,
    or_,
    select,
    true,
    tuple_,
)
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

# As the documentation of SQLite's query planner states.
_WITHOUT_INDEX: Final["custom_op[str]"] = custom_op("+")

Lookup: TypeAlias = Literal["names", "list", "index"]
"""How SQLite looks up attributes. PostgreSQL chooses its own way.

`names`: SQLite can begin with the matching devices, and looks up each by name. Best if few devices match.
`list`: SQLite goes through the devices by their index, and looks up each in a list of the devices with the
attribute. Best to count devices.
`index`: As `list`, but a name and a single value are looked up in the index of attributes. Best if a list
would be long and few devices are read.
"""


def compile_selector(
    session: Session, selector: Selector, *, lookup: Lookup = "names"
) -> ColumnElement[bool]:
    """Return a selector as a condition for statements on `DeviceRow`.

    Args:
        session: The session of the store.
        selector: The selector of the devices.
        lookup: How SQLite looks up attributes, see `Lookup`.
    """
    return _Compiler(session.get_bind().dialect.name, lookup).compile(selector.test)


def count_by_attributes(session: Session, selector: Selector) -> int | None:
    """Return the number of devices that match a selector, or None if the selector is too complex.

    This only reads the index of attributes. So the selector must consist of tests of tags, facts and versions
    that are joined with `and`, and at most one of these tests may be negated.
    """
    tests = selector.test.tests if isinstance(selector.test, Every) else (selector.test,)
    positive_tests = [test for test in tests if not isinstance(test, Negation)]
    negated = [test.test for test in tests if isinstance(test, Negation)]
    terms = [
        test
        for test in (*positive_tests, *negated)
        if isinstance(test, Has | Equals) and test.name not in _OWN
    ]
    if len(terms) < len(tests) or len(negated) > 1:
        return None
    compiler = _Compiler(session.get_bind().dialect.name)
    count = _count_all(session, compiler, terms[: len(positive_tests)])
    return count - _count_all(session, compiler, terms) if negated else count


def _count_all(session: Session, compiler: "_Compiler", terms: Sequence[Has | Equals]) -> int:
    """Return the number of devices that have all these attributes."""
    if not terms:
        return session.scalar(select(func.count()).select_from(DeviceRow)) or 0
    lists = [select(AttributeRow.device).where(compiler.compile_row(term)) for term in terms]
    # By the order SQLite merges: without it, it makes a table of each list.
    merged = intersect(*lists).order_by("device") if len(lists) > 1 else lists[0]
    return session.scalar(select(func.count()).select_from(merged.subquery())) or 0


class _Compiler:
    """Compiles the syntax tree of a selector to a condition."""

    def __init__(self, dialect: str, lookup: Lookup = "names") -> None:
        self._has_glob = dialect == "sqlite"
        self._probes_index = dialect == "sqlite" and lookup == "index"
        self._device: ColumnElement[str] = DeviceRow.__table__.c.name
        if dialect == "sqlite" and lookup != "names":
            self._device = UnaryExpression(self._device, operator=_WITHOUT_INDEX)

    def compile(self, test: Test) -> ColumnElement[bool]:
        """Return the SQL condition that is true for devices that match `test`."""
        match test:
            case Everything():
                return true()
            case Has(name=name):
                return true() if name in _OWN else self._attribute(test)
            case Equals():
                return self._equals(test)
            case Negation(test=inner) if self._probes_index:
                # For NOT IN with several columns SQLite searches the whole index for a NULL; not in a CASE.
                return case((self.compile(inner), false()), else_=true())
            case Negation(test=inner):
                return not_(self.compile(inner))
            case Every(tests=tests):
                return and_(*map(self.compile, tests))
            case Either(tests=tests):
                return or_(*map(self.compile, tests))

    def compile_row(self, test: Has | Equals) -> ColumnElement[bool]:
        """Return the condition for rows of `AttributeRow`."""
        is_named = AttributeRow.name == test.name
        if isinstance(test, Has):
            return is_named
        return and_(is_named, self._match(AttributeRow.value, test.patterns))

    def _equals(self, test: Equals) -> ColumnElement[bool]:
        name, patterns = test.name, test.patterns
        if name == "online":
            values = [
                value for value in ("yes", "no") if any(fnmatchcase(value, pattern) for pattern in patterns)
            ]
            return or_(false(), *(DeviceRow.is_online.is_(value == "yes") for value in values))
        if name in _OWN:
            return self._match(_OWN[name], patterns)
        return self._attribute(test)

    def _attribute(self, test: Has | Equals) -> ColumnElement[bool]:
        values = () if isinstance(test, Has) else test.patterns
        if self._probes_index and len(values) <= 1 and not any(map(_is_glob, values)):
            # SQLite probes the index of these columns. For an EXISTS it takes the key, without the value.
            columns = (AttributeRow.name, AttributeRow.value, AttributeRow.device)
            indexed = select(*columns) if values else select(AttributeRow.name, AttributeRow.device)
            return tuple_(literal(test.name), *map(literal, values), self._device).in_(indexed)
        return self._device.in_(select(AttributeRow.device).where(self.compile_row(test)))

    def _match(self, column: InstrumentedAttribute[str], patterns: tuple[str, ...]) -> ColumnElement[bool]:
        plain = [pattern for pattern in patterns if not _is_glob(pattern)]
        globs = [pattern for pattern in patterns if _is_glob(pattern)]
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


def _is_glob(pattern: str) -> bool:
    return not set(pattern).isdisjoint("*?[")


def _split(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the (kind, text) parts of a shell pattern: `any`, `one`, `set`, `not-set` or `text`."""
    at = 0
    while at < len(pattern):
        match = SET.match(pattern, at)
        if match is not None:
            yield ("not-set" if match[1] else "set"), match[2]
            at = match.end()
            continue
        yield {"*": "any", "?": "one"}.get(pattern[at], "text"), pattern[at]
        at += 1


def _to_glob(pattern: str) -> str:
    """Convert a pattern to a GLOB pattern of SQLite."""
    signs = {"any": "*", "one": "?"}
    parts = []
    for kind, text in _split(pattern):
        if kind in ("set", "not-set"):
            parts.append(f"[{'^' if kind == 'not-set' else ''}{text}]")
        else:
            parts.append(signs.get(kind, "[[]" if text == "[" else text))
    return "".join(parts)


def _to_regex(pattern: str) -> str:
    """Convert a pattern to a regular expression of PostgreSQL."""
    signs = {"any": ".*", "one": "."}
    parts = []
    for kind, text in _split(pattern):
        if kind in ("set", "not-set"):
            inner = text.replace("\\", "\\\\")
            parts.append(f"[{'^' if kind == 'not-set' else ''}{inner}]")
        else:
            parts.append(signs.get(kind) or re.escape(text))
    return f"^(?:{''.join(parts)})$"
