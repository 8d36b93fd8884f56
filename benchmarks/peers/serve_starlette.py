"""Serve ONNX models with Starlette and uvicorn: python serve_starlette.py FOLDER PORT.

POST /NAME with the bytes of one float32 row runs FOLDER/NAME.onnx, and answers with the bytes of its output.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
sessions = {
    path.stem: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for path in Path(sys.argv[1]).glob("*.onnx")
}


async def infer(request: Request) -> Response:
    """Run one row on the loop, as the shortest way there is."""
    row = np.frombuffer(await request.body(), np.float32)[None]
    (output,) = sessions[request.path_params["name"]].run(None, {"x": row})
    return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    app = Starlette(routes=[Route("/{name}", infer, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", access_log=False)
