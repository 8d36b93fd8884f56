"""Tables of a TOML file as dataclasses; errors speak of them in the file's words."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from edgekit_runtime.errors import ConfigError, ManifestError

_TYPE_NAMES: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "tuple[str, ...]": "a list of strings",
    "tuple[int, ...]": "a list of whole numbers",
}

Section = TypeVar("Section")


def read_section(kind: type[Section], table: Mapping[str, Any], where: str) -> Section:
    """Return the dataclass `kind` with the values of a TOML table; what is missing has its default.

    Args:
        kind: its fields are of the types bool, int, float and str, those with None, or tuples of them.
        table: parsed.
        where: its name, for messages.

    Raises:
        ConfigError: a field is unknown or of a wrong type, or `kind` refuses a value.
    """
    # A type, or a union with None, which TOML cannot state.
    known = {known.name: _name_kind(known.type) for known in fields(kind)}  # type: ignore[arg-type]
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown setting '{name}', known are {', '.join(sorted(known))}")
        if not _is_of(value, known[name]):
            raise ConfigError(f"{where}: {name} is {value!r}, expected {_TYPE_NAMES[known[name]]}")
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


def _name_kind(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation).split(" ")[0]
    return str(annotation) if str(annotation).startswith("tuple") else text


def _is_of(value: object, kind: str) -> bool:
    if kind.startswith("tuple"):
        inner = kind.removeprefix("tuple[").split(",")[0]
        return isinstance(value, list) and all(_is_of(item, inner) for item in value)
    if isinstance(value, bool):
        return kind == "bool"
    return isinstance(
        value, (int, float) if kind == "float" else {"bool": bool, "int": int, "str": str}[kind]
    )
