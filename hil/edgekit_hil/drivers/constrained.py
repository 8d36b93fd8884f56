"""A small device on this machine, with a limited processor share and memory and an emulated network link.

The device has a home folder, a network namespace, and a cgroup with all its processes. It does not boot and
has no disk, so a power cut kills all its processes at once.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

import attr
from labgrid.driver import Driver
from labgrid.factory import target_factory
from labgrid.protocol import PowerProtocol
from labgrid.resource import Resource

from edgekit_hil.drivers.local import COMMAND_LIMIT_S, LocalDriver
from edgekit_hil.drivers.own_folder import PREFIX
from edgekit_host.emulation.testbed import Testbed
from edgekit_runtime.errors import BenchError, ConfigError

MEMORY: Final = Path("/sys/fs/cgroup/memory")
_LEAVE_LIMIT_S: Final = 5.0
_POLL_S: Final = 0.01


@target_factory.reg_resource
@attr.s(eq=False)
class ConstrainedBoard(Resource):
    """The resources of the device.

    Attributes:
        processor_share: The share of one processor, 0.1 to 0.95.
        memory_bytes: The memory limit for its processes and files in tmpfs together.
    """

    processor_share: float = attr.ib(validator=attr.validators.instance_of(float))
    memory_bytes: int = attr.ib(validator=attr.validators.instance_of(int))
    up_mbit_s: float = attr.ib(validator=attr.validators.instance_of(float))
    down_mbit_s: float = attr.ib(validator=attr.validators.instance_of(float))
    rtt_ms: float = attr.ib(validator=attr.validators.instance_of(float))


@target_factory.reg_driver
@attr.s(eq=False)
class ConstrainedDriver(LocalDriver, PowerProtocol):
    """Runs commands on the constrained device."""

    bindings = {"board": "ConstrainedBoard"}  # noqa: RUF012  # labgrid's
    power_label = "kill -9 of every process of the device"

    def on_activate(self) -> None:
        """Create the device. If this fails, remove all parts that were created."""
        with contextlib.ExitStack() as undo:
            super().on_activate()
            undo.callback(super().on_deactivate)
            self.testbed = undo.enter_context(Testbed(device_share=self.board.processor_share))
            assert self.testbed.quota is not None  # noqa: S101  # a share was asked for
            quota = self.testbed.quota.procs_file.parent
            self._group = _limit_memory(self.board.memory_bytes, quota)
            undo.callback(_end_group, self._group, own=self._group != quota)
            self.restore_link()
            self._open = undo.pop_all()

    def on_deactivate(self) -> None:
        """Kill the device's processes and remove the device."""
        self._open.close()

    def _execute(self, argv: list[str], timeout: float | None) -> tuple[int | None, bytes]:
        enter = f'echo $$ >{self._group}/cgroup.procs && exec "$@"'
        with self.testbed.spawn("device", ["sh", "-c", enter, "sh", *argv], folder=self.home) as child:
            return child.wait(timeout or COMMAND_LIMIT_S), child.output

    @Driver.check_active  # type: ignore[untyped-decorator]
    def on(self) -> None:
        """Do nothing, because the device is always on."""

    @Driver.check_active  # type: ignore[untyped-decorator]
    def off(self) -> None:
        """Kill all processes of the device at once."""
        _kill_group(self._group)

    @Driver.check_active  # type: ignore[untyped-decorator]
    def cycle(self) -> None:
        self.off()

    @Driver.check_active  # type: ignore[untyped-decorator]
    def drop_link(self) -> None:
        """Drop all packets of the link until `restore_link`."""
        self.testbed.block()

    @Driver.check_active  # type: ignore[untyped-decorator]
    def throttle(self, clock_share: float) -> None:
        """Reduce the processor speed to a share, as a hot board does. A share of 1 restores it."""
        assert self.testbed.quota is not None  # noqa: S101  # `on_activate` made one
        self.testbed.quota.change(self.board.processor_share * clock_share)

    @property
    def slowdown(self) -> float:
        """The factor by which the device is slower than this machine."""
        share: float = self.board.processor_share
        return 1 / share

    def restore_link(self) -> None:
        """Restore the link after `drop_link`, with the bandwidths and delay in `ConstrainedBoard`."""
        board = self.board
        self.testbed.set_link(up_mbit_s=board.up_mbit_s, down_mbit_s=board.down_mbit_s, rtt_ms=board.rtt_ms)


def _limit_memory(limit_bytes: int, quota: Path) -> Path:
    """Create a memory limit, and return its cgroup.

    It is a separate cgroup in version 1, and the cgroup of the quota in version 2.

    Raises:
        ConfigError: This machine cannot limit memory.
    """
    try:
        if not (MEMORY / "memory.limit_in_bytes").is_file():
            (quota.parent / "cgroup.subtree_control").write_text("+memory")
            (quota / "memory.max").write_text(str(limit_bytes))
            return quota
        for stale_group in MEMORY.glob(f"{PREFIX}-*"):
            if not Path(f"/proc/{stale_group.name.rpartition('-')[2]}").exists():
                _end_group(stale_group, own=True)
        group = MEMORY / f"{PREFIX}-{os.getpid()}"
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as cause:
        raise ConfigError(f"a limit on memory needs root and a writable cgroup: {cause}") from cause
    return group


def _kill_group(group: Path) -> None:
    """Kill all processes of a cgroup, including those that they start in the meantime."""
    deadline = time.monotonic() + _LEAVE_LIMIT_S
    while time.monotonic() < deadline:
        pids = (group / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(_POLL_S)
    raise BenchError(f"processes in {group} cannot be killed")


def _end_group(group: Path, *, own: bool) -> None:
    """Kill the processes of a cgroup, and delete the cgroup if `own`."""
    with contextlib.suppress(OSError, BenchError):
        _kill_group(group)
        if own:
            group.rmdir()
