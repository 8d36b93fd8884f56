"""A CPU quota that makes processes of this machine as slow as a small device, by a cgroup of version 1 or 2.

The kernel lets them compute for a share of each period of 10 ms and stops them for the rest. So work below
the share of one period runs at full speed, and a longer one takes about 1 / share as long, give or take one
period. It does not slow caches or memory: what is measured with it is labelled `emulated`.

Source: "CFS Bandwidth Control" and "Control Group v2", documentation of the Linux kernel.
"""

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

PERIOD_US: Final = 10_000
_PREFIX: Final = "edgekit-quota"
_LEAST_SHARE: Final = 0.1  # the kernel takes no quota below 1 ms
_LEAVE_LIMIT_S: Final = 2.0
_POLL_S: Final = 0.01
_START_TIME: Final = 19  # field of /proc/PID/stat behind the name, proc(5)
_numbers = itertools.count(1)


class CpuQuota:
    """A cgroup whose processes get a share of one processor; at the end of a `with` block they are killed.

    Attributes:
        share: of one processor, 0.1 to 64.
        procs_file: a process that writes its id here belongs to the group.
        label: what a result that was measured with it says.
    """

    def __init__(self, share: float, mounts: Path = Path("/proc/self/mounts")) -> None:
        """Make the cgroup, and remove those that processes left behind when they crashed.

        Args:
            share: of one processor, 0.1 to 64; 0.2 is 2 ms of each 10 ms.
            mounts: table of mounted file systems.

        Raises:
            ConfigError: the share is out of range, or this process may not make a cgroup.
        """
        if not _LEAST_SHARE <= share <= 64:
            raise ConfigError(f"CPU share {share:g} is out of range; expected {_LEAST_SHARE:g} to 64")
        self.share = share
        self.label = f"emulated: CPU quota of {share * PERIOD_US / 1000:g} ms in {PERIOD_US / 1000:g} ms"
        parent, version = _find_cpu_controller(mounts)
        _remove_leftovers(parent)
        pid = os.getpid()
        self._folder = parent / f"{_PREFIX}-{pid}-{_start_time(pid)}-{next(_numbers)}"
        self.procs_file = self._folder / "cgroup.procs"
        try:
            if version == 2:
                (parent / "cgroup.subtree_control").write_text("+cpu")
            self._folder.mkdir()
            self._limit(version)
        except OSError as cause:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            raise ConfigError(
                f"a CPU quota needs root and a writable cgroup: {cause}; run as root"
            ) from cause

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, pid: int) -> None:
        """Put a process with all its threads under the quota; children that it starts later are under it too.

        Raises:
            ConfigError: there is no such process.
        """
        try:
            self.procs_file.write_text(str(pid))
        except OSError as cause:
            raise ConfigError(f"process {pid} cannot be put under a CPU quota: {cause}") from cause

    def close(self) -> None:
        """Kill the processes of the group and remove it; a second call does nothing."""
        _remove(self._folder)

    def _limit(self, version: int) -> None:
        """Write the quota into the group."""
        quota_us = round(self.share * PERIOD_US)
        if version == 2:
            (self._folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))


def _find_cpu_controller(mounts: Path) -> tuple[Path, int]:
    """Return the folder of the root cgroup that limits processors, and its version.

    Raises:
        ConfigError: there is none.
    """
    for line in mounts.read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        root = Path(point)
        if kind == "cgroup" and "cpu" in options.split(","):
            return root, 1
        controllers = root / "cgroup.controllers"
        if kind == "cgroup2" and controllers.is_file() and "cpu" in controllers.read_text().split():
            return root, 2
    raise ConfigError("a CPU quota needs the cgroup controller 'cpu', and no mounted cgroup has it")


def _start_time(pid: int) -> str | None:
    """Return when a process started, in ticks since boot, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_TIME]
    except OSError:
        return None


def _remove_leftovers(parent: Path) -> None:
    """Remove the groups of processes that have ended."""
    for folder in parent.glob(f"{_PREFIX}-*-*-*"):
        pid, start = folder.name.removeprefix(f"{_PREFIX}-").split("-")[:2]
        if _start_time(int(pid)) != start:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Kill the processes of a group and remove it; what cannot be removed is left to the next `CpuQuota`."""
    deadline = time.monotonic() + _LEAVE_LIMIT_S
    while folder.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(_POLL_S)
