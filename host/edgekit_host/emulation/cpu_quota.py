"""A CPU quota, which makes processes on this machine as slow as on a small device.

A cgroup (version 1 or 2) binds the processes to one processor. While the cgroup is not empty, a process with
a higher priority (`steal_time`) occupies that processor for a part of each half millisecond. This also slows
short work evenly. The kernel's own bandwidth control does not, because it counts in clock ticks of 4 ms and
begins with a full quota. With it, 1 ms of work took 0.9 to 27 ms, and 5 ms of work after a pause took 5 to
40 ms. Caches and memory are not slowed, so results are labelled `emulated`.

Source: "CFS Bandwidth Control", "CPUSETS" and "Control Group v2", documentation of the Linux kernel.
"""

import contextlib
import itertools
import os
import signal
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.system.child_process import ChildProcess

_PREFIX: Final = "edgekit-quota"
LEAST_SHARE: Final = 0.1  # the kernel leaves 5 % of each second to processes of normal priority
MOST_SHARE: Final = 0.95
_START_LIMIT_S: Final = 10.0
_TURN_LIMIT_S: Final = 300.0  # how long to wait for another quota to end
_LEAVE_LIMIT_S: Final = 2.0
_POLL_S: Final = 0.01
_START_TIME: Final = 19  # field of /proc/PID/stat behind the name, proc(5)
_MOUNTS: Final = Path("/proc/self/mounts")
_numbers = itertools.count(1)


def can_limit_processor(mounts: Path = _MOUNTS) -> bool:
    """Return whether this user may limit processes to a share of a processor."""
    try:
        root, _ = _find_cpuset(mounts)
    except ConfigError:
        return False
    return os.geteuid() == 0 and os.access(root, os.W_OK)  # a container often mounts it to be read only


class CpuQuota(contextlib.AbstractContextManager["CpuQuota"]):
    """Limits processes to a share of one processor, and kills them at the end of a `with` block.

    The thread that creates the quota must outlive it. Each processor has at most one quota at a time. A
    further quota uses another processor, or waits for one.

    Attributes:
        share: The share of the processor, `LEAST_SHARE` to `MOST_SHARE`.
        cpu: The number of the processor.
        procs_file: The path of the file into which a process writes its id to be limited. Its later child
            processes are limited too.
    """

    def __init__(self, share: float, mounts: Path = _MOUNTS) -> None:
        """Create the cgroup, and remove the cgroups of crashed processes.

        Args:
            share: The share of one processor, 0.1 to 0.95.
            mounts: The table of mounted file systems.

        Raises:
            ConfigError: The share is out of range, this process may not create a cgroup or raise a priority,
                or no processor became free in time.
        """
        if not LEAST_SHARE <= share <= MOST_SHARE:
            raise ConfigError(
                f"CPU share {share:g} is out of range; expected {LEAST_SHARE:g} to {MOST_SHARE:g}"
            )
        self.label = f"emulated: {share:.0%} of one processor"
        parent, version = _find_cpuset(mounts)
        _remove_leftovers(parent)
        pid = os.getpid()
        self._folder = parent / f"{_PREFIX}-{pid}-{_start_time(pid)}-{next(_numbers)}"
        self.procs_file = self._folder / "cgroup.procs"
        with contextlib.ExitStack() as undo:
            self.cpu = _take_processor(undo)
            undo.callback(_remove, self._folder)
            try:
                self._bind(parent, version)
            except OSError as cause:
                raise ConfigError(
                    f"a CPU quota needs root and a writable cgroup: {cause}; be root"
                ) from cause
            self._thief = undo.enter_context(contextlib.ExitStack())
            self.change(share)
            self._open = undo.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def change(self, share: float) -> None:
        """Change the share of the processes.

        Raises:
            ConfigError: This process may not raise its priority.
        """
        with contextlib.ExitStack() as undo:
            thief = undo.enter_context(
                ChildProcess(
                    "edgekit_host.emulation.steal_time", str(self.cpu), str(1 - share), str(self._folder)
                )
            )
            _wait_until_steals(thief)
            self._thief.close()
            self._thief.push(undo.pop_all())
        self.share = share

    def close(self) -> None:
        """Kill the limited processes and remove the quota. A second call does nothing."""
        self._open.close()

    def _bind(self, parent: Path, version: int) -> None:
        if version == 2:
            (parent / "cgroup.subtree_control").write_text("+cpuset")
        self._folder.mkdir()
        (self._folder / "cpuset.cpus").write_text(str(self.cpu))
        if version == 1:  # version 1 accepts no process in a group without memory nodes
            (self._folder / "cpuset.mems").write_text((parent / "cpuset.mems").read_text())


def _take_processor(undo: contextlib.ExitStack) -> int:
    """Reserve the highest processor without a quota until this process ends, and return its number.

    Raises:
        ConfigError: No processor became free in time.
    """
    cpus = sorted(os.sched_getaffinity(0), reverse=True)
    deadline = time.monotonic() + _TURN_LIMIT_S
    while True:
        for cpu in cpus:
            mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                mark.bind(f"\0{_PREFIX}-{cpu}")  # its name vanishes with the process, unlike a file's
            except OSError:
                mark.close()
            else:
                undo.enter_context(mark)
                return cpu
        if time.monotonic() > deadline:
            raise ConfigError(
                f"every processor has a CPU quota already, for {_TURN_LIMIT_S:g} s; end another measurement"
            )
        time.sleep(_POLL_S)


def _wait_until_steals(thief: ChildProcess) -> None:
    """Wait until a process has the priority to occupy a processor.

    Raises:
        ConfigError: The process may not have that priority.
    """
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        if thief.wait(_POLL_S) is not None:
            break
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thief.pid) & os.SCHED_RR:
                return
    raise ConfigError(f"a CPU quota needs root, for a priority of real time: {thief.last_line}; be root")


def _find_cpuset(mounts: Path) -> tuple[Path, int]:
    """Return the root cgroup that binds processes to processors, and its version.

    Raises:
        ConfigError: There is no such cgroup.
    """
    for line in mounts.read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        root = Path(point)
        if kind == "cgroup" and "cpuset" in options.split(","):
            return root, 1
        controllers = root / "cgroup.controllers"
        if kind == "cgroup2" and controllers.is_file() and "cpuset" in controllers.read_text().split():
            return root, 2
    raise ConfigError("a CPU quota needs the cgroup controller 'cpuset', and no mounted cgroup has it")


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot, or None if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_TIME]
    except OSError:
        return None


def _remove_leftovers(parent: Path) -> None:
    """Remove the cgroups of processes that have ended."""
    for folder in parent.glob(f"{_PREFIX}-*-*-*"):
        pid, start = folder.name.removeprefix(f"{_PREFIX}-").split("-")[:2]
        if _start_time(int(pid)) != start:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Kill the processes of a cgroup and remove it. If that fails, the next `CpuQuota` removes it."""
    deadline = time.monotonic() + _LEAVE_LIMIT_S
    while folder.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(_POLL_S)
