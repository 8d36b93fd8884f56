"""Facts about a machine on which measurements run, and its state."""

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import Annotated

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import BackendError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.engines import EngineMissingError, find_engine
from edgekit_runtime.system.own_process import count_cores
from edgekit_runtime.system.processor_speed import find_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The machine, and its state during the measurement.

    Attributes:
        system: operating system and architecture.
        quota: processor time that the process may use, in cores, or None without a limit.
        load: load average of the last minute before the measurement, or None if the system has none.
        engine: name and release of the engine.
        date: date and time in UTC, in ISO 8601.
        gpu: GPU that ran the graphs, such as `NVIDIA L4 by CUDA`, or empty if the processor ran them.
        usual_s: time of a fixed piece of work, which shows the processor speed (`SpeedGate`), or None.
    """

    cpu: str
    system: str
    cores: int
    quota: Annotated[float, Range(0, 1e4)] | None
    load: Annotated[float, Range(0, 1e6)] | None
    engine: str
    date: str
    usual_s: Annotated[float, Range(0, 86400)] | None = None
    gpu: str = ""


def describe_machine(quota: float | None = None, engine: str = "ort") -> MachineFacts:
    """Return the facts about this machine, without `usual_s` and `gpu`, which the measurement sets.

    Args:
        quota: processor time of this process, in cores, or None for the system's limit.
        engine: name of the engine to describe.

    Raises:
        BackendError: the engine is not installed.
    """
    return MachineFacts(
        cpu=find_cpu(),
        system=f"{platform.system()} {platform.machine()}",
        cores=count_cores(),
        quota=_find_quota() if quota is None else quota,
        load=read_load_average(),
        engine=describe_engine(engine),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def read_load_average() -> float | None:
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def describe_engine(engine: str) -> str:
    """Return the name and release of an engine on this machine, such as `onnxruntime 1.24.4`.

    Raises:
        BackendError: the engine is not installed.
    """
    try:
        return " ".join(find_engine(engine).installation.find_release())
    except EngineMissingError as cause:
        raise BackendError(f"measuring: {cause}") from cause


def _find_quota() -> float | None:
    """Return the limit of processor time of this process's control group, in cores.

    Source: cgroups(7); Documentation/admin-guide/cgroup-v2.rst, `cpu.max`.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if "cpu" in controllers.split(","):
                folder = Path("/sys/fs/cgroup/cpu") / group.lstrip("/")
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            elif not controllers and (Path("/sys/fs/cgroup") / group.lstrip("/") / "cpu.max").exists():
                quota, period = (Path("/sys/fs/cgroup") / group.lstrip("/") / "cpu.max").read_text().split()
            else:
                continue
            return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)
    return None
