"""Canonical JSON: every value has exactly one encoding, so that signed documents can be compared as bytes.

The encoding is UTF-8, with object keys sorted by code point, and without white space, NaN, infinity or
duplicate keys. Numbers are written as by Python's `json`, so this is not RFC 8785.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, get_args, get_origin

from edgekit_runtime.errors import EdgekitError, ManifestError
from edgekit_runtime.records import dataclass

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

_KINDS: Final = {
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
# Created once, because `json.dumps` creates one per call, which takes as long as a small document.
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def encode_json(value: JsonValue) -> bytes:
    """Return the canonical bytes of `value`.

    Raises:
        ValueError: a number is NaN or infinite, or a string contains a lone surrogate.
        TypeError: a value is not of a JSON type.
        RecursionError: the value is nested deeper than the interpreter allows.
    """
    return _encode(value).encode("utf-8")


def decode_json(data: bytes, where: str, error: type[EdgekitError]) -> dict[str, Any]:
    """Return the JSON object in `data`, which must be in canonical form.

    Args:
        data: the document. The caller has limited its size.
        where: start of the error message, such as `manifest.json`.
        error: class of the exception to raise.

    Raises:
        error: the document is not UTF-8, not JSON, not an object, too deeply nested, or not canonical.
    """
    try:
        value = json.loads(data.decode("utf-8"))
        again = encode_json(value)
    except RecursionError as cause:
        raise error(f"{where}: nested too deeply for a document of this kind") from cause
    except ValueError as cause:  # includes UnicodeDecodeError and json.JSONDecodeError
        raise error(f"{where}: not a JSON document in UTF-8 with finite numbers: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{where}: is {name_kind(value)}, expected an object")
    if again != data:
        # Catches white space, key order, duplicate keys and escapes alike: all of them are free bytes in
        # which a change would go unseen.
        raise error(
            f"{where}: not canonical JSON (sorted keys, no white space, no duplicates); write it again"
        )
    return value


def name_kind(value: object) -> str:
    """Return JSON's name for the type of a value, such as `an object` for a dict, for error messages."""
    if isinstance(value, Mapping):
        return "an object"
    return _KINDS.get(type(value), "a list")  # also one that is still text, see `json_tensors`


class Fields:
    """The members of a JSON object that have not been read yet."""

    __slots__ = ("_error", "_unread", "where")

    def __init__(self, value: object, where: str, error: type[EdgekitError]) -> None:
        if not isinstance(value, dict):
            raise error(f"{where}: is {name_kind(value)}, expected an object")
        self._unread: dict[str, Any] = dict(value)
        self._error = error
        self.where = where

    def take(self, key: str) -> Any:
        """Return and remove the member `key`. Its type is not checked here.

        Raises:
            EdgekitError: the member is missing. The class of the error is set in the constructor.
        """
        try:
            return self._unread.pop(key)
        except KeyError:
            raise self._error(f"{self.where}: field '{key}' is missing") from None

    def take_optional(self, key: str, default: JsonValue) -> Any:
        """Return and remove the member `key`, or return `default` if it is missing."""
        return self._unread.pop(key, default)

    def take_list(self, key: str) -> list[Any]:
        """Return and remove the member `key`, which must be a list.

        Raises:
            EdgekitError: the member is missing or not a list. The constructor sets the class of the error.
        """
        value: list[Any] = self.take(key)
        self.check_list(key, value)
        return value

    def check_list(self, key: str, value: object, most: int | None = None) -> None:
        """Check that the value of the member `key` is a list of at most `most` items. None means no maximum.

        Raises:
            EdgekitError: the check fails. The class of the error is set in the constructor.
        """
        if not isinstance(value, list):
            raise self._error(f"{self.where}: field '{key}' is {name_kind(value)}, expected a list")
        if most is not None and len(value) > most:
            raise self._error(f"{self.where}: {key} holds {len(value)}, expected at most {most}")

    def rest(self) -> dict[str, Any]:
        return self._unread


# Metadata of a field of a `Record`, whose member is omitted if it has its default.
OPTIONAL: Final[Mapping[str, Any]] = {"optional": True}

_Record = TypeVar("_Record", bound="Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of frozen dataclasses for the objects of signed documents. Each field is a member of the object.

    The metadata of a field may contain `key` (the name of the member), `optional`, `most` (the maximum length
    of a list), and `read` (a function like `from_json` for the member, or for each item if it is a list).
    Each dataclass checks its types and values itself.

    Attributes:
        extra: the unknown members. They are kept, so that `to_json` writes them again.
    """

    extra: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict, hash=False)

    @classmethod
    def from_json(
        cls: type[_Record], value: object, where: str = "", error: type[EdgekitError] = ManifestError
    ) -> _Record:
        """Return the record for a parsed JSON object.

        `where` is the start of the error messages, by default the name of the class.

        Raises:
            error: a member is missing or wrong.
        """
        where = where or cls.__name__
        fields = Fields(value, where, error)
        prefix = f"{where}." if ": " in where else f"{where}: "
        values: dict[str, Any] = {}
        for field, read, is_list in _list_members(cls):  # type: ignore[arg-type]  # classes can be hashed
            key = field.metadata.get("key", field.name)
            default: Any = field.default
            raw = fields.take_optional(key, default) if "optional" in field.metadata else fields.take(key)
            if raw is not default and is_list:
                fields.check_list(key, raw, field.metadata.get("most"))
                raw = tuple(read(item, f"{prefix}{key}[{at}]", error) for at, item in enumerate(raw))
            elif raw is not default:
                raw = read(raw, f"{prefix}{key}", error)
            values[field.name] = raw
        values["extra"] = fields.rest()
        return cls(**values)

    def to_json(self) -> dict[str, JsonValue]:
        document = dict(self.extra)
        for field, _, _ in _list_members(type(self)):  # type: ignore[arg-type]  # as above
            value = getattr(self, field.name)
            if "optional" not in field.metadata or value != field.default:
                document[field.metadata.get("key", field.name)] = _write(value)
        return document


@functools.cache
def _list_members(
    record: type[Record],
) -> tuple[tuple[dataclasses.Field[Any], Callable[[Any, str, type[EdgekitError]], Any], bool], ...]:
    """Return the fields except `extra`: for each its reader, and whether it holds several values."""
    members = []
    for field in dataclasses.fields(record):
        parts = (field.type, *get_args(field.type))  # of `Golden`, `Codes | None` or `tuple[Variant, ...]`
        classes = [part for part in parts if get_origin(part) is None and isinstance(part, type)]
        kind = next((cls for cls in classes if issubclass(cls, Record)), None)
        read = field.metadata.get("read", _keep if kind is None else kind.from_json)
        members.append((field, read, any(get_origin(part) is tuple for part in parts)))
    return tuple(member for member in members if member[0].name != "extra")


def _keep(value: Any, _where: str, _error: type[EdgekitError]) -> Any:
    return value


def _write(value: Any) -> JsonValue:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, tuple):
        return [_write(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
