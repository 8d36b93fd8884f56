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

from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.child_process import open_channel


def _try(request: Mapping[str, Any]) -> None:
    with Path(request["model"]).open("rb") as file:
        model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if request["engine"] == "onnx":
        import onnx

        onnx.shape_inference.infer_shapes(onnx.load_model_from_string(bytes(model)), data_prop=True)
        return
    with contextlib.closing(_open(request["engine"], model, request["options"])) as session:
        if request["inputs"]:
            with np.load(request["arrays"]) as arrays:
                session.run(dict(zip(request["inputs"], arrays.values(), strict=True)))


def _open(engine: str, model: memoryview, options: Mapping[str, Any]) -> Session:
    if engine == "litert":
        from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession

        return LiteRtSession(model, LiteRtOptions(threads=1))
    from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

    return OrtSession(model, read_options(OrtOptions, "ort", options, 1))


if __name__ == "__main__":
    with open_channel() as channel, channel.makefile("rb") as requests:
        for line in requests:
            with contextlib.suppress(Exception):  # an engine that only refuses a model
                _try(json.loads(line))
            channel.sendall(b"{}\n")
