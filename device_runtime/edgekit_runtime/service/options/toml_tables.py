"""Tables of a TOML file as dataclasses; errors speak of them in the file's words.

What holds for one value is checked here, by the type and range of its field, so that no dataclass forgets it.
A dataclass checks what is narrower, and what depends on several fields.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from edgekit_runtime.errors import ConfigError, ManifestError

_TYPE_NAMES: Final = {
    (bool, False): "true or false",
    (int, False): "a whole number",
    (float, False): "a number",
    (str, False): "a string",
    (str, True): "a list of strings",
    (int, True): "a list of whole numbers",
}
_MAX_SHOWN: Final = 60  # characters of a wrong value

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be; a field declares it as `Annotated[int, Range(1, 64)]`.

    Attributes:
        least, most: themselves allowed.
    """

    least: float
    most: float

    def __contains__(self, value: float) -> bool:
        """Whether `value` lies within; NaN does not, nor does an integer that no float can hold."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        """Return it for people."""
        return f"{self.least:.16g} to {self.most:.16g}"


# By how names end, the first that fits. Wide: what is sensible depends on device and model. Narrow enough for
# clocks, timers and the system's own integers to take.
_OF_UNITS: Final = {
    "_per_s": Range(0, 1 << 50),
    "_s": Range(0, 10**9),
    "_ms": Range(0, 10**9),
    "_hours": Range(0, 10**6),
    "_bytes": Range(0, 1 << 50),
    "_w": Range(0, 10**6),
    "_c": Range(-273, 10**4),
}
_OF_REST: Final = Range(0, (1 << 31) - 1)  # counts and shares


def _range_of_unit(name: str) -> Range:
    """Return what a setting may be whose field declares no range."""
    return next((found for unit, found in _OF_UNITS.items() if name.endswith(unit)), _OF_REST)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the values of a field are.

    Attributes:
        type: of a value, or of each in a list.
        is_list: whether it is one.
        range: of numbers.
        choices: all that a string may be, or empty where it may be any.
    """

    type: type
    is_list: bool
    range: Range
    choices: tuple[str, ...]

    def find_fault(self, value: Any) -> str | None:
        """Return what is expected in the place of `value`, or None where it is right."""
        values = value if isinstance(value, list) and self.is_list else [value]
        if isinstance(value, list) != self.is_list or not all(map(self._is_of_type, values)):
            return _TYPE_NAMES[self.type, self.is_list]
        if self.type in (int, float) and not all(each in self.range for each in values):
            return str(self.range)
        if self.choices and value not in self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.type is str and any("\0" in each for each in values):  # the system takes no such path
            return "a string without NUL"
        return None

    def _is_of_type(self, value: object) -> bool:
        allowed = (int, float) if self.type is float else (self.type,)
        return isinstance(value, allowed) and isinstance(value, bool) == (self.type is bool)


def read_section(kind: type[Section], table: Mapping[str, Any], where: str) -> Section:
    """Return the dataclass `kind` with the values of a TOML table; what is missing has its default.

    Args:
        kind: its fields are of the types bool, int, float, str and literals, those with None, or tuples of
            them; numbers may have a `Range` in `Annotated`.
        table: parsed.
        where: its name, for messages.

    Raises:
        ConfigError: a field is unknown, of a wrong type or out of its range, or `kind` refuses a value.
    """
    known = list_settings(kind)
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown setting '{name}', known are {', '.join(sorted(known))}")
        if (expected := known[name].find_fault(value)) is not None:
            shown = repr(value)
            shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
            raise ConfigError(f"{where}: {name} is {shown}, expected {expected}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    try:
        return kind(**values)
    except (ValueError, ManifestError) as cause:
        raise ConfigError(f"{where}: {cause}") from cause


def take_table(document: dict[str, Any], name: str, where: str = "") -> dict[str, Any]:
    """Take a table out of another, and return it; an empty one where it is not there.

    Raises:
        ConfigError: it is something else.
    """
    table = document.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"{where}{'.' if where else ''}{name}: expected a table, got {type(table).__name__}"
        )
    return table


def list_settings(kind: type[Any]) -> dict[str, _Kind]:
    """Return what the values of each field of a dataclass are."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _read_kind(name, hint) for name, hint in hints.items()}


def _read_kind(name: str, hint: Any) -> _Kind:
    declared = _range_of_unit(name)
    if get_origin(hint) is Annotated:
        hint, declared = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):  # with None, which TOML cannot state
        hint = next(each for each in get_args(hint) if each is not type(None))
    is_list = get_origin(hint) is tuple
    if is_list:
        hint = get_args(hint)[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    return _Kind(str if choices else hint, is_list, declared, choices)
