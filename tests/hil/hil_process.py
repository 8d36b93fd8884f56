"""`edgekit hil`: as a process of its own, see `tests.fork_server`, or in this one."""

import contextlib
import io
import subprocess
import sys

from tests.fork_server import host_server

from edgekit_cli.cli import main
from edgekit_runtime.system.child_process import child_environment


def start_hil(*arguments: str) -> "subprocess.Popen[str]":
    """Start `edgekit hil ARGUMENTS` as a process."""
    command = [sys.executable, "-m", "edgekit_cli", "hil", *arguments]
    pipe = subprocess.PIPE
    return host_server().popen(command, env=child_environment(), stdout=pipe, stderr=pipe, text=True)


def run_hil(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `edgekit hil ARGUMENTS` to its end, in this process: its pytest runs within the present one."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main(["hil", *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())
