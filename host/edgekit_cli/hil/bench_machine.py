"""Finds the machine for a measurement, which may be the device of a bench."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit_runtime.errors import BenchError, CutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgekit_hil.drivers.meter import MeterProtocol
    from edgekit_offload.profiling.machine import Machine
    from edgekit_offload.profiling.model_profile import Label

_FOLDER = "profile"


@dataclass(frozen=True, slots=True)
class MeteredMachine:
    """A machine for measurements, with a power meter if there is one.

    Attributes:
        meter: The meter of the machine's bench, or None.
        meter_text: What the meter measures, or why there is no meter.
    """

    machine: Machine
    meter: MeterProtocol | None = None
    meter_text: str = "none: a bench of `edgekit hil` can have one"


def find_device(text: str) -> contextlib.AbstractContextManager[MeteredMachine]:
    """Return a context manager that yields a machine, which may be the device of a bench.

    Args:
        text: A machine (see `Machine.parse`), the name of a bench, or the path of its environment file.

    Raises:
        CutError: `text` names neither a machine nor a bench.
    """
    from edgekit_offload.profiling.machine import Machine

    try:
        return contextlib.nullcontext(MeteredMachine(Machine.parse(text)))
    except CutError as cause:
        if not _is_bench(text):
            raise CutError(f"{cause}, or a bench of `edgekit hil benches`") from cause
    return _open_bench(text)


def find_names(text: str) -> tuple[str, str] | None:
    """Return the names of the target and the profile of a bench, or None if `text` names no bench."""
    if not _is_bench(text):
        return None
    from edgekit_hil.benches.bench_file import find_bench

    settings = find_bench(text).settings
    return settings.target, settings.profile_name


def _is_bench(text: str) -> bool:
    if find_spec("labgrid") is None:  # this installation has no benches
        return False
    from edgekit_hil.benches.bench_file import SHIPPED

    return Path(text).is_file() or (SHIPPED / f"{text}.yaml").is_file()


@contextlib.contextmanager
def _open_bench(bench: str) -> Iterator[MeteredMachine]:
    """Yield the device of a bench, and lock the bench during the block.

    Args:
        bench: The path of an environment file, or the name of a bench.

    Raises:
        BenchError: The bench is not available, or durations on it are not meaningful.
    """
    from edgekit_hil.benches.bench_file import find_bench
    from edgekit_hil.benches.opening import open_bench
    from edgekit_offload.profiling.machine import Machine

    file = find_bench(bench)
    settings = file.settings
    if not settings.has_time:
        raise BenchError(f"bench '{settings.name}': durations on it are those of an emulator of instructions")
    with open_bench(file) as opened, opened.open_folder(_FOLDER, "edgekit profile") as device:
        argv = (*shlex.split(device.python), "-m", "edgekit_runtime.cli")
        label: Label = "measured" if settings.kind == "real" else "emulated"
        machine = Machine(settings.name, argv, label, execute=device.run_program)
        yield MeteredMachine(machine, opened.meter, opened.meter_text)
