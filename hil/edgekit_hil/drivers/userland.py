"""The ARM64 userland: a Debian root folder for arm64, whose programs run under qemu-user.

Tests in the userland show what programs do, but not how long they take on a board. The kernel is that of this
machine.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Final

import attr
from labgrid.driver import Driver
from labgrid.driver.commandmixin import CommandMixin
from labgrid.factory import target_factory
from labgrid.protocol import CommandProtocol, FileTransferProtocol

import edgekit_runtime
from edgekit_hil.drivers.own_folder import make_folder
from edgekit_hil.images import recipe
from edgekit_hil.images.image_cache import find_image
from edgekit_hil.images.programs import require
from edgekit_runtime.errors import BenchError, BenchUnavailableError
from edgekit_runtime.system.child_process import ChildProcess

_MODULE: Final = "edgekit_hil.drivers.emulated_processes"
_QEMU: Final = "qemu-aarch64-static"
_LEAST_KERNEL: Final = (6, 7)  # binfmt_misc of a user namespace
_START_S: Final = 20.0
_POLL_S: Final = 0.02
_COMMAND_LIMIT_S: Final = 60.0


def require_userland() -> None:
    """Check that this machine can run ARM64 programs.

    Raises:
        BenchUnavailableError: The kernel is too old, this process is not root, or qemu is missing.
    """
    require(_QEMU, "nsenter")
    if os.geteuid():
        raise BenchUnavailableError("the ARM64 userland needs root: it mounts file systems in namespaces")
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < _LEAST_KERNEL:
        raise BenchUnavailableError(
            f"the ARM64 userland needs Linux 6.7 or newer, this is {release}: an older kernel would"
            " register the emulator for the whole machine"
        )


@target_factory.reg_driver
@attr.s(eq=False)
class UserlandDriver(CommandMixin, Driver, CommandProtocol, FileTransferProtocol):
    """Runs commands in the root folder of the newest image. Deactivation discards all changed files.

    Attributes:
        cpu: The name of the processor in qemu.
        read_only: Local folders that have the same path in the userland. Programs cannot change them.
    """

    cpu: str = attr.ib(default=recipe.CPU)
    read_only: list[str] = attr.ib(factory=lambda: [str(Path(edgekit_runtime.__file__).parents[1])])

    def on_activate(self) -> None:
        """Create the namespaces. If this fails, remove all parts that were created.

        Raises:
            BenchUnavailableError: There is no image, or `require_userland` failed.
        """
        require_userland()
        image = find_image(booted=False)
        with contextlib.ExitStack() as undo:
            undo.enter_context(image.hold())
            self._folder = make_folder("userland")
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            upper, work = self._folder / "upper", self._folder / "work"
            upper.mkdir()
            work.mkdir()
            words = [str(shutil.which(_QEMU)), str(image.root), str(upper), str(work), *self.read_only]
            child = undo.enter_context(ChildProcess(_MODULE, *words, output="keep"))
            self._pid = _wait_ready(child)
            self._open = undo.pop_all()

    def on_deactivate(self) -> None:
        """End all programs in the userland, and delete the files that they wrote."""
        self._open.close()

    @Driver.check_active  # type: ignore[untyped-decorator]
    def run(self, cmd: str, timeout: float | None = None, **_codec: str) -> tuple[list[str], list[str], int]:
        """Run a shell command, and return its lines of output, its lines of errors and its exit code.

        Raises:
            BenchError: The command did not end within `timeout` seconds.
        """
        return self._run(cmd, timeout=timeout)

    def _run(self, cmd: str, timeout: float | None = None, **_codec: str) -> tuple[list[str], list[str], int]:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(
                    [*self.enter(), "/bin/sh", "-c", cmd],
                    check=False,
                    timeout=timeout or _COMMAND_LIMIT_S,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                )
            except subprocess.TimeoutExpired as cause:
                raise BenchError(f"`{cmd[-200:]}` did not end within {timeout} s") from cause
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace").splitlines())
        return texts[0], texts[1], done.returncode if done.returncode >= 0 else 128 - done.returncode

    def enter(self) -> list[str]:
        """Return the arguments to put before a command, so that it runs in the userland."""
        variables = {
            "HOME": "/root",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": ":".join(self.read_only),
            "PYTHONDONTWRITEBYTECODE": "1",
            "QEMU_CPU": self.cpu,
        }
        enter = ["nsenter", f"--target={self._pid}", "--user", "--mount", "--pid", "--root", "--wd"]
        return [
            *enter,
            "/usr/bin/env",
            "-i",
            "--chdir=/root",
            *(f"{name}={text}" for name, text in variables.items()),
        ]

    @Driver.check_active  # type: ignore[untyped-decorator]
    def get_status(self) -> int:
        """Return 1, because the userland is always available."""
        return 1

    @Driver.check_active  # type: ignore[untyped-decorator]
    def put(self, filename: str, remotepath: str) -> None:
        """Copy the local file `filename` to `remotepath` in the userland.

        Raises:
            BenchError: `remotepath` cannot be written.
        """
        with Path(filename).open("rb") as file:
            self._copy('exec cat >"$0"', remotepath, stdin=file)

    @Driver.check_active  # type: ignore[untyped-decorator]
    def get(self, filename: str, destination: str) -> None:
        """Copy the file `filename` in the userland to the local `destination`.

        Raises:
            BenchError: `filename` cannot be read.
        """
        with Path(destination).open("wb") as file:
            self._copy('exec cat "$0"', filename, stdout=file)

    def _copy(self, script: str, path: str, **streams: IO[bytes]) -> None:
        command = [*self.enter(), "/bin/sh", "-c", script, path]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, **streams)  # type: ignore[call-overload]
        if done.returncode:
            raise BenchError(f"{path} in the ARM64 userland: {done.stderr.decode(errors='replace').strip()}")


def _wait_ready(child: ChildProcess) -> int:
    """Return the id of the first process in the userland.

    Raises:
        BenchUnavailableError: The kernel refuses the namespaces or mounts.
    """
    deadline = time.monotonic() + _START_S
    while not child.output.startswith(b"ready "):
        if child.wait(_POLL_S) is not None or time.monotonic() > deadline:
            raise BenchUnavailableError(f"the ARM64 userland does not start: it ended {child.explain_end()}")
    return int(child.output.split()[1])
