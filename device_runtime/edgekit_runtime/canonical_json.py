"""Canonical JSON: one byte form per value, so that signed documents can be compared byte for byte.

UTF-8, object keys sorted by code point, no white space, no NaN or infinity, no duplicate keys; numbers as
Python's `json` writes them. It does not implement RFC 8785 (its number form differs).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from edgekit_runtime.errors import EdgekitError

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"


def encode_json(value: JsonValue) -> bytes:
    """Return the canonical bytes of `value`.

    Raises:
        ValueError: a number is NaN or infinite, or a string holds a lone surrogate.
        TypeError: a value is not of a JSON type.
        RecursionError: the value is nested deeper than the interpreter allows.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def decode_json(data: bytes, where: str, error: type[EdgekitError]) -> dict[str, Any]:
    """Return the JSON object in `data`, which must be in canonical form.

    Args:
        data: the document; the caller has bounded its size.
        where: what the error message starts with, such as `manifest.json`.
        error: the class to raise.

    Raises:
        error: not UTF-8, not JSON, not an object, too deeply nested, or not canonical.
    """
    try:
        value = json.loads(data.decode("utf-8"))
        again = encode_json(value)
    except RecursionError as cause:
        raise error(f"{where}: nested too deeply for a document of this kind") from cause
    except ValueError as cause:  # includes UnicodeDecodeError and json.JSONDecodeError
        raise error(f"{where}: not a JSON document in UTF-8 with finite numbers: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{where}: is a JSON {type(value).__name__}, expected an object")
    if again != data:
        # Catches white space, key order, duplicate keys and escapes alike: all of them are free bytes in
        # which a change would go unseen.
        raise error(
            f"{where}: not canonical JSON (sorted keys, no white space, no duplicates); write it again"
        )
    return value


class Fields:
    """The members of one JSON object: the known ones are taken out, the rest is kept as `extra`."""

    __slots__ = ("_error", "_left", "where")

    def __init__(self, value: object, where: str, error: type[EdgekitError]) -> None:
        if not isinstance(value, dict):
            raise error(f"{where}: is {type(value).__name__}, expected an object")
        self._left: dict[str, Any] = dict(value)
        self._error = error
        self.where = where

    def take(self, key: str) -> Any:
        """Return and remove the member `key`; its type is checked by the dataclass that receives it.

        Raises:
            EdgekitError: of the class given to the constructor, when the member is missing.
        """
        try:
            return self._left.pop(key)
        except KeyError:
            raise self._error(f"{self.where}: field '{key}' is missing") from None

    def take_optional(self, key: str, default: JsonValue) -> Any:
        """Return and remove the member `key`, or return `default` where it is missing."""
        return self._left.pop(key, default)

    def take_list(self, key: str) -> list[Any]:
        """Return and remove the member `key`, which must be a list.

        Raises:
            EdgekitError: of the class given to the constructor, when it is missing or no list.
        """
        value = self.take(key)
        if not isinstance(value, list):
            raise self._error(f"{self.where}: field '{key}' is {type(value).__name__}, expected a list")
        return value

    def rest(self) -> dict[str, Any]:
        """Return the members that were not taken."""
        return self._left
