"""Serve one ONNX model with BentoML: python serve_bentoml.py MODEL PORT.

The request's body is {"x": nested list}, the form that its own client sends to a numpy API.
"""

import os
import sys
from pathlib import Path

import bentoml
import numpy as np
import onnxruntime


@bentoml.service(workers=1)
class Small:
    """The model of $BENCHMARK_MODEL, with one thread."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(os.environ["BENCHMARK_MODEL"], options)
        self._name = self._session.get_inputs()[0].name

    @bentoml.api
    def predict(self, x: np.ndarray) -> np.ndarray:
        return self._session.run(None, {self._name: x.astype(np.float32, copy=False)})[0]


if __name__ == "__main__":
    environment = {
        **os.environ,
        "BENCHMARK_MODEL": str(Path(sys.argv[1]).resolve()),
        "BENTOML_DO_NOT_TRACK": "1",
    }
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-m", "bentoml", "serve", "serve_bentoml:Small", "--port", sys.argv[2]]
    command += ["--host", "127.0.0.1", "--working-dir", str(here)]
    os.chdir(here)
    os.execve(sys.executable, command, environment)  # noqa: S606  # no shell; ended by its own process id
