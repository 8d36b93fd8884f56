"""Converts dataclasses to plain values for JSON or TOML and back, and checks each value.

The accepted values of a field follow from its type, and from its `Range` or the unit in its name. A dataclass
checks all other rules itself, for example rules for several fields.
"""

import dataclasses
import functools
import json
import types
from collections.abc import Mapping
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from edgekit_runtime.canonical_json import name_kind
from edgekit_runtime.errors import ConfigError, EdgekitError
from edgekit_runtime.records import dataclass

_TYPE_NAMES: Final = {
    (bool, False): "true or false",
    (int, False): "a whole number",
    (float, False): "a number",
    (str, False): "a string",
    (str, True): "a list of strings",
    (int, True): "a list of whole numbers",
}
_VALUES: Final = {bool: "true, false", int: "whole number", float: "number", str: "text"}
_MAX_SHOWN: Final = 60  # characters of a wrong value

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Range:
    """The range of numbers that a field accepts. A field declares it as `Annotated[int, Range(1, 64)]`.

    Attributes:
        least, most: bounds, both included.
    """

    least: float
    most: float

    def __contains__(self, value: float) -> bool:
        """Whether `value` lies within; NaN does not, nor does an integer that no float can hold."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:.16g} to {self.most:.16g}"


Count: TypeAlias = Annotated[int, Range(1, (1 << 31) - 1)]
PositiveBytes: TypeAlias = Annotated[int, Range(1, 1 << 50)]
PositiveSeconds: TypeAlias = Annotated[float, Range(0.001, 10**9)]

# By the first suffix that matches. Sensible values depend on device and model, so the ranges are wide.
# Clocks, timers and the system's own integers accept them.
_RANGES_OF_UNITS: Final = {
    "_per_s": Range(0, 1 << 50),
    "_s": Range(0, 10**9),
    "_ms": Range(0, 10**9),
    "_hours": Range(0, 10**6),
    "_bytes": Range(0, 1 << 50),
    "_at": Range(0, 10**11),  # seconds since 1970
    "_w": Range(0, 10**6),
    "_c": Range(-273, 10**4),
}
_RANGE_OF_REST: Final = Range(0, (1 << 31) - 1)  # counts and shares


def to_plain(record: Any) -> Any:
    """Return a dataclass as a dict of plain values. Sequences become lists.

    `record` and its fields may be None, bool, int, float, str, list, tuple, mapping or dataclass.

    Raises:
        TypeError: a value is of another type.
    """
    if record is None or isinstance(record, (bool, int, float, str)):
        return record
    if isinstance(record, (list, tuple)):
        return [to_plain(value) for value in record]
    if dataclasses.is_dataclass(record):
        return {name: to_plain(getattr(record, name)) for name in _list_fields(record.__class__)[0]}
    if isinstance(record, Mapping):
        return {name: to_plain(value) for name, value in record.items()}
    raise TypeError(f"{type(record).__name__} is not plain")


def from_plain(
    kind: type[Record], plain: object, where: str = "", error: type[EdgekitError] = ConfigError
) -> Record:
    """Return an instance of `kind` with the values of a TOML table or JSON object, and defaults for the rest.

    Args:
        kind: dataclass with fields of the types bool, int, float, str, literal, dataclass, tuple or mapping,
            which may allow None. Numbers may have a `Range` in `Annotated`.
        plain: the table or object.
        where: name of `plain` in error messages.
        error: class of the exception to raise.

    Raises:
        error: a field is unknown, of a wrong type or out of its range, or `kind` refuses a value.
    """
    prefix = f"{where}: " if where else ""
    if not isinstance(plain, dict):
        raise error(f"{prefix}expected a table, got {name_kind(plain)}")
    shapes = _read_shapes(kind)  # type: ignore[arg-type]  # classes can be hashed
    values = {}
    for name, value in plain.items():
        if name not in shapes:
            raise error(f"{prefix}unknown setting '{name}', known are {', '.join(sorted(shapes))}")
        values[name] = _read_value(shapes[name], value, (where, name), error)
    for name in _list_fields(kind)[1]:  # type: ignore[arg-type]
        if name not in values:
            raise error(f"{prefix}'{name}' is missing")
    try:
        return kind(**values)
    except error as cause:  # it names the field
        raise error(f"{where}.{cause}" if where else str(cause)) from cause
    except ValueError as cause:
        raise error(f"{prefix}{cause}") from cause


def from_json(
    kind: type[Record],
    data: bytes | str,
    where: str,
    error: type[EdgekitError] = ConfigError,
    *,
    hint: str = "",
) -> Record:
    """Return an instance of `kind` from a JSON document, see `from_plain`.

    `hint` is advice to add to the error message if the document is not JSON.
    """
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise error(f"{where}: is no JSON: {cause}{'; ' * bool(hint)}{hint}") from cause
    return from_plain(kind, plain, where, error)


def keep_known(kind: type[Any], plain: object) -> object:
    """Return parsed JSON without the fields that `kind` does not have, at any depth.

    Newer releases may write such fields.
    """
    if not isinstance(plain, dict):
        return plain
    shapes = _read_shapes(kind)  # type: ignore[arg-type]
    return {name: _keep_known_in(shapes[name], value) for name, value in plain.items() if name in shapes}


def _keep_known_in(shape: "_Shape", value: Any) -> Any:
    if shape.form == "record":
        return keep_known(shape.kind, value)
    if shape.form == "list" and isinstance(value, list):
        return [_keep_known_in(shape.members[0], item) for item in value]
    if shape.form == "mapping" and isinstance(value, dict):
        return {key: _keep_known_in(shape.members[0], item) for key, item in value.items()}
    return value


@functools.cache
def _list_fields(kind: type[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of all fields, and the names of the required ones."""
    fields = dataclasses.fields(kind)
    # Both are MISSING where there is no default.
    needed = [field.name for field in fields if field.init and field.default is field.default_factory]
    return tuple(field.name for field in fields), tuple(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What the annotation of a field says.

    Attributes:
        form: `any` JSON value, a dataclass (`record`), a `mapping` of one kind, a list of `fixed` length, a
            `list` of what is not a plain value, or a plain `value` or list of them.
        kind: the dataclass, or the type of each value.
        members: of a list of fixed length; one for all of another list or a mapping.
        is_optional: whether None is accepted.
        is_list, allowed, choices: see `_find_fault`.
    """

    form: Literal["any", "record", "mapping", "fixed", "list", "value"]
    kind: Any = None
    members: tuple["_Shape", ...] = ()
    is_optional: bool = False
    is_list: bool = False
    allowed: Range | None = None
    choices: tuple[str, ...] = ()


@functools.cache
def _read_shapes(kind: type[Any]) -> dict[str, _Shape]:
    """Return the shape of each field, cached by class: hashing an annotation takes longer than a check."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _read_shape(hint, range_of_unit(name)) for name, hint in hints.items()}


def _read_shape(hint: Any, allowed: Range | None = None) -> _Shape:
    """Return the shape that an annotation states; `allowed`: range of numbers without a stated one."""
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        if len(members) > 1:
            return _Shape(form="any")
        return dataclasses.replace(_read_shape(members[0], allowed), is_optional=True)
    inner = get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _Shape(form="record", kind=hint)
    if get_origin(hint) is Mapping:
        return _Shape(form="mapping", members=(_read_shape(inner[1]),))
    is_list = get_origin(hint) is tuple
    if is_list and inner[-1] is not Ellipsis:
        return _Shape(form="fixed", members=tuple(map(_read_shape, inner)))
    kind, choices = (inner[0] if is_list else hint), ()
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    if (kind, is_list) not in _TYPE_NAMES:
        if not is_list:
            return _Shape(form="any")
        return _Shape(form="list", members=(_read_shape(kind),))
    return _Shape(form="value", kind=kind, is_list=is_list, allowed=allowed, choices=choices)


def _read_value(shape: _Shape, value: Any, location: tuple[str, str], error: type[EdgekitError]) -> Any:
    if shape.form == "any" or (value is None and shape.is_optional):
        return value
    if shape.form == "value":
        return _read_plain(shape, value, location, error)
    where, name = location
    path = f"{where}.{name}" if where else name
    if shape.form == "record":
        return value if isinstance(value, shape.kind) else from_plain(shape.kind, value, path, error)
    if shape.form == "mapping":
        if not isinstance(value, dict):
            raise error(f"{path}: expected a table, got {name_kind(value)}")
        (member,) = shape.members
        return {key: _read_value(member, item, (path, key), error) for key, item in value.items()}
    if shape.form == "fixed":
        if not isinstance(value, list) or len(value) != len(shape.members):
            raise error(f"{path}: expected a list of {len(shape.members)} values")
        return tuple(
            _read_value(member, item, location, error)
            for member, item in zip(shape.members, value, strict=True)
        )
    if not isinstance(value, list):
        raise error(f"{path}: expected a list, got {name_kind(value)}")
    (member,) = shape.members
    return tuple(
        _read_value(member, item, (where, f"{name}[{number}]"), error) for number, item in enumerate(value)
    )


def _read_plain(shape: _Shape, value: Any, location: tuple[str, str], error: type[EdgekitError]) -> Any:
    where, name = location
    if type(value) is shape.kind and not shape.is_list:  # most values of documents
        if shape.kind is str:
            fits = value in shape.choices if shape.choices else "\0" not in value
        else:
            fits = shape.kind is bool or value in (shape.allowed or range_of_unit(name))
        if fits:
            return value
    allowed = shape.allowed or range_of_unit(name)
    expected = _find_fault(value, shape.kind, shape.is_list, allowed, shape.choices)
    if expected is not None:
        excerpt = repr(value)
        excerpt = excerpt if len(excerpt) <= _MAX_SHOWN else f"{excerpt[:_MAX_SHOWN]}..."
        raise error(f"{where}{': ' * bool(where)}{name} is {excerpt}, expected {expected}")
    return tuple(value) if shape.is_list else value


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
        isinstance(item, types_of_kind) and isinstance(item, bool) == (kind is bool) for item in values
    ):
        return _TYPE_NAMES[kind, is_list]
    if kind in (int, float) and not all(item in allowed for item in values):
        return str(allowed)
    if choices and not set(values) <= set(choices):
        return f"one of {', '.join(choices)}"
    if kind is str and any("\0" in item for item in values):  # the system takes no such path
        return "a string without NUL"
    return None


