"""Serve ONNX models with Starlette and uvicorn: python serve_starlette.py FOLDER PORT.

Open Inference Protocol v2 with binary tensors, as short as it can be: one input `x`, one output `y`, float32.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

JSON_BYTES = "Inference-Header-Content-Length"

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
sessions = {
    path.stem: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for path in Path(sys.argv[1]).glob("*.onnx")
}


async def infer(request: Request) -> Response:
    """Run one request on the loop, as the shortest way there is."""
    body, json_bytes = await request.body(), int(request.headers[JSON_BYTES])
    (tensor,) = json.loads(body[:json_bytes])["inputs"]
    x = np.frombuffer(body, np.float32, offset=json_bytes).reshape(tensor["shape"])
    (y,) = sessions[request.path_params["name"]].run(None, {"x": x})
    output = {"name": "y", "datatype": "FP32", "shape": y.shape}
    output["parameters"] = {"binary_data_size": y.nbytes}
    text = json.dumps({"model_name": request.path_params["name"], "outputs": [output]}).encode()
    return Response(text + y.tobytes(), 200, {JSON_BYTES: str(len(text))}, "application/octet-stream")


if __name__ == "__main__":
    app = Starlette(routes=[Route("/v2/models/{name}/infer", infer, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", access_log=False)
