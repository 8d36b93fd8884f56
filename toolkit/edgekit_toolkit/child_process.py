"""What may crash, hang or take all memory runs here: a module of ours in a process of its own."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgekit_runtime.system.child_process import child_environment


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
        exit_code: negative for the signal that ended it.
        output: what it wrote to the standard output.
        last_words: the last line of its standard error; empty where it wrote nothing.
    """

    exit_code: int
    output: bytes
    last_words: str


def run_module(
    module: str,
    *arguments: str,
    folder: Path,
    time_limit_s: float,
    given: bytes = b"",
    variables: Mapping[str, str] | None = None,
) -> Ended | None:
    """Run `python -m MODULE ARGUMENTS` until it ends; returns None where it was killed at the time limit.

    Args:
        module: of ours.
        arguments: of the command line.
        folder: to run in; of ours too, since Python looks there first for what the module imports.
        time_limit_s: the process is killed when it takes longer.
        given: to its standard input.
        variables: of the environment, beside those of this process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=given,
            capture_output=True,
            check=False,
            timeout=time_limit_s,
            cwd=folder,
            env={**child_environment(), **(variables or {})},
        )
    except subprocess.TimeoutExpired:
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return Ended(done.returncode, done.stdout, lines[-1] if lines else "")
