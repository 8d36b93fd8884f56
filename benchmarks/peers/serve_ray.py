"""Serve ONNX models with Ray Serve: python serve_ray.py FOLDER PORT.

One replica reads and writes the Open Inference Protocol as `serve_starlette.py` does, behind Ray's proxy.
Ray's own processes listen on all addresses, so start it in a network namespace.
"""

import os

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # before it is imported

import json
import sys
import threading
from pathlib import Path

import numpy as np
import onnxruntime
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

JSON_BYTES = "Inference-Header-Content-Length"


@serve.deployment(num_replicas=1, max_ongoing_requests=16, ray_actor_options={"num_cpus": 0})
class Models:
    def __init__(self, folder: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._sessions = {
            path.stem: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            for path in Path(folder).glob("*.onnx")
        }

    async def __call__(self, request: Request) -> Response:
        """Answer /v2/models/NAME/infer."""
        name = request.url.path.split("/")[-2]
        body, json_bytes = await request.body(), int(request.headers[JSON_BYTES])
        (tensor,) = json.loads(body[:json_bytes])["inputs"]
        x = np.frombuffer(body, np.float32, offset=json_bytes).reshape(tensor["shape"])
        (y,) = self._sessions[name].run(None, {"x": x})
        output = {"name": "y", "datatype": "FP32", "shape": y.shape}
        output["parameters"] = {"binary_data_size": y.nbytes}
        text = json.dumps({"model_name": name, "outputs": [output]}).encode()
        return Response(text + y.tobytes(), 200, {JSON_BYTES: str(len(text))}, "application/octet-stream")


if __name__ == "__main__":
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=2,
        object_store_memory=128 << 20,
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    serve.run(Models.bind(sys.argv[1]), route_prefix="/", blocking=False)
    print("ready", flush=True)
    threading.Event().wait()
