"""A tail in Triton's Python backend. `edgekit offload export` copies this file as `model.py`.

It runs onnxruntime itself, joins the requests that Triton's dynamic batching collects, and decodes
photographs and sound where the configuration says so.
"""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

_MAX_BYTES = 64 << 20  # limit of a decoded file if the model takes any size


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
        self._specs = {spec.name: spec for spec in self._session.get_inputs()}
        self._inputs = list(self._specs)
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
        """Return the arrays of a request, or its fault."""
        arrays = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
        try:
            for name, codec in self._decode.items():
                spec = self._specs[name]
                arrays[name] = _decode(codec.split(":")[0], arrays[name].tobytes(), spec.shape, spec.type)
        except Exception as error:  # libraries raise any error for hostile files
            return f"{name}: {error}"
        return arrays

    def _run_together(self, feeds: list[dict[str, Any]]) -> list[Any] | None:
        """Return the answers of one run; None if the requests differ in shape, or if the run failed."""
        try:
            whole = {name: np.concatenate([feed[name] for feed in feeds]) for name in self._inputs}
            arrays = self._session.run(self._outputs, whole)
        except Exception:  # a request is wrong: single runs show which
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
        except Exception as error:  # onnxruntime's errors have no common class
            return _refuse(str(error))

    def _answer(self, arrays: list[Any]) -> Any:
        named = zip(self._outputs, arrays, strict=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in named])


def _decode(codec: str, data: bytes, shape: list[Any], kind: str) -> Any:
    """Return a photograph as uint8 [1, H, W, 3 or 1], or sound as int16 or float32 [1, T].

    Args:
        codec: `jpeg`, `webp` or `opus`.
        data: a file; the size that it states is checked before the memory is taken.
        shape: shape of the model's input; without the leading 1 if the model has none.
        kind: element type of the model's input as onnxruntime names it.

    Raises:
        ValueError: the file is larger than the model's input.
    """
    rank = 1 if codec == "opus" else 3
    sizes = shape[-rank:]
    is_fixed = all(isinstance(size, int) for size in sizes)
    dtype = "float32" if kind == "tensor(float)" else "int16" if rank == 1 else "uint8"
    most = math.prod(sizes) if is_fixed else _MAX_BYTES // np.dtype(dtype).itemsize
    if rank == 1:
        import soundfile

        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_size(file.frames, most)
            array = file.read(file.frames, dtype=dtype)
    else:
        from PIL import Image

        channels = 1 if sizes[-1] == 1 else 3
        if codec == "webp":  # its reader takes the memory for the stated size at once
            _check_size(math.prod(_read_webp_size(data)) * channels, most)
        image = Image.open(io.BytesIO(data), formats=[codec.upper()])
        _check_size(image.width * image.height * channels, most)
        array = np.asarray(image.convert("L" if channels == 1 else "RGB"))
        array = array[:, :, None] if channels == 1 else array
    return array[None] if len(shape) > rank else array


def _check_size(values: int, most: int) -> None:
    if values > most:
        raise ValueError(f"the file holds {values} values, the model takes {most}")


def _read_webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height as a WebP states them (RFC 9649, sections 2.5 to 2.7)."""
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    bits = int.from_bytes(data[21:25], "little")
    if data[12:16] == b"VP8L":
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _refuse(message: str) -> Any:
    return pb_utils.InferenceResponse([], error=pb_utils.TritonError(message))
