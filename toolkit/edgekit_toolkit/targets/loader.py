"""Finds and reads target files in TOML. Errors name the file, the field, and the expected and actual value.

Our own files are beside this module. The user's files are in `find_user_targets()`, or at any given path.
They replace our own files of the same name.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import EdgekitError, TargetError
from edgekit_runtime.system.paths import find_config_folder
from edgekit_toolkit.targets.spec import NAME_PATTERN, Target

# tomllib came with Python 3.11; tomli is the same parser for 3.10 (JetPack 6).
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

_OURS = Path(__file__).parent
SCHEMA = 1


def find_user_targets() -> Path:
    """Return the folder for target files in the user's configuration. It may be missing."""
    return find_config_folder() / "targets"


def load_target(name_or_path: str, extra_dirs: Sequence[Path] = ()) -> Target:
    """Find a target by its name, or read it from a file.

    Args:
        name_or_path: The name or alias of a target, or the path of a target file. A path contains a separator
            or ends in `.toml`.
        extra_dirs: Folders to search before edgekit's own targets. Missing folders are skipped.

    Raises:
        TargetError: The target or file does not exist, or the file is malformed.
    """
    if name_or_path.endswith(".toml") or os.sep in name_or_path or "/" in name_or_path:
        return read_target(Path(name_or_path))
    if NAME_PATTERN.fullmatch(name_or_path):
        for folder in (*extra_dirs, _OURS):
            if (folder / f"{name_or_path}.toml").is_file():
                return _read_named(folder / f"{name_or_path}.toml")
    targets = list_targets(extra_dirs)
    for target in targets:
        if name_or_path in target.aliases:
            return target
    names = [name for target in targets for name in (target.name, *target.aliases)]
    near = difflib.get_close_matches(name_or_path.lower(), names, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise TargetError(
        f"no target {name_or_path!r}; {hint}expected one of {', '.join(names)}, or the path of a .toml file "
        "(docs/reference/targets.md says how to write one)"
    )


def list_targets(extra_dirs: Sequence[Path] = ()) -> tuple[Target, ...]:
    """Return all targets, sorted by name.

    If several targets have the same name, those in `extra_dirs` take precedence, in the order of the folders.

    Raises:
        TargetError: A target file is malformed.
    """
    targets: dict[str, Target] = {}
    for folder in (*extra_dirs, _OURS):
        for path in sorted(folder.glob("*.toml")):
            if path.stem not in targets:
                targets[path.stem] = _read_named(path)
    return tuple(targets[name] for name in sorted(targets))


def read_target(path: Path) -> Target:
    """Return the target in a file.

    Raises:
        TargetError: The file cannot be read, is not TOML, or a field is missing, unknown or invalid.
    """
    document = read_toml(path, TargetError)
    schema = document.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise TargetError(f"{path}: schema is {schema!r}, expected {SCHEMA}")
    try:
        return from_plain(Target, document, error=TargetError)
    except TargetError as error:
        raise TargetError(f"{path}: {error}") from error


def read_toml(path: Path, error: type[EdgekitError]) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        error: The file cannot be read or is not TOML.
    """
    try:
        document: dict[str, Any] = _toml.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror or cause}") from cause
    except (_toml.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise error(f"{path}: expected TOML, got {cause}") from cause
    return document


def _read_named(path: Path) -> Target:
    target = read_target(path)
    # A search uses the file name, so another name inside would make the target unreachable.
    if target.name != path.stem:
        raise TargetError(f"{path}: name: expected {path.stem!r} as the file is called, got {target.name!r}")
    return target
