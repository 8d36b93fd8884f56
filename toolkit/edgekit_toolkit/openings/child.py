"""The child process of `model_opening`: `python -m edgekit_toolkit.openings.child CHANNEL`.

A request is a line of JSON. For each request, the process opens a model as a device does, and runs it on the
samples of the request. The reply is an empty object, even if the engine refuses the model.
"""

import contextlib
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgekit_runtime.sessions.backends import open_model
from edgekit_runtime.system.child_process import open_channel

_THREADS: Final = 2  # some faults of an engine need more than one


def _try(request: Mapping[str, Any]) -> None:
    with Path(request["model"]).open("rb") as file:
        model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if request["engine"] == "onnx":
        import onnx

        onnx.shape_inference.infer_shapes(onnx.load_model_from_string(bytes(model)), data_prop=True)
        return
    with contextlib.closing(open_model(request["engine"], model, request["options"], _THREADS)) as session:
        if request["inputs"]:
            with np.load(request["arrays"]) as arrays:
                values = iter(arrays.values())
                for names in request["inputs"]:
                    session.run({name: next(values) for name in names})


if __name__ == "__main__":
    with open_channel() as channel, channel.makefile("rb") as requests:
        for line in requests:
            with contextlib.suppress(Exception):  # an engine that only refuses a model
                _try(json.loads(line))
            channel.sendall(b"{}\n")
