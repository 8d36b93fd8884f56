"""Runs a `.tflite` model once in a child process, so that a crash of the engine ends only the child.

The run also determines the shapes of the outputs. If a shape depends on values, it is not known before a run,
and converters often write 1 for its sizes.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict

from edgekit_runtime.errors import ModelError
from edgekit_runtime.system.child_process import ChildProcess, describe_end
from edgekit_toolkit.tflite.flatbuffer import Model, Tensor, shape_of

_MODULE: Final = "edgekit_toolkit.importers.tflite.child"


class MadeOutput(TypedDict):
    """The shapes of one output in two runs with different values.

    Attributes:
        index: The index of the tensor in the first subgraph.
        first, second: The shapes after the first and the second run.
    """

    index: int
    first: list[int]
    second: list[int]


def try_model(content: bytes, *, max_memory_bytes: int, time_limit_s: float) -> list[MadeOutput]:
    """Run a model with LiteRT in a child process. Return the outputs whose shapes differ from the file.

    `max_memory_bytes` limits the address space of the process. It is killed after `time_limit_s`.

    Raises:
        ModelError: LiteRT refuses the model, fails on it, crashes, or takes too long.
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
    outputs: list[MadeOutput] = json.loads(output or b"[]")
    return outputs


def mend_output_shapes(model: Model, outputs: Sequence[MadeOutput]) -> bool:
    """Correct the shapes of outputs in place. Return whether any shape was changed.

    If the size of an axis differs between the two runs of a `MadeOutput`, the axis becomes free. Axes that
    are free in the file stay free.
    """
    changed = False
    for output in outputs:
        tensor: Tensor = model.subgraphs[0].tensors[output["index"]]
        recorded = shape_of(tensor)
        signature = (
            () if tensor.shapeSignature is None else tuple(int(size) for size in tensor.shapeSignature)
        )
        free = signature or recorded
        first, second = output["first"], output["second"]
        same_rank = len(free) == len(first)
        sizes = [
            -1 if size != other or (same_rank and own < 0) else size
            for size, other, own in zip(first, second, free if same_rank else first, strict=True)
        ]
        if sizes == list(free):
            continue
        tensor.shape = first
        tensor.shapeSignature = sizes if -1 in sizes else None
        changed = True
    return changed
