"""A tail in Triton's Python backend. `edgekit offload export` copies this file as `model.py`.

It runs onnxruntime itself, joins the requests that Triton's dynamic batching collects, and decodes
photographs and sound where the configuration says so.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance of the tail."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the model; refuse numpy 2, with which this backend answers 200 with empty tensors."""
        if int(np.__version__.split(".")[0]) >= 2:
            raise pb_utils.TritonModelException(
                f"numpy is {np.__version__}, expected below 2: pip install -r requirements.txt"
            )
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"], args["model_version"], "model.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = [spec.name for spec in self._session.get_inputs()]
        self._outputs = [spec.name for spec in self._session.get_outputs()]
        self._is_batched = int(config["max_batch_size"]) > 0
        decode = config.get("parameters", {}).get("decode", {}).get("string_value", "{}")
        self._decode: dict[str, str] = json.loads(decode)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests, together where their rows can be joined."""
        feeds = [self._read(request) for request in requests]
        arrays = [feed for feed in feeds if isinstance(feed, dict)]
        joined = self._run_together(arrays) if self._is_batched and len(arrays) > 1 else None
        answers = iter(joined if joined is not None else [self._run(feed) for feed in arrays])
        return [next(answers) if isinstance(feed, dict) else _refuse(feed) for feed in feeds]

    def _read(self, request: Any) -> dict[str, Any] | str:
        """Return the arrays of a request, or what is wrong with it."""
        arrays = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
        try:
            for name, codec in self._decode.items():
                arrays[name] = _decode(codec.split(":")[0], arrays[name].tobytes())
        except (ValueError, OSError, RuntimeError) as error:
            return str(error)
        return arrays

    def _run_together(self, feeds: list[dict[str, Any]]) -> list[Any] | None:
        """Return the answers of one run; None if the requests differ in shape, or the run failed."""
        try:
            whole = {name: np.concatenate([feed[name] for feed in feeds]) for name in self._inputs}
            arrays = self._session.run(self._outputs, whole)
        except Exception:  # one of them is wrong: each alone says which
            return None
        rows = [len(feed[self._inputs[0]]) for feed in feeds]
        if any(len(array) != sum(rows) for array in arrays):
            return None
        ends = np.cumsum(rows)[:-1]
        parts = [np.split(array, ends) for array in arrays]
        return [self._answer([part[index] for part in parts]) for index in range(len(feeds))]

    def _run(self, feed: dict[str, Any]) -> Any:
        try:
            return self._answer(self._session.run(self._outputs, feed))
        except Exception as error:  # onnxruntime has no common class of its errors
            return _refuse(str(error))

    def _answer(self, arrays: list[Any]) -> Any:
        named = zip(self._outputs, arrays, strict=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in named])


def _decode(codec: str, data: bytes) -> Any:
    """Return a photograph as uint8 [1, H, W, 3], or sound as int16 [1, T]."""
    if codec == "opus":
        import soundfile

        return soundfile.read(io.BytesIO(data), dtype="int16")[0][None]
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data), formats=[codec.upper()]).convert("RGB"))[None]


def _refuse(message: str) -> Any:
    return pb_utils.InferenceResponse([], error=pb_utils.TritonError(message))
