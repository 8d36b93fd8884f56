"""Dataclasses of settings as values that JSON can hold, and back: for a process that is to have the same."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")


def to_plain(settings: Any) -> Any:
    """Return the dataclass `settings`, whose fields are plain, sequences, mappings or such dataclasses."""
    if dataclasses.is_dataclass(settings):
        return {field.name: to_plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    if isinstance(settings, Mapping):
        return {name: to_plain(value) for name, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [to_plain(value) for value in settings]
    if settings is None or isinstance(settings, (bool, int, float, str)):
        return settings
    raise TypeError(f"{type(settings).__name__} is not plain")


def from_plain(kind: type[Settings], plain: Any) -> Settings:
    """Return the dataclass `kind` that `to_plain` described."""
    hints = get_type_hints(kind)
    made: Settings = kind(**{name: _from_plain(hints[name], value) for name, value in plain.items()})
    return made


def _from_plain(hint: Any, value: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        given = [each for each in inner if each is not type(None)]
        return None if value is None else _from_plain(given[0], value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value)
    if origin is tuple:
        return tuple(_from_plain(inner[0], each) for each in value)
    if isinstance(value, dict) and inner:
        return {name: _from_plain(inner[1], each) for name, each in value.items()}
    return value
