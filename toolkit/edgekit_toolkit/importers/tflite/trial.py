"""A trial run of a `.tflite` model in a process of its own: a file that crashes the engine ends that one."""

import json
import tempfile
from pathlib import Path

from edgekit_runtime.errors import ModelError
from edgekit_runtime.system.child_process import describe_end
from edgekit_toolkit.child_process import run_module
from edgekit_toolkit.importers.tflite.shapes import MadeOutput


def try_model(content: bytes, *, max_memory_bytes: int, time_limit_s: float) -> list[MadeOutput]:
    """Return the outputs whose shape is not the recorded one, once LiteRT has loaded the model and run it.

    Args:
        content: the file.
        max_memory_bytes: address space of the process.
        time_limit_s: the process is ended when it takes longer.

    Raises:
        ModelError: LiteRT refuses the model or fails on it, crashes, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="edgekit-tflite-") as folder:
        ended = run_module(
            "edgekit_toolkit.importers.tflite.child",
            str(max_memory_bytes),
            folder=Path(folder),
            time_limit_s=time_limit_s,
            given=content,
        )
    if ended is None:
        raise ModelError(
            f"LiteRT did not finish one run within {time_limit_s:g} s; the file is damaged, or too large for"
            " edge devices"
        )
    if ended.exit_code < 0:
        raise ModelError(
            f"LiteRT crashed on it, ended {describe_end(ended.exit_code)}: an operator has sizes or options"
            " that do not fit; the file is damaged, convert the model again"
        )
    if ended.exit_code:
        raise ModelError(
            f"LiteRT refuses the model: {ended.last_words or 'no reason given'}; convert the model again"
        )
    made: list[MadeOutput] = json.loads(ended.output or b"[]")
    return made
