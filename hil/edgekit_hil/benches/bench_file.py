"""Environment files of labgrid with an additional section `edgekit:`, which describes the bench."""

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
    """The section `edgekit:` of an environment file.

    Attributes:
        kind: Whether the device is real, emulated or simulated.
        target: The name of the device's target, as in `edgekit targets`.
        architecture: The output of `uname -m` on the device.
        python: The command on the device that starts a Python with the runtime installed.
        has_time: Whether measured durations are meaningful. On an instruction emulator they are not.
        has_memory: Whether the memory of a process can be measured. This is False if the measurement would
            include the memory of an emulator.
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
        """The name of the target that `edgekit profile --on` writes for this bench."""
        return f"{self.target}-{'-'.join(re.findall('[a-z0-9]+', self.name.lower()))}"

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"name is {self.name!r}, expected letters, digits, '-' and '_'")


@dataclass(frozen=True, slots=True)
class BenchFile:
    """An environment file.

    Attributes:
        settings: The section `edgekit:`.
        identity: The text that identifies the device. It is the network address and port, the serial port,
            or the name of the bench if `keeps_state` is False. Files with the same identity share a lock.
        keeps_state: Whether the device keeps the state of earlier runs. This is the case for devices that are
            reached over the network or a serial line, unless a driver in the file creates them.
    """

    path: Path
    settings: BenchSettings
    identity: str
    keeps_state: bool


def read_bench(path: Path) -> BenchFile:
    """Read and check an environment file.

    Raises:
        BenchError: The file is missing or is not YAML, a section is missing, or a value is invalid.
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
    """Return the shipped benches, which need no hardware, sorted by file name."""
    return [read_bench(path) for path in sorted(SHIPPED.glob("*.yaml"))]


def find_bench(named: str) -> BenchFile:
    """Return a bench by the path of its file, or a shipped bench by its name.

    Raises:
        BenchError: There is no such bench, or its file is invalid.
    """
    shipped = SHIPPED / f"{named}.yaml"
    return read_bench(shipped if shipped.is_file() and not Path(named).exists() else Path(named))


def _find_main(sections: dict[str, Any]) -> dict[str, Any] | None:
    """Return the target `main`, or None if it is missing or malformed."""
    targets = sections.get("targets")
    main = targets.get("main") if isinstance(targets, dict) else None
    return main if isinstance(main, dict) and main.get("drivers") else None


def _find_place(main: dict[str, Any]) -> str | None:
    """Return the network address of the device, or else its serial line, or None."""
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
    """Return resources or drivers by name. labgrid accepts a table or a list of tables."""
    tables = part if isinstance(part, list) else [part]
    return {name: entry for table in tables if isinstance(table, dict) for name, entry in table.items()}
