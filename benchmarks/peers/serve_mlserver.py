"""Serve one ONNX model with MLServer: python serve_mlserver.py MODEL PORT WORKERS.

WORKERS is MLServer's `parallel_workers`: 0 runs the model in the server's own process, which is its fastest
setting here; 1 is its default and isolates the model.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import onnxruntime
from mlserver import MLModel
from mlserver.cli.main import main
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OrtModel(MLModel):  # type: ignore[misc]  # MLServer is not installed where types are checked
    """The model of `parameters.uri`, with one thread."""

    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(self.settings.parameters.uri, options)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run it on the one input of the request."""
        given = payload.inputs[0]
        array = NumpyCodec.decode_input(given).astype("float32", copy=False)
        names = [output.name for output in self._session.get_outputs()]
        values = self._session.run(names, {given.name: array})
        outputs = [NumpyCodec.encode_output(name, value) for name, value in zip(names, values, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=outputs)


if __name__ == "__main__":
    model, port, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "host": "127.0.0.1",
            "http_port": port,
            "grpc_port": port + 1,
            "metrics_endpoint": None,
            "parallel_workers": workers,
            "debug": False,
        }
        Path(folder, "settings.json").write_text(json.dumps(settings))
        Path(folder, "model-settings.json").write_text(
            json.dumps(
                {
                    "name": "small",
                    "implementation": "serve_mlserver.OrtModel",
                    "parameters": {"uri": str(Path(model).resolve())},
                }
            )
        )
        here = str(Path(__file__).resolve().parent)
        sys.path.insert(0, here)
        os.environ["PYTHONPATH"] = here
        sys.argv = ["mlserver", "start", folder]
        main()
