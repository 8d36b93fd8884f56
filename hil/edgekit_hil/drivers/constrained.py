"""This machine as a small device: a share of one processor, a limit on memory, a link of its own.

The device has a folder as its home, a network of its own, and a cgroup that holds all its processes. It has
no boot and no disk of its own, so a power cut here is `kill -9` of every process at once.
"""

import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import attr
from labgrid.driver import Driver
from labgrid.driver.commandmixin import CommandMixin
from labgrid.factory import target_factory
from labgrid.protocol import CommandProtocol, FileTransferProtocol, PowerProtocol
from labgrid.resource import Resource

import edgekit_runtime
from edgekit_offload.emulation.testbed import Testbed
from edgekit_runtime.errors import BenchError, ConfigError

_PREFIX: Final = "edgekit-bench"
_MEMORY: Final = Path("/sys/fs/cgroup/memory")
_LEAVE_LIMIT_S: Final = 5.0
_POLL_S: Final = 0.01
_COMMAND_LIMIT_S: Final = 30.0  # labgrid's


@target_factory.reg_resource
@attr.s(eq=False)
class ConstrainedBoard(Resource):
    """What the device has.

    Attributes:
        processor_share: of one processor, 0.1 to 0.95.
        memory_bytes: of all its processes and their files in memory.
        up_mbit_s, down_mbit_s, rtt_ms: its link.
    """

    processor_share: float = attr.ib(validator=attr.validators.instance_of(float))
    memory_bytes: int = attr.ib(validator=attr.validators.instance_of(int))
    up_mbit_s: float = attr.ib(validator=attr.validators.instance_of(float))
    down_mbit_s: float = attr.ib(validator=attr.validators.instance_of(float))
    rtt_ms: float = attr.ib(validator=attr.validators.instance_of(float))


@target_factory.reg_driver
@attr.s(eq=False)
class ConstrainedDriver(CommandMixin, Driver, CommandProtocol, FileTransferProtocol, PowerProtocol):
    """Runs commands on the constrained device."""

    bindings = {"board": "ConstrainedBoard"}  # noqa: RUF012  # labgrid's
    power_label = "kill -9 of every process of the device"

    def on_activate(self) -> None:
        """Make the device; a failure leaves nothing behind."""
        with contextlib.ExitStack() as undo:
            self.home = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-"))
            undo.callback(shutil.rmtree, self.home, ignore_errors=True)
            self.testbed = undo.enter_context(Testbed(device_share=self.board.processor_share))
            assert self.testbed.quota is not None  # noqa: S101  # a share was asked for
            group = _limit_memory(self.board.memory_bytes, self.testbed.quota.procs_file.parent)
            undo.callback(_end_group, group, own=group != self.testbed.quota.procs_file.parent)
            self._group = group
            self.restore_link()
            self._make_home()
            self._open = undo.pop_all()

    def on_deactivate(self) -> None:
        """Kill its processes and remove it."""
        self._open.close()

    @Driver.check_active  # type: ignore[untyped-decorator]
    def run(self, cmd: str, timeout: float | None = None, **_codec: str) -> tuple[list[str], list[str], int]:
        """Return output, errors and exit code of a command."""
        return self._run(cmd, timeout=timeout)

    def _run(self, cmd: str, timeout: float | None = None, **_codec: str) -> tuple[list[str], list[str], int]:
        with tempfile.TemporaryDirectory(dir=self.home / "tmp") as folder:
            errors = Path(folder) / "errors"
            enter = f"echo $$ >{self._group}/cgroup.procs && exec env -i {self._variables} sh -c"
            shell = ["sh", "-c", f'{enter} "$1" 2>"$2"', "sh", cmd, str(errors)]
            with self.testbed.spawn("device", shell, folder=self.home) as child:
                code = child.wait(timeout or _COMMAND_LIMIT_S)
                if code is None:
                    raise BenchError("time is up")
                output = child.output.decode(errors="replace")
            said = errors.read_text(errors="replace") if errors.is_file() else child.last_line
        return output.splitlines(), said.splitlines(), code if code >= 0 else 128 - code

    @Driver.check_active  # type: ignore[untyped-decorator]
    def get_status(self) -> int:
        """Return 1: it is always there."""
        return 1

    @Driver.check_active  # type: ignore[untyped-decorator]
    def put(self, filename: str, remotepath: str) -> None:
        """Copy a file to the device."""
        shutil.copy(filename, self.home / remotepath)

    @Driver.check_active  # type: ignore[untyped-decorator]
    def get(self, filename: str, destination: str) -> None:
        """Copy a file from the device."""
        shutil.copy(self.home / filename, destination)

    @Driver.check_active  # type: ignore[untyped-decorator]
    def on(self) -> None:
        """Do nothing: there is no boot."""

    @Driver.check_active  # type: ignore[untyped-decorator]
    def off(self) -> None:
        """Kill every process of the device at once."""
        _kill_group(self._group)

    @Driver.check_active  # type: ignore[untyped-decorator]
    def cycle(self) -> None:
        """Kill every process of the device at once."""
        self.off()

    @Driver.check_active  # type: ignore[untyped-decorator]
    def drop_link(self) -> None:
        """Lose every packet of the link until `restore_link`."""
        self.testbed.block()

    def restore_link(self) -> None:
        """Give the link what the board says."""
        board = self.board
        self.testbed.set_link(up_mbit_s=board.up_mbit_s, down_mbit_s=board.down_mbit_s, rtt_ms=board.rtt_ms)

    def _make_home(self) -> None:
        """Give the device a Python with the runtime."""
        programs = self.home / "bin"
        programs.mkdir()
        (self.home / "tmp").mkdir()
        python = programs / "python3"
        python.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
        )  # a link would lose its environment
        python.chmod(0o755)
        runtime = Path(edgekit_runtime.__file__).parents[1]
        variables = {
            "HOME": self.home,
            "TMPDIR": self.home / "tmp",
            "PATH": f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": runtime,
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
        }
        self._variables = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())


def _limit_memory(limit_bytes: int, quota: Path) -> Path:
    """Return a group that limits memory: one of its own in version 1, the quota's own in version 2.

    Raises:
        ConfigError: this machine has no such limit.
    """
    try:
        if not (_MEMORY / "memory.limit_in_bytes").is_file():
            (quota.parent / "cgroup.subtree_control").write_text("+memory")
            (quota / "memory.max").write_text(str(limit_bytes))
            return quota
        for left in _MEMORY.glob(f"{_PREFIX}-*"):
            if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
                _end_group(left, own=True)
        group = _MEMORY / f"{_PREFIX}-{os.getpid()}"
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as cause:
        raise ConfigError(f"a limit on memory needs root and a writable cgroup: {cause}") from cause
    return group


def _kill_group(group: Path) -> None:
    """Kill every process of a group, also those that they start meanwhile."""
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
    """Kill the processes of a group, and remove it if it is our own."""
    with contextlib.suppress(OSError, BenchError):
        _kill_group(group)
        if own:
            group.rmdir()