@functools.lru_cache(1024)  # a document may have any names
def range_of_unit(name: str) -> Range:
    """Return the default range for the unit at the end of `name`, or 0 to 2^31 - 1 without a unit."""
    return next((bounds for unit, bounds in _RANGES_OF_UNITS.items() if name.endswith(unit)), _RANGE_OF_REST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A field of a dataclass, for command lines and documents.

    Attributes:
        kind: type of the field, or of its items: bool, int, float or str.
        is_list: whether the field is a list.
        default: default value, or `dataclasses.MISSING` if the field has none or has a factory.
        values: allowed values as text, such as `1 to 64`.
        meaning: text of the field in the docstring of the dataclass.
    """

    name: str
    kind: type
    is_list: bool
    is_needed: bool
    default: Any
    values: str
    meaning: str

    @property
    def flag(self) -> str:
        """The command-line option, such as `--min-score`, or `--sink` for one item of the list `sinks`."""
        return "--" + (self.name.removesuffix("s") if self.is_list else self.name).replace("_", "-")

    @property
    def help(self) -> str:
        return f"{self.meaning} ({self.values})" if self.kind in (int, float) else self.meaning


def list_settings(kind: type[Any]) -> list[Setting]:
    """Return the settings of a dataclass whose fields are plain values or lists of plain values."""
    shapes, meanings = _read_shapes(kind), describe_fields(kind)  # type: ignore[arg-type]
    _, needed = _list_fields(kind)  # type: ignore[arg-type]
    settings = []
    for field in dataclasses.fields(kind):
        shape = shapes[field.name]
        is_list = shape.is_list or shape.form in ("list", "fixed")
        shape = shape.members[0] if shape.members else shape
        values = ", ".join(f"`{choice}`" for choice in shape.choices) or _VALUES[shape.kind]
        if shape.allowed is not None and shape.kind in (int, float):
            values = str(shape.allowed)
        settings.append(
            Setting(
                name=field.name,
                kind=shape.kind,
                is_list=is_list,
                is_needed=field.name in needed,
                default=field.default,
                values=f"list of {_VALUES[shape.kind]}s" if is_list else values,
                meaning=meanings.get(field.name, ""),
            )
        )
    return settings


def describe_fields(kind: type[Any]) -> dict[str, str]:
    """Return a dict from field to its text in the docstring of `kind` or its base class.

    Fields that share one entry have the same text.
    """
    import inspect
    import re

    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].split("\n\n")[0]
    texts = describe_fields(kind.__base__) if kind.__base__ is not None else {}
    for entry in re.split(r"\n    (?! )", "\n" + section):
        names, colon, text = entry.partition(": ")
        if colon:
            texts |= dict.fromkeys(map(str.strip, names.split(",")), " ".join(text.split()))
    return texts
