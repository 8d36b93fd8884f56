"""Runs a tail in Triton's Python backend. `edgekit offload export` copies this file as `model.py`.

It uses onnxruntime, and batches the requests that Triton's dynamic batching collects. It also decodes images
and sound if the configuration says so. These files may be malicious, so it uses the decoders of `edgekit
offload serve`, which the export copies to the same folder.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

_MAX_BYTES = 64 << 20  # limit of a decoded file if the model takes any size
_DTYPES = {"tensor(uint8)": "uint8", "tensor(int16)": "int16", "tensor(float)": "float32"}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        """Open the model. numpy 2 is rejected, because it makes this backend return empty tensors."""
        if int(np.__version__.split(".")[0]) >= 2:
            raise pb_utils.TritonModelException(
                f"numpy is {np.__version__}, expected below 2: pip install -r requirements.txt"
            )
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"], args["model_version"], "model.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=_list_providers(args))
        self._specs = {spec.name: spec for spec in self._session.get_inputs()}
        self._inputs = list(self._specs)
        self._outputs = [spec.name for spec in self._session.get_outputs()]
        self._is_batched = int(config["max_batch_size"]) > 0
        decode = config.get("parameters", {}).get("decode", {}).get("string_value", "{}")
        self._decode: dict[str, str] = json.loads(decode)
        if self._decode:
            sys.path.insert(0, str(path.parent))  # before an edgekit of another version
            from edgekit_runtime.codecs import media

            self._media = media

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request. Requests are run together if their rows can be concatenated."""
        feeds = [self._read(request) for request in requests]
        arrays = [feed for feed in feeds if isinstance(feed, dict)]
        joined = self._run_together(arrays) if self._is_batched and len(arrays) > 1 else None
        answers = iter(joined if joined is not None else [self._run(feed) for feed in arrays])
        return [next(answers) if isinstance(feed, dict) else _refuse(feed) for feed in feeds]

    def _read(self, request: Any) -> dict[str, Any] | str:
        arrays = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
        try:
            for name, codec in self._decode.items():
                arrays[name] = self._decode_file(codec, arrays[name].tobytes(), self._specs[name])
        except Exception as error:  # libraries raise any error for hostile files
            return f"{name}: {error}"
        return arrays

    def _decode_file(self, codec: str, data: bytes, spec: Any) -> Any:
        """Return a photograph as uint8 [1, H, W, 3 or 1], or sound as int16 or float32 [1, T].

        Args:
            codec: codec as in a cut table, such as `jpeg`.
            data: a file.
            spec: the model's input as onnxruntime describes it; the result has no leading 1 if it has none.

        Raises:
            EdgekitError: the file is malformed, of another kind, or larger than the model's input.
        """
        parsed = self._media.MediaCodec.parse(codec)
        sizes = spec.shape[-parsed.rank :]
        dtype = _DTYPES[spec.type]
        is_fixed = all(isinstance(size, int) for size in sizes)
        most_bytes = math.prod(sizes) * np.dtype(dtype).itemsize if is_fixed else _MAX_BYTES
        channels = 1 if sizes[-1] == 1 else 3
        array = self._media.decode_media(parsed, data, dtype=dtype, max_bytes=most_bytes, channels=channels)
        return array[None] if len(spec.shape) > parsed.rank else array

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


def _list_providers(args: dict[str, str]) -> list[Any]:
    """Return onnxruntime's providers for the kind and the device of this instance."""
    on_processor = ["CPUExecutionProvider"]
    if args.get("model_instance_kind") != "GPU":
        return on_processor
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        print(
            "this onnxruntime has no CUDA (pip install -r requirements.txt); using the processor",
            file=sys.stderr,
        )
        return on_processor
    onnxruntime.preload_dlls()
    device = {"device_id": args["model_instance_device_id"], "use_tf32": "0"}
    return [("CUDAExecutionProvider", device), *on_processor]


def _refuse(message: str) -> Any:
    return pb_utils.InferenceResponse([], error=pb_utils.TritonError(message))
