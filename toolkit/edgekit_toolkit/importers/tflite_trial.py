"""A trial run of a `.tflite` model in a process of its own: a file that crashes the engine ends that one."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import ModelError

_CHILD: Final = "edgekit_toolkit.importers.tflite_child"


def try_model(content: bytes, *, max_memory_bytes: int, time_limit_s: float) -> None:
    """Return when LiteRT loads the model and runs it on zeros.

    Args:
        content: the file.
        max_memory_bytes: address space of the process.
        time_limit_s: the process is ended when it takes longer.

    Raises:
        ModelError: LiteRT refuses the model or fails on it, crashes, or takes too long.
    """
    command = [sys.executable, "-m", _CHILD, str(max_memory_bytes)]
    try:
        done = subprocess.run(
            command, input=content, capture_output=True, check=False, timeout=time_limit_s, env=_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"LiteRT did not finish one run within {time_limit_s:g} s; the file is damaged, or too large for"
            " edge devices"
        ) from error
    if done.returncode < 0:
        raise ModelError(
            f"LiteRT crashed on it ({signal.Signals(-done.returncode).name}): an operator has sizes or"
            " options that do not fit; the file is damaged, convert the model again"
        )
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        raise ModelError(f"LiteRT refuses the model: {lines[-1]}; convert the model again")


def _environment() -> dict[str, str]:
    # Its own modules, wherever this process found them.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)}
