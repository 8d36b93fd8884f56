"""A trial run of a `.tflite` model in a process of its own: a file that crashes the engine ends that one."""

import json
import tempfile
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import ModelError
from edgekit_runtime.system.child_process import ChildProcess, describe_end
from edgekit_toolkit.importers.tflite.shapes import MadeOutput

_MODULE: Final = "edgekit_toolkit.importers.tflite.child"


def try_model(content: bytes, *, max_memory_bytes: int, time_limit_s: float) -> list[MadeOutput]:
    """Return the outputs whose shape is not the recorded one, once LiteRT has loaded the model and run it.

    Args:
        content: the file.
        max_memory_bytes: address space of the process.
        time_limit_s: the process is ended when it takes longer.

    Raises:
        ModelError: LiteRT refuses the model or fails on it, crashes, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="edgekit-tflite-") as name:
        folder = Path(name)
        (folder / "model.tflite").write_bytes(content)
        with ChildProcess(_MODULE, str(max_memory_bytes), folder=folder, output="keep") as child:
            code = child.wait(time_limit_s)
            output, last_line = child.output, child.last_line or "no reason given"
    if code is None:
        raise ModelError(
            f"LiteRT did not finish one run within {time_limit_s:g} s; the file is damaged, or too large for"
            " edge devices"
        )
    if code < 0:
        raise ModelError(
            f"LiteRT crashed on it, ended {describe_end(code)}: an operator has sizes or options that do not"
            " fit; the file is damaged, convert the model again"
        )
    if code:
        raise ModelError(f"LiteRT refuses the model: {last_line}; convert the model again")
    made: list[MadeOutput] = json.loads(output or b"[]")
    return made
