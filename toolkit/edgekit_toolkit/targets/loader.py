"""Find and read target files (TOML). A malformed file is refused with file, field, expected and got.

Ours lie beside this module. A user's lie in `user_target_dir()`, or anywhere when named by a path; a user's
file takes the place of ours with the same name.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from edgekit_runtime.errors import TargetError
from edgekit_toolkit.targets.figures import Figure, Source, listed
from edgekit_toolkit.targets.spec import (
    NAME_PATTERN,
    Backend,
    Costs,
    Cpu,
    Memory,
    Power,
    PowerMode,
    Quantization,
    Release,
    Storage,
    Target,
)

# tomllib came with Python 3.11; tomli is the same parser for 3.10 (JetPack 6).
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

_OURS = Path(__file__).parent
_SCHEMA = 1
_Record = TypeVar("_Record")


def user_target_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder of the user's target files: $EDGEKIT_HOME/targets, by default ~/.config/edgekit/targets."""
    home = environ.get("EDGEKIT_HOME")
    return (Path(home) if home else Path("~/.config/edgekit").expanduser()) / "targets"


def load_target(name_or_path: str, extra_dirs: Sequence[Path] = ()) -> Target:
    """Read one target.

    Args:
        name_or_path: name or alias of a target, or path of a target file (anything with a path separator or
            the ending `.toml`).
        extra_dirs: folders searched before ours; one that does not exist is passed over.

    Raises:
        TargetError: no such target or file, or the file is malformed.
    """
    if name_or_path.endswith(".toml") or os.sep in name_or_path or "/" in name_or_path:
        return read_target(Path(name_or_path))
    if NAME_PATTERN.fullmatch(name_or_path):
        for folder in (*extra_dirs, _OURS):
            if (folder / f"{name_or_path}.toml").is_file():
                return _read_named(folder / f"{name_or_path}.toml")
    known = list_targets(extra_dirs)
    for target in known:
        if name_or_path in target.aliases:
            return target
    names = [name for target in known for name in (target.name, *target.aliases)]
    near = difflib.get_close_matches(name_or_path.lower(), names, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise TargetError(
        f"no target {name_or_path!r}; {hint}expected one of {listed(names)}, or the path of a .toml file "
        "(docs/reference/targets.md says how to write one)"
    )


def list_targets(extra_dirs: Sequence[Path] = ()) -> tuple[Target, ...]:
    """All targets, sorted by name; of two with one name that in the earlier folder.

    Raises:
        TargetError: a target file is malformed.
    """
    found: dict[str, Target] = {}
    for folder in (*extra_dirs, _OURS):
        for path in sorted(folder.glob("*.toml")):
            if path.stem not in found:
                found[path.stem] = _read_named(path)
    return tuple(found[name] for name in sorted(found))


def read_target(path: Path) -> Target:
    """Read one target file.

    Raises:
        TargetError: it cannot be read, is not TOML, or a field is missing, unknown or wrong.
    """
    try:
        document = _toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (_toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"{path}: expected TOML, got {error}") from error
    return _target(_Table(document, str(path), ""))


def _read_named(path: Path) -> Target:
    target = read_target(path)
    # A search goes by file name, so another name inside would make the target unreachable.
    if target.name != path.stem:
        raise TargetError(f"{path}: name: expected {path.stem!r} as the file is called, got {target.name!r}")
    return target


class _Table:
    """A TOML table that knows where it stands and complains about fields that nobody asked for."""

    def __init__(self, values: dict[str, Any], file: str, path: str) -> None:
        self._values = dict(values)
        self._file = file
        self._path = path

    def error(self, field: str, problem: str) -> TargetError:
        path = ".".join(part for part in (self._path, field) if part)
        return TargetError(f"{self._file}: {path}: {problem}")

    def take(self, field: str, kind: type, expected: str, default: Any = None) -> Any:
        if field not in self._values:
            if default is not None:
                return default
            raise self.error(field, f"expected {expected}, got nothing")
        value = self._values.pop(field)
        # bool is an int in Python, but `cores = true` is a mistake.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(field, f"expected {expected}, got {value!r}")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        value: str = self.take(field, str, "text", default)
        return value

    def flag(self, field: str) -> bool:
        value: bool = self.take(field, bool, "true or false")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        values = self.take(field, list, "a list of texts", [])
        if not all(isinstance(value, str) for value in values):
            raise self.error(field, f"expected a list of texts, got {values!r}")
        return tuple(values)

    def table(self, field: str) -> "_Table":
        path = ".".join(part for part in (self._path, field) if part)
        return _Table(self.take(field, dict, "a table"), self._file, path)

    def tables(self, field: str) -> Iterator["_Table"]:
        path = ".".join(part for part in (self._path, field) if part)
        for number, value in enumerate(self.take(field, list, "an array of tables")):
            if not isinstance(value, dict):
                raise self.error(field, f"expected an array of tables, got {value!r}")
            yield _Table(value, self._file, f"{path}[{number}]")

    def has(self, field: str) -> bool:
        return field in self._values

    def rest(self) -> list[str]:
        return list(self._values)

    def figure(self, field: str) -> Figure:
        table = self.table(field)
        value = table.take("value", object, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise table.error("value", f"expected a number, got {value!r}")
        # Figure checks that the status is one of the four.
        status: Any = table.text("status")
        return table.build(
            Figure, value=float(value), unit=table.text("unit"), status=status, source=table.text("source")
        )

    def build(self, make: Callable[..., _Record], **fields: Any) -> _Record:
        """Make the record; what is left over in the table is an error, and errors get their place."""
        if self._values:
            field = next(iter(self._values))
            raise self.error(field, f"unknown field; known here are {listed(sorted(fields))}")
        try:
            return make(**fields)
        except TargetError as error:
            path = f"{self._path}." if self._path else ""
            raise TargetError(f"{self._file}: {path}{error}") from error


def _target(table: _Table) -> Target:
    schema = table.take("schema", int, "a whole number")
    if schema != _SCHEMA:
        raise table.error("schema", f"expected {_SCHEMA}, got {schema}")
    memory, storage, cpu = table.table("memory"), table.table("storage"), table.table("cpu")
    backend = table.table("backend")
    return table.build(
        Target,
        name=table.text("name"),
        title=table.text("title"),
        arch=table.text("arch"),
        memory=memory.build(Memory, total=memory.figure("total"), free=memory.figure("free")),
        storage=storage.build(Storage, kind=storage.text("kind"), free=storage.figure("free")),
        cpu=cpu.build(
            Cpu,
            model=cpu.text("model"),
            cores=cpu.figure("cores"),
            clock=cpu.figure("clock"),
            isa=cpu.texts("isa"),
        ),
        power=_power(table.table("power")),
        releases=tuple(_release(item) for item in table.tables("releases")),
        quantization=_quantization(table.table("quantization")),
        backend=backend.build(
            Backend, default=backend.text("default"), fallback=backend.text("fallback", "") or None
        ),
        costs=_costs(table.table("costs")),
        sources=tuple(_source(item) for item in table.tables("sources")),
        aliases=table.texts("aliases"),
        accelerator=table.text("accelerator", ""),
        notes=table.text("notes", ""),
    )


def _power(table: _Table) -> Power:
    modes = tuple(
        mode.build(
            PowerMode,
            name=mode.text("name"),
            active=mode.figure("active"),
            compute_scale=mode.figure("compute_scale"),
            bandwidth_scale=mode.figure("bandwidth_scale"),
            limit=mode.figure("limit") if mode.has("limit") else None,
        )
        for mode in table.tables("modes")
    )
    return table.build(Power, idle=table.figure("idle"), default_mode=table.text("default_mode"), modes=modes)


def _release(table: _Table) -> Release:
    engines = table.table("engines")
    versions = tuple((engine, engines.text(engine)) for engine in sorted(engines.rest()))
    return table.build(
        Release,
        name=table.text("name"),
        python=table.text("python"),
        engines=versions,
        source=table.text("source"),
    )


def _quantization(table: _Table) -> Quantization:
    return table.build(
        Quantization,
        form=table.text("form"),
        activations=table.text("activations"),
        weights=table.text("weights"),
        per_channel=table.flag("per_channel"),
        quantized_bias=table.flag("quantized_bias"),
        dedicated_qdq=table.flag("dedicated_qdq"),
        reduce_range=table.flag("reduce_range"),
        source=table.text("source"),
    )


def _costs(table: _Table) -> Costs:
    names = ("fp32", "int8", "memory", "kernel_overhead", "uncertainty")
    figures = {name: table.figure(name) for name in names}
    return table.build(Costs, **figures, fp16=table.figure("fp16") if table.has("fp16") else None)


def _source(table: _Table) -> Source:
    return table.build(
        Source,
        key=table.text("key"),
        title=table.text("title"),
        date=table.text("date"),
        where=table.text("where", ""),
        derivation=table.text("derivation", ""),
    )
