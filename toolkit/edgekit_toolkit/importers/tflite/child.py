"""The process in which `trial` runs a model: `python -m edgekit_toolkit.importers.tflite.child BYTES`.

It loads `model.tflite` in the working folder and runs it on zeros, with at most BYTES of address space. It
exits with 0 on success. Otherwise, it prints the reason to the standard error and exits with 1. If outputs
have other shapes than the file states, it runs the model again on noise, and prints a JSON list of these
outputs to the standard output, see `trial.MadeOutput`. It does not import edgekit, so that it starts fast.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter


def _main(limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    interpreter = Interpreter(model_content=Path("model.tflite").read_bytes(), num_threads=1)
    interpreter.allocate_tensors()
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    recorded = {detail["index"]: detail["shape"].tolist() for detail in outputs}
    free = any(size < 0 for detail in inputs for size in detail["shape_signature"])
    try:
        shapes = _run(interpreter, inputs, recorded, noise=False)
    except (ValueError, RuntimeError):
        if not free:  # it may run with other sizes
            raise
        return
    if shapes != recorded:
        try:
            again = _run(interpreter, inputs, recorded, noise=True)
        except (ValueError, RuntimeError):  # not every model takes noise
            again = shapes
        differing = (index for index in shapes if shapes[index] != recorded[index])
        json.dump(
            [{"index": index, "first": shapes[index], "second": again[index]} for index in differing],
            sys.stdout,
        )


def _run(
    interpreter: Any, inputs: list[dict[str, Any]], outputs: dict[int, list[int]], *, noise: bool
) -> dict[int, list[int]]:
    """Return the shape of each output; integer inputs are zeros, since they may be indices."""
    for detail in inputs:
        value = np.zeros(detail["shape"], detail["dtype"] if detail["dtype"] is not np.bytes_ else np.float32)
        if noise and value.dtype.kind == "f":
            value += np.asarray(np.random.default_rng(0).normal(size=value.shape), value.dtype)
        if detail["dtype"] is not np.bytes_:  # strings are empty at first
            interpreter.set_tensor(detail["index"], value)
    interpreter.invoke()
    return {index: list(interpreter.get_tensor(index).shape) for index in outputs}


if __name__ == "__main__":
    try:
        _main(int(sys.argv[1]))
    except Exception as error:  # the parent reports it; a traceback of this process would help nobody
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
