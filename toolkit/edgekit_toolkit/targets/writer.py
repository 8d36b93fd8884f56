"""Writes a target to a file that `loader` can read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.system.atomic_files import write_text_atomically
from edgekit_toolkit.targets.loader import SCHEMA
from edgekit_toolkit.targets.spec import Target


def write_target(path: Path, target: Target) -> None:
    """Write a target to a TOML file. Its folder is created, and an existing file is replaced atomically.

    Raises:
        OutputError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"schema = {SCHEMA}", *_lines(to_plain(target), "")]
    write_text_atomically(path, "\n".join(lines) + "\n")


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Return the lines of a table: its values first, since they would belong to a table above them."""
    tables = {key: value for key, value in table.items() if _is_table(value)}
    for key, value in table.items():
        if value is not None and key not in tables:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tables.items():
        name = f"{path}.{_key(key)}" if path else _key(key)
        for entry in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            yield from _lines(entry, name)


def _is_table(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict)
    return isinstance(value, dict) and "unit" not in value


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(member)}" for key, member in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
