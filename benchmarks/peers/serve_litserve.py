"""Serve one ONNX model with LitServe: python serve_litserve.py MODEL PORT SHAPE (as 1,1,8,8).

The request's body is {"x": flat list} and the answer the same, since LitServe reads JSON or forms only.
"""

import sys

import litserve
import numpy as np
import onnxruntime


class OrtApi(litserve.LitAPI):  # type: ignore[misc]  # LitServe is not installed where types are checked
    """The model of the command line, with one thread."""

    def setup(self, device: str) -> None:  # noqa: ARG002  # LitServe passes it by name
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(sys.argv[1], options)
        self._name = self._session.get_inputs()[0].name
        self._shape = [int(size) for size in sys.argv[3].split(",")]

    def decode_request(self, request: dict[str, list[float]]) -> np.ndarray:
        return np.asarray(request["x"], np.float32).reshape(self._shape)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self._session.run(None, {self._name: x})[0]

    def encode_response(self, output: np.ndarray) -> dict[str, list[float]]:
        return {"y": output.ravel().tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(OrtApi(), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False)
