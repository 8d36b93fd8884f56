"""Selectors of devices, such as `class=jetson and site in (lyon, "new york") and not beta`.

    all                       every device
    site=lyon                 the tag or fact `site` is `lyon`
    site!=lyon                the tag or fact is not `lyon`, or the device has none
    site in (lyon, nice)      the tag or fact is `lyon` or `nice`
    site not in (lyon, nice)  the tag or fact is neither of them, or the device has none
    beta                      the device has a tag or fact `beta`
    model:detector=1.4.0      the device runs this version of the model
    not A, A and B, A or B    `not` binds most tightly, `or` least tightly, and parentheses group

Values may contain `*`, `?` and `[...]` as in a shell. Operators set tags, and devices report facts. A tag
hides a fact of the same name. The facts `battery`, `boot`, `clock` and `free_bytes` change with nearly every
report and are not indexed. A selector that names one of them is refused, even if a tag has the same name. A
class also matches by its first words, so `class=jetson` matches `jetson-orin-nano`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from edgekit_fleet.store.attributes import CHANGING
from edgekit_runtime.errors import FleetError

_MAX_CHARS: Final = 2000
SET: Final = re.compile(r"\[(!?)(\]?[^\]]*)\]")
_RANGE: Final = re.compile(r"(.)-(.)", re.DOTALL)
_MAX_DEPTH: Final = 40
_MAX_PATTERNS: Final = 100  # each is tried on each device, which takes 0.7 s of 100,000 devices
_TOKEN: Final = re.compile(r"""\s*(?:(!=|==|=|\(|\)|,)|"([^"]*)"|'([^']*)'|([^\s=!(),"']+))""")
_ORDER: Final = re.compile("[<>]")
_KEYWORDS: Final = frozenset(("and", "or", "not", "in", "all"))

Attributes: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Everything:
    """Matches every device."""

    def matches(self, _: Attributes) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Has:
    """Matches if the device has a tag or fact of this name."""

    name: str

    def matches(self, device: Attributes) -> bool:
        return self.name in device


