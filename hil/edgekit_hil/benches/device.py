"""Runs commands and copies files on the device of a bench, with any labgrid driver."""

import json
import math
import re
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.child_process import ProgramResult

_COMMAND_LIMIT_S: Final = 60.0
_STOP_LIMIT_S: Final = 10.0
_ANSWER_LIMIT_S: Final = 20.0  # on top of a command's own limit
_SSH_FAILED: Final = 255  # exit code of ssh, which labgrid returns if the link breaks while a command begins
_TIMED_OUT: Final = 124  # exit code of timeout(1)
_CREDENTIALS: Final = re.compile(r"//[^/\s@]+@")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command on the device."""

    exit_code: int
    output: str
    errors: str


class Device:
    """A device with a folder for all state of the runtime. Nothing outside the folder changes.

    Attributes:
        folder: The absolute path of the folder on the device.
        python: The command that starts a Python with the runtime installed.
    """

    def __init__(self, command: Any, transfer: Any, folder: str, python: str) -> None:
        """Create the folder on the device, or empty it if it exists.

        `command` and `transfer` are active drivers with labgrid's CommandProtocol and FileTransferProtocol.
        """
        self._command, self._transfer = command, transfer
        self.folder, self.python = folder, python
        names = {"EDGEKIT_STATE": "state", "EDGEKIT_HOME": "home", "EDGEKIT_CACHE": "cache"}
        exports = " ".join(f"{name}={shlex.quote(f'{folder}/{part}')}" for name, part in names.items())
        self._prelude = (
            f"cd {shlex.quote(folder)} && export {exports} XDG_RUNTIME_DIR={shlex.quote(folder)} && "
        )
        self._started: list[int] = []
        self._own_run(f"rm -rf {shlex.quote(folder)} && mkdir -p {shlex.quote(folder)}")

    def try_run(self, command: str, limit_s: float = _COMMAND_LIMIT_S) -> Result:
        """Run a shell command on the device in `folder`, and return its result.

        Raises:
            BenchError: The device did not start the command, or it did not end within `limit_s`.
        """
        return self._own_run(f"{self._prelude}{{ {command}\n}}", limit_s)

    def run(self, command: str, limit_s: float = _COMMAND_LIMIT_S) -> str:
        """Run a shell command on the device in `folder`, and return its standard output.

        Raises:
            BenchError: The exit code is not 0, or `try_run` failed.
        """
        result = self.try_run(command, limit_s)
        if result.exit_code:
            message = result.errors.strip() or result.output.strip()
            raise BenchError(f"`{command}` ended with {result.exit_code} on the device: {message[-2000:]}")
        return result.output

    def run_python(self, code: str, *arguments: str, limit_s: float = _COMMAND_LIMIT_S) -> str:
        """Run a Python program with the runtime on the device, and return its standard output.

        Raises:
            BenchError: See `run`.
        """
        return self.run(f"{self.python} -c {shlex.join([code, *arguments])}", limit_s)

    def edgekit(self, *arguments: str, limit_s: float = _COMMAND_LIMIT_S) -> dict[str, Any]:
        """Run `edgekit-device ARGUMENTS --json` on the device, and return the printed object.

        Raises:
            BenchError: The command failed. The message includes its error message.
        """
        words = shlex.join([*arguments, "--json"])
        document: dict[str, Any] = json.loads(
            self.run(f"{self.python} -m edgekit_runtime.cli {words}", limit_s)
        )
        return document

    def run_program(
        self, argv: Sequence[str], sent: Iterable[bytes | memoryview], limit_s: float, max_output_bytes: int
    ) -> ProgramResult:
        """Run a program on the device, with the interface of `child_process.run_program`.

        `sent` contains the standard input in parts. If the output is longer than `max_output_bytes`, only
        its end is returned.

        Raises:
            BenchError: The device did not start the program, or it did not end within `limit_s`.
        """
        with tempfile.TemporaryDirectory() as folder:
            source, output = Path(folder, "input"), Path(folder, "output")
            with source.open("wb") as file:
                file.writelines(sent)
            self.put(source, "input")
            result = self.try_run(f"{shlex.join(argv)} <input >output", limit_s)
            self.get("output", output)
            printed = output.read_bytes()[-max_output_bytes:]
        last_line = (result.errors.strip().splitlines() or [""])[-1]
        return ProgramResult(result.exit_code, printed, last_line)

    def start(self, command: str, log: str) -> int:
        """Start a shell command in the background, and return its process id for `stop`.

        The output goes to the file `log` in `folder`.

        Raises:
            BenchError: See `run`.
        """
        inner = shlex.quote(f"exec {command}")
        pid = int(self.run(f"setsid nohup sh -c {inner} </dev/null >{log} 2>&1 & echo $!"))
        self._started.append(pid)
        return pid

    def stop(self, pid: int) -> None:
        """End a process with SIGTERM and wait for its end. After 10 s, end it with SIGKILL."""
        if pid in self._started:
            self._started.remove(pid)
        self.run(f"kill {pid} 2>/dev/null; {_wait_for(pid)}; kill -9 {pid} 2>/dev/null; true")

    def forget_processes(self) -> None:
        """Forget the processes from `start`. After a power cut, other processes may have the same ids."""
        self._started.clear()

    def wait(self, pid: int) -> None:
        """Wait for at most 10 s until a process on the device has ended."""
        self.run(_wait_for(pid))

    def put(self, path: Path, name: str) -> str:
        """Copy a local file to `folder` under `name`, and return its path on the device.

        Raises:
            BenchError: The file cannot be copied.
        """
        remote = f"{self.folder}/{name}"
        try:
            self._transfer.put(str(path), remote)
        except Exception as cause:
            raise BenchError(f"{path} cannot be copied to the device: {describe(cause)}") from cause
        return remote

    def trust(self, public_key: Path) -> None:
        """Trust a public key, as `edgekit-device keys trust` does, but without starting Python."""
        self.put(public_key, "bench.pub.pem")
        self.run("umask 077 && mkdir -p home/keys && cp bench.pub.pem home/keys/")

    def get(self, name: str, path: Path) -> None:
        """Copy the file `name` in `folder` to the local `path`.

        Raises:
            BenchError: The file cannot be copied.
        """
        try:
            self._transfer.get(f"{self.folder}/{name}", str(path))
        except Exception as cause:
            raise BenchError(f"{name} cannot be copied from the device: {describe(cause)}") from cause

    def close(self) -> None:
        """End the processes that `start` began, and delete the folder."""
        for pid in list(self._started):
            self.stop(pid)
        self._own_run(f"rm -rf {shlex.quote(self.folder)}")

    def _own_run(self, command: str, limit_s: float = _COMMAND_LIMIT_S) -> Result:
        # The device ends it: labgrid's SSHDriver would leave it running, and a process of ours with it.
        bounded = f"timeout -k 1 {math.ceil(limit_s)} sh -c {shlex.quote(command)}"
        try:
            output, errors, code = self._command.run(bounded, timeout=limit_s + _ANSWER_LIMIT_S)
        except Exception as cause:  # labgrid's drivers raise exceptions of any class
            raise BenchError(f"the device did not run `{command[-200:]}`: {describe(cause)}") from cause
        if code == _SSH_FAILED:
            raise BenchError(
                f"the device did not run `{command[-200:]}`: {' '.join(errors[-1:]) or 'no answer'}"
            )
        if code == _TIMED_OUT:
            raise BenchError(f"the device did not end `{command[-200:]}` within {limit_s:g} s")
        return Result(code, "\n".join(output), "\n".join(errors))


def _wait_for(pid: int) -> str:
    """Return a command that waits until a process has ended."""
    return (
        f"n=0; while kill -0 {pid} 2>/dev/null && [ $n -lt {_STOP_LIMIT_S * 10:.0f} ];"
        " do sleep 0.1; n=$((n+1)); done"
    )


def describe(cause: BaseException) -> str:
    """Return a labgrid exception as one line, with the last line of output from the failed program.

    User names and passwords in URLs are removed, because the text becomes part of evidence files.
    """
    inner = cause.__cause__
    printed = list(getattr(cause, "stdout", None) or ())
    while inner is not None:
        printed += getattr(inner, "stdout", None) or ()
        inner = inner.__cause__
    lines = [line.decode(errors="replace") if isinstance(line, bytes) else str(line) for line in printed]
    texts = [str(cause) or type(cause).__name__, *[line for line in lines if line.strip()][-1:]]
    return _CREDENTIALS.sub("//", " ".join(": ".join(texts).split()))
