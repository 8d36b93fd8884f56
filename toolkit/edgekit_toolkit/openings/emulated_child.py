"""The child process of `emulated_processor`: `python -m …openings.emulated_child CHANNEL`.

A request contains the path of a model to open, or inputs for the open model, or both. The reply contains the
outputs, or the error message of the engine.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.sessions.backends import open_model
from edgekit_runtime.system.child_process import open_channel

_THREADS: Final = 1  # splitting a sum among threads changes its last bits


def to_json(array: NDArray[Any]) -> tuple[str, Sequence[int], str]:
    """Return the dtype, shape and base64 content of an array. `from_json` is the inverse."""
    return array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()


def from_json(value: tuple[str, Sequence[int], str]) -> NDArray[Any]:
    dtype, shape, content = value
    return np.frombuffer(base64.b64decode(content), dtype).reshape(shape)


def _serve() -> None:
    session: Any = None
    with open_channel() as channel, channel.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            answer: dict[str, Any] = {}
            try:
                if "model" in request:
                    content = Path(request["model"]).read_bytes()
                    session = open_model(request["engine"], content, {}, _THREADS)
                feeds: Mapping[str, Any] = request.get("inputs", {})
                if feeds:
                    outputs = session.run({name: from_json(value) for name, value in feeds.items()})
                    answer["outputs"] = [to_json(outputs[spec.name]) for spec in session.outputs]
            except Exception as cause:
                answer["refusal"] = str(cause) or type(cause).__name__
            channel.sendall(f"{json.dumps(answer)}\n".encode("ascii"))


if __name__ == "__main__":
    _serve()
