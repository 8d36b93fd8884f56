"""Dataclasses as plain values that JSON or TOML can hold, and back, with each value checked.

What holds for one value is checked by the type, the unit in the name, or the `Range` of its field, so that no
dataclass forgets it. A dataclass itself checks what is narrower, and what depends on several fields.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from edgekit_runtime.errors import ConfigError, EdgekitError

_TYPE_NAMES: Final = {
    (bool, False): "true or false",
    (int, False): "a whole number",
    (float, False): "a number",
    (str, False): "a string",
    (str, True): "a list of strings",
    (int, True): "a list of whole numbers",
}
_MAX_SHOWN: Final = 60  # characters of a wrong value

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field accepts; a field declares it as `Annotated[int, Range(1, 64)]`.

    Attributes:
        least, most: themselves allowed.
    """

    least: float
    most: float

    def __contains__(self, value: float) -> bool:
        """Whether `value` lies within; NaN does not, nor does an integer that no float can hold."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        """Return `1 to 64`, for messages."""
        return f"{self.least:.16g} to {self.most:.16g}"


# By how names end, the first that fits. Wide: what is sensible depends on device and model. Narrow enough for
# clocks, timers and the system's own integers to take.
_RANGES_OF_UNITS: Final = {
    "_per_s": Range(0, 1 << 50),
    "_s": Range(0, 10**9),
    "_ms": Range(0, 10**9),
    "_hours": Range(0, 10**6),
    "_bytes": Range(0, 1 << 50),
    "_w": Range(0, 10**6),
    "_c": Range(-273, 10**4),
}
_RANGE_OF_REST: Final = Range(0, (1 << 31) - 1)  # counts and shares


def to_plain(record: Any) -> Any:
    """Return the dataclass `record`, whose fields are plain, sequences, mappings or such dataclasses."""
    if dataclasses.is_dataclass(record):
        return {field.name: to_plain(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {name: to_plain(value) for name, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_plain(value) for value in record]
    if record is None or isinstance(record, (bool, int, float, str)):
        return record
    raise TypeError(f"{type(record).__name__} is not plain")


def from_plain(
    kind: type[Record], plain: object, where: str = "", error: type[EdgekitError] = ConfigError
) -> Record:
    """Return the dataclass `kind` with the values of a TOML table or JSON object; others have their default.

    Args:
        kind: its fields are of the types bool, int, float, str and literals, those with None, dataclasses,
            tuples of them, or mappings; numbers may have a `Range` in `Annotated`.
        plain: parsed.
        where: its name, for messages.
        error: the class to raise.

    Raises:
        error: a field is unknown, of a wrong type or out of its range, or `kind` refuses a value.
    """
    prefix = f"{where}: " if where else ""
    if not isinstance(plain, dict):
        raise error(f"{prefix}expected a table, got {type(plain).__name__}")
    hints = _read_hints(kind)  # type: ignore[arg-type]  # classes can be hashed
    values = {}
    for name, value in plain.items():
        if name not in hints:
            raise error(f"{prefix}unknown setting '{name}', known are {', '.join(sorted(hints))}")
        values[name] = _read_value(hints[name], value, (where, name), error)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        has_default = field.default is not field.default_factory  # both are MISSING where there is none
        if field.init and field.name not in values and not has_default:
            raise error(f"{prefix}'{field.name}' is missing")
    try:
        return kind(**values)
    except error as cause:  # it names the field
        raise error(f"{where}.{cause}" if where else str(cause)) from cause
    except ValueError as cause:
        raise error(f"{prefix}{cause}") from cause


@functools.cache
def _read_hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read_value(hint: Any, value: Any, place: tuple[str, str], error: type[EdgekitError]) -> Any:
    where, name = place
    allowed = None
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        members = [each for each in get_args(hint) if each is not type(None)]
        if len(members) > 1 or (value is None and len(members) < len(get_args(hint))):
            return value  # any JSON value, or None
        hint = members[0]
    inner = get_args(hint)
    path = f"{where}.{name}" if where else name
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_plain(hint, value, path, error)
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise error(f"{path}: expected a table, got {type(value).__name__}")
        return {key: _read_value(inner[1], each, (path, key), error) for key, each in value.items()}
    is_list = get_origin(hint) is tuple
    if is_list and inner[-1] is not Ellipsis:
        if not isinstance(value, list) or len(value) != len(inner):
            raise error(f"{path}: expected a list of {len(inner)} values")
        return tuple(
            _read_value(member, each, place, error) for member, each in zip(inner, value, strict=True)
        )
    kind, choices = (inner[0] if is_list else hint), ()
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    if (kind, is_list) not in _TYPE_NAMES:
        if is_list:
            if not isinstance(value, list):
                raise error(f"{path}: expected a list, got {type(value).__name__}")
            return tuple(
                _read_value(kind, each, (where, f"{name}[{number}]"), error)
                for number, each in enumerate(value)
            )
        return value
    expected = _find_fault(value, kind, is_list, allowed or _range_of_unit(name), choices)
    if expected is not None:
        shown = repr(value)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
        raise error(f"{where}{': ' * bool(where)}{name} is {shown}, expected {expected}")
    return tuple(value) if is_list else value


def _find_fault(
    value: Any, kind: type, is_list: bool, allowed: Range, choices: tuple[str, ...]
) -> str | None:
    """Return what was expected instead of `value`, or None if it is right.

    Args:
        value: of a field.
        kind: type of a value, or of each in a list.
        is_list: whether it must be a list.
        allowed: range of numbers.
        choices: all that a string may be, or empty where it may be any.
    """
    values = value if isinstance(value, list) and is_list else [value]
    types_of_kind = (int, float) if kind is float else (kind,)
    if isinstance(value, list) != is_list or not all(
        isinstance(each, types_of_kind) and isinstance(each, bool) == (kind is bool) for each in values
    ):
        return _TYPE_NAMES[kind, is_list]
    if kind in (int, float) and not all(each in allowed for each in values):
        return str(allowed)
    if choices and not set(values) <= set(choices):
        return f"one of {', '.join(choices)}"
    if kind is str and any("\0" in each for each in values):  # the system takes no such path
        return "a string without NUL"
    return None


def _range_of_unit(name: str) -> Range:
    """Return the range of a field that declares none."""
    return next((found for unit, found in _RANGES_OF_UNITS.items() if name.endswith(unit)), _RANGE_OF_REST)
