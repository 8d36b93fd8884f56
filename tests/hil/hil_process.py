"""`edgekit hil` as a process of its own."""

import os
import subprocess
import sys


def start_hil(*arguments: str) -> "subprocess.Popen[str]":
    """Start `edgekit hil ARGUMENTS`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "edgekit_cli", "hil", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def run_hil(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `edgekit hil ARGUMENTS` to its end."""
    with start_hil(*arguments) as process:
        output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
