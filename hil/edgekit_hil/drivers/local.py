"""A device on this machine, which runs shell commands in a temporary home folder."""

import contextlib
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

import attr
from labgrid.driver import Driver
from labgrid.driver.commandmixin import CommandMixin
from labgrid.factory import target_factory
from labgrid.protocol import CommandProtocol, FileTransferProtocol

import edgekit_runtime
from edgekit_hil.drivers.own_folder import make_folder
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.child_process import run_program

COMMAND_LIMIT_S: Final = 30.0  # labgrid's
_MAX_OUTPUT_BYTES: Final = 64 << 20


@target_factory.reg_driver
@attr.s(eq=False)
class LocalDriver(CommandMixin, Driver, CommandProtocol, FileTransferProtocol):
    """Runs commands on this machine, without the environment variables of this process.

    Attributes:
        home: The `$HOME` of the commands, which exists while the driver is active.
    """

    def on_activate(self) -> None:
        """Create `home` with a Python that can import the runtime."""
        self.home = make_folder("home")
        programs = self.home / "bin"
        programs.mkdir()
        (self.home / "tmp").mkdir()
        python = programs / "python3"
        # A link would lose the environment that the interpreter belongs to.
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        variables = {
            "HOME": self.home,
            "TMPDIR": self.home / "tmp",
            "PATH": f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": Path(edgekit_runtime.__file__).parents[1],
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
        }
        self.variables = [f"{name}={value}" for name, value in variables.items()]

    def on_deactivate(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

    @Driver.check_active  # type: ignore[untyped-decorator]
    def run(self, cmd: str, timeout: float | None = None, **_codec: str) -> tuple[list[str], list[str], int]:
        """Run a command, and return its lines of output, its lines of errors and its exit code.

        Args:
            cmd: A command for `sh`. If a signal ends it, the exit code is 128 plus the number of the signal.
            timeout: The time limit in seconds, or None for `COMMAND_LIMIT_S`.

        Raises:
            BenchError: The command exceeded the time limit.
        """
        return self._run(cmd, timeout=timeout)

    def _run(self, cmd: str, timeout: float | None = None, **_codec: str) -> tuple[list[str], list[str], int]:
        with tempfile.TemporaryDirectory(dir=self.home / "tmp") as folder:
            errors = Path(folder) / "errors"
            shell = ["sh", "-c", f"{{ {cmd}\n}} 2>{shlex.quote(str(errors))}"]
            code, output = self._execute(
                ["env", "-i", "-C", str(self.home), *self.variables, *shell], timeout
            )
            error_bytes = b""
            with contextlib.suppress(FileNotFoundError):
                error_bytes = errors.read_bytes()
        if code is None:
            raise BenchError("time is up")
        texts = [content.decode(errors="replace").splitlines() for content in (output, error_bytes)]
        return texts[0], texts[1], code if code >= 0 else 128 - code

    def _execute(self, argv: list[str], timeout: float | None) -> tuple[int | None, bytes]:
        """Run a program, and return its exit code, or None after a timeout, and its output."""
        result = run_program(argv, (), timeout or COMMAND_LIMIT_S, _MAX_OUTPUT_BYTES)
        return result.exit_code, result.output

    @Driver.check_active  # type: ignore[untyped-decorator]
    def get_status(self) -> int:
        return 1

    @Driver.check_active  # type: ignore[untyped-decorator]
    def put(self, filename: str, remotepath: str) -> None:
        """Copy the file `filename` to `remotepath`, which may be relative to `home`."""
        shutil.copy(filename, self.home / remotepath)

    @Driver.check_active  # type: ignore[untyped-decorator]
    def get(self, filename: str, destination: str) -> None:
        """Copy the file `filename`, which may be relative to `home`, to `destination`."""
        shutil.copy(self.home / filename, destination)
