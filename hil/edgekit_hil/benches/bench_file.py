"""labgrid's environment files with a further section, `edgekit:`, on what the bench is evidence for."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from yaml import YAMLError

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import BenchError

Kind: TypeAlias = Literal["real", "emulated", "simulated"]

SHIPPED: Final = Path(__file__).parent
"""Folder of the environment files of benches that need no hardware."""

_SECTION: Final = "edgekit"
_SERVICE: Final = "NetworkService"
_SERIAL_LINES: Final = ("RawSerialPort", "NetworkSerialPort", "USBSerialPort")
_SERIAL_SHELL: Final = "ShellDriver"
_MAKES_DEVICE: Final = {"BootedMachineDriver", "QEMUDriver"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The section `edgekit:`.

    Attributes:
        kind: whether its results are from the real device, an emulated one, or a stand-in.
        target: name of the device's target, as in `edgekit targets`.
        architecture: output of `uname -m` on the device.
        python: command that starts, on the device, a Python in which the runtime is installed.
        has_time: whether durations on the device are meaningful; under an instruction emulator they are not.
        has_memory: whether the memory of a process on the device is that of the program alone, without an
            emulator that runs around it.
    """

    name: str
    kind: Kind
    target: str
    architecture: str
    python: str = "python3"
    has_time: bool = True
    has_memory: bool = True

    @property
    def profile_name(self) -> str:
        """Name of the target that `edgekit profile --on` writes for this bench."""
        return f"{self.target}-{'-'.join(re.findall('[a-z0-9]+', self.name.lower()))}"

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"name is {self.name!r}, expected letters, digits, '-' and '_'")


@dataclass(frozen=True, slots=True)
class BenchFile:
    """One environment file.

    Attributes:
        settings: the section `edgekit:`.
        identity: if `keeps_state`, address and port, or serial port, of the device; else the name of the
            bench. Files with equal identities share a lock.
        keeps_state: whether the device keeps the state of an earlier run: it is reached over the network or
            over a serial line, and no driver of the file creates it.
    """

    path: Path
    settings: BenchSettings
    identity: str
    keeps_state: bool


def read_bench(path: Path) -> BenchFile:
    """Return an environment file, checked.

    Raises:
        BenchError: the file is missing or is no YAML, a section is missing, or a value is wrong.
    """
    from labgrid.util.yaml import load  # imports all of labgrid, which a name of no bench does not need

    try:
        with path.open(encoding="utf-8") as file:
            content = load(file)
    except OSError as cause:
        raise BenchError(
            f"{path}: no environment file ({cause.strerror}); `edgekit hil init` writes one"
        ) from cause
    except (YAMLError, ValueError) as cause:
        raise BenchError(f"{path}: not YAML: {' '.join(str(cause).split())}") from cause
    sections = content if isinstance(content, dict) else {}
    if _SECTION not in sections:
        raise BenchError(
            f"{path}: the section '{_SECTION}:' with name, kind, target and architecture of the bench is"
            " missing; docs/guide/hil.md shows one, and `edgekit hil init` writes it"
        )
    settings = from_plain(BenchSettings, sections[_SECTION], f"{path}: {_SECTION}", BenchError)
    main = _find_main(sections)
    if main is None:
        raise BenchError(f"{path}: the section 'targets:' needs a target 'main' with 'drivers:'")
    address = None if _MAKES_DEVICE & set(_list_entries(main.get("drivers"))) else _find_place(main)
    return BenchFile(path, settings, address or settings.name, address is not None)


def list_shipped() -> list[BenchFile]:
    """Return the shipped benches, which need no hardware, in the order of their file names."""
    return [read_bench(path) for path in sorted(SHIPPED.glob("*.yaml"))]


def find_bench(named: str) -> BenchFile:
    """Return a bench by the path of its file, or a shipped bench by its name.

    Raises:
        BenchError: there is no such file and no such bench.
    """
    shipped = SHIPPED / f"{named}.yaml"
    return read_bench(shipped if shipped.is_file() and not Path(named).exists() else Path(named))


def _find_main(sections: dict[str, Any]) -> dict[str, Any] | None:
    """Return the target `main`, if it can be one."""
    targets = sections.get("targets")
    main = targets.get("main") if isinstance(targets, dict) else None
    return main if isinstance(main, dict) and main.get("drivers") else None


def _find_place(main: dict[str, Any]) -> str | None:
    """Return where the device is reached: over the network or, without that, over a serial line."""
    resources = _list_entries(main.get("resources"))
    service = resources.get(_SERVICE)
    if isinstance(service, dict) and "address" in service:
        return f"{service['address']}_{service.get('port', 22)}"
    lines = [resources[name] for name in _SERIAL_LINES if isinstance(resources.get(name), dict)]
    if lines and _SERIAL_SHELL in _list_entries(main.get("drivers")):
        where = (lines[0][part] for part in ("host", "port", "match") if part in lines[0])
        return "_".join(["serial", *map(str, where)])
    return None


def _list_entries(part: Any) -> dict[str, Any]:
    """Return resources or drivers by their names: labgrid takes a table, or a list of tables."""
    tables = part if isinstance(part, list) else [part]
    return {name: entry for table in tables if isinstance(table, dict) for name, entry in table.items()}
