"""Parses the JSON of requests, and checks the types of its fields."""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from edgekit_runtime.canonical_json import name_kind
from edgekit_runtime.errors import RequestError
from edgekit_runtime.tensors import MAX_DIMENSION

_MAX_SMALL_BYTES: Final = 64 << 10
_EXPECTED: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "a whole number from 0",
    str: "a string",
    dict: "an object",
    list: "a list",
}

Value = TypeVar("Value")


def load_object(data: bytes, where: str, placeholders: Iterable[object] = ()) -> dict[str, Any]:
    """Parse a JSON object. `where` is the source, for error messages.

    Each `Infinity` in the text is replaced by the next item of `placeholders`. An `Infinity` without an item
    is rejected.

    Raises:
        RequestError: `data` is not an object, JSON or UTF-8, contains NaN, or is nested too deeply.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), parse_constant=functools.partial(_take_place, iter(placeholders))
        )
    except RecursionError as cause:
        raise RequestError(400, f"{where}: the JSON is nested too deeply") from cause
    except ValueError as cause:  # includes UnicodeDecodeError
        raise RequestError(400, f"{where}: not a JSON document in UTF-8: {explain(cause)}") from cause
    if not isinstance(value, dict):
        raise RequestError(400, f"{where}: the JSON is {name_kind(value)}, expected an object")
    return value


def load_small(body: memoryview) -> dict[str, Any]:
    """Parse the JSON object in the body of a small request.

    Raises:
        RequestError: `body` is not a JSON object, or is larger than 64 KiB.
    """
    if len(body) > _MAX_SMALL_BYTES:
        raise RequestError(413, f"the body has {len(body)} bytes, the limit here is {_MAX_SMALL_BYTES}")
    return load_object(bytes(body), "the request")


def take_field(
    fields: Mapping[str, Any], name: str, where: str, kind: type[Value], default: Value | None = None
) -> Value:
    """Return the field `name`, or `default` if it is missing or null.

    `where` is the object, for error messages. `kind` is the exact type of the field. An int must be at least
    0. If `default` is None, the field is required.

    Raises:
        RequestError: The field has another type, or is required and missing.
    """
    value = fields.get(name)
    if value is None:
        value = default
    is_kind = type(value) is kind
    if is_kind and kind is int:
        is_kind = 0 <= value <= MAX_DIMENSION  # type: ignore[operator]  # it is an int
    if not is_kind:
        raise RequestError(400, f"{where}: {name} is {show(value)}, expected {_EXPECTED[kind]}")
    return value  # type: ignore[return-value]  # of that type


def explain(cause: ValueError) -> str:
    """Return the message of a JSON parse error, without Python's advice to raise the digit limit."""
    return str(cause).partition("; use sys.")[0]


def show(value: object) -> str:
    """Return the first 80 characters of `repr(value)`, for a message."""
    try:
        return repr(value)[:80]
    except ValueError:  # Python prints no integers of over 4300 digits
        return "a huge number"


def _take_place(placeholders: Iterator[object], text: str) -> object:
    placeholder = next(placeholders, None) if text == "Infinity" else None
    if placeholder is None:
        raise ValueError(f"{text} is no JSON number")
    return placeholder