@dataclass(frozen=True, slots=True)
class Equals:
    """Matches if the value of a tag or fact matches a pattern, with `*`, `?` and `[...]` as in a shell."""

    name: str
    patterns: tuple[str, ...]

    def matches(self, device: Attributes) -> bool:
        value = device.get(self.name)
        return value is not None and any(fnmatchcase(value, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Negation:
    """Matches if the inner test does not match."""

    test: "Test"

    def matches(self, device: Attributes) -> bool:
        return not self.test.matches(device)


@dataclass(frozen=True, slots=True)
class Every:
    """Matches if all tests match."""

    tests: "tuple[Test, ...]"

    def matches(self, device: Attributes) -> bool:
        return all(test.matches(device) for test in self.tests)


@dataclass(frozen=True, slots=True)
class Either:
    """Matches if at least one of the tests matches."""

    tests: "tuple[Test, ...]"

    def matches(self, device: Attributes) -> bool:
        return any(test.matches(device) for test in self.tests)


Test: TypeAlias = Everything | Has | Equals | Negation | Every | Either


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed selector.

    Attributes:
        names: The names of the tags and facts in the selector.
    """

    text: str
    names: frozenset[str]
    test: Test

    def matches(self, attributes: Attributes) -> bool:
        """Return whether a device matches.

        Args:
            attributes: The attributes of the device, see `views.list_attributes`.
        """
        return self.test.matches(attributes)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    at: int
    is_word: bool
    is_quoted: bool = False


def parse_selector(text: str) -> Selector:
    """Parse a selector.

    Raises:
        FleetError: The text is malformed, or names a fact that is not indexed. The message shows where.
    """
    if len(text) > _MAX_CHARS:
        raise FleetError(f"selector: has {len(text)} characters, at most {_MAX_CHARS} are allowed")
    parser = _Parser(text)
    test = parser.read_any(0)
    parser.expect_end()
    for name in sorted(parser.names & CHANGING):
        raise FleetError(
            f"selector {text!r}: '{name}' changes with nearly every report and is not kept for searches; name"
            " another fact, or a tag with another name"
        )
    return Selector(text, frozenset(parser.names), test)


class _Parser:
    """A recursive descent parser with one method for each level of precedence."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: set[str] = set()
        self._tokens = list(self._split())
        self._next = 0
        self._patterns = 0

    def _split(self) -> list[_Token]:
        tokens, at = [], 0
        while self.text[at:].strip():
            match = _TOKEN.match(self.text, at)
            if match is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                raise self._fail("expected a name, a value or an operator", at)
            sign, *quoted, word = match.groups()
            kind = match.lastindex or 0
            value = next((group for group in (sign, *quoted, word) if group is not None), "")
            tokens.append(_Token(value, match.start(kind), kind > 1, kind in (2, 3)))
            at = match.end()
        return tokens

    def _fail(self, expected: str, at: int | None = None) -> FleetError:
        if at is None:
            there = self._next < len(self._tokens)
            at = self._tokens[self._next].at if there else len(self.text)
        excerpt = repr(self.text[at : at + 20]) if at < len(self.text) else "the end"
        return FleetError(
            f"selector {self.text!r}: {expected} at character {at + 1}, got {excerpt};"
            " an example: class=jetson and site in (lyon, nice) and not beta"
        )

    def _peek(self, *words: str) -> bool:
        if self._next >= len(self._tokens):
            return False
        token = self._tokens[self._next]
        return not token.is_quoted and token.text in words

    def _take(self, *words: str) -> bool:
        word = self._peek(*words)
        self._next += word
        return word

    def _expect(self, word: str) -> None:
        if not self._take(word):
            raise self._fail(f"expected '{word}'")

    def expect_end(self) -> None:
        """Check that no tokens remain."""
        if self._next < len(self._tokens):
            raise self._fail("expected 'and', 'or' or the end")

    def read_any(self, depth: int) -> Test:
        """Parse `A or B`."""
        if depth > _MAX_DEPTH:
            raise self._fail(f"expected at most {_MAX_DEPTH} brackets within each other")
        tests = [self._read_all(depth)]
        while self._take("or"):
            tests.append(self._read_all(depth))
        return tests[0] if len(tests) == 1 else Either(tuple(tests))

    def _read_all(self, depth: int) -> Test:
        tests = [self._read_one(depth)]
        while self._take("and"):
            tests.append(self._read_one(depth))
        return tests[0] if len(tests) == 1 else Every(tuple(tests))

    def _read_one(self, depth: int) -> Test:
        if self._take("not"):
            return Negation(self._read_one(depth + 1) if depth <= _MAX_DEPTH else self.read_any(depth + 1))
        if self._take("("):
            test = self.read_any(depth + 1)
            self._expect(")")
            return test
        if self._take("all"):
            return Everything()
        return self._read_comparison()

    def _read_comparison(self) -> Test:
        name = self._read_word("expected the name of a tag or fact")
        if not self._tokens[self._next - 1].is_quoted and _ORDER.search(name):
            self._next -= 1
            raise self._fail("selectors compare by '=', '!=' and 'in' alone; expected one")
        self.names.add(name)
        if self._take("=", "=="):
            return self._equals(name, (self._read_value(),))
        if self._take("!="):
            return Negation(self._equals(name, (self._read_value(),)))
        if self._peek("not"):
            self._next += 1
            if not self._peek("in"):
                raise self._fail("expected 'in'")
            return Negation(self._read_list(name))
        if self._peek("in"):
            return self._read_list(name)
        return Has(name)

    def _read_list(self, name: str) -> Test:
        self._expect("in")
        self._expect("(")
        values = [self._read_value()]
        while self._take(","):
            values.append(self._read_value())
        self._expect(")")
        return self._equals(name, tuple(values))

    def _equals(self, name: str, patterns: tuple[str, ...]) -> Equals:
        # The first words of a class are enough: `jetson` means `jetson-orin-nano`.
        if name == "class":
            patterns = (*patterns, *(f"{pattern}-*" for pattern in patterns))
        self._patterns += sum(1 for pattern in patterns if set(pattern) & set("*?["))
        if self._patterns > _MAX_PATTERNS:
            raise self._fail(f"expected at most {_MAX_PATTERNS} patterns, or values of 'class',")
        if not all(_is_portable(match) for pattern in patterns for match in SET.finditer(pattern)):
            raise self._fail("expected sets such as [abc], [a-z] or [!abc], without '[' or a first '^',")
        return Equals(name, patterns)

    def _read_value(self) -> str:
        return self._read_word("expected a value (quote one that has spaces)")

    def _read_word(self, expected: str) -> str:
        if self._next >= len(self._tokens):
            raise self._fail(expected)
        token = self._tokens[self._next]
        if not token.is_word or (not token.is_quoted and token.text in _KEYWORDS):
            raise self._fail(expected)
        self._next += 1
        return token.text


def _is_portable(match: "re.Match[str]") -> bool:
    """Return whether a character set means the same in Python, SQLite and PostgreSQL."""
    is_negated, signs = match.groups()
    is_empty = any(first > last for first, last in _RANGE.findall(signs))
    return not is_empty and "[" not in signs and (bool(is_negated) or not signs.startswith("^"))
