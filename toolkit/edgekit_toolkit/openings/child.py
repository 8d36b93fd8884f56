"""The process that opens models: `python -m edgekit_toolkit.openings.child CHANNEL`, see `model_opening`.

For each request, a line of JSON, it opens a model as a device would, and runs it if the request has inputs.
It answers with an empty object whether or not the engine refused.
"""

import contextlib
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_runtime.sessions.backends import open_model
from edgekit_runtime.system.child_process import open_channel


def _try(request: Mapping[str, Any]) -> None:
    with Path(request["model"]).open("rb") as file:
        model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if request["engine"] == "onnx":
        import onnx

        onnx.shape_inference.infer_shapes(onnx.load_model_from_string(bytes(model)), data_prop=True)
        return
    with contextlib.closing(open_model(request["engine"], model, request["options"], 1)) as session:
        if request["inputs"]:
            with np.load(request["arrays"]) as arrays:
                session.run(dict(zip(request["inputs"], arrays.values(), strict=True)))


if __name__ == "__main__":
    with open_channel() as channel, channel.makefile("rb") as requests:
        for line in requests:
            with contextlib.suppress(Exception):  # an engine that only refuses a model
                _try(json.loads(line))
            channel.sendall(b"{}\n")
