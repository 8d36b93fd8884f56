"""`edgekit hil`: as a process of its own, or in this one."""

import contextlib
import io
import os
import subprocess
import sys

from edgekit_cli.cli import main


def start_hil(*arguments: str) -> "subprocess.Popen[str]":
    """Start `edgekit hil ARGUMENTS` as a process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "edgekit_cli", "hil", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def run_hil(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `edgekit hil ARGUMENTS` to its end, in this process: its pytest runs within the present one."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main(["hil", *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())
