"""The process in which `tflite_trial` runs a model: `python -m edgekit_toolkit.importers.tflite_child BYTES`.

It reads the model from the standard input, loads it and runs it once on zeros, with at most BYTES of address
space. It exits with 0 where that worked, or prints why not to the standard error and exits with 1. It imports
nothing of ours, so that it starts fast.
"""

import resource
import sys

import numpy as np
from ai_edge_litert.interpreter import Interpreter


def _main(limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    interpreter = Interpreter(model_content=sys.stdin.buffer.read(), num_threads=1)
    interpreter.allocate_tensors()
    free = False
    for detail in interpreter.get_input_details():
        free = free or any(size < 0 for size in detail["shape_signature"])
        if detail["dtype"] is not np.bytes_:  # strings are empty at first
            interpreter.set_tensor(detail["index"], np.zeros(detail["shape"], detail["dtype"]))
    try:
        interpreter.invoke()
    except (ValueError, RuntimeError):
        if not free:  # with other sizes it may run
            raise
    for detail in interpreter.get_output_details():
        interpreter.get_tensor(detail["index"])


if __name__ == "__main__":
    try:
        _main(int(sys.argv[1]))
    except Exception as error:  # the parent reports it; a traceback of this process would help nobody
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
