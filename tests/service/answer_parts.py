"""A detector of red and green cells, and requests with media."""

import functools
import http.client
import io
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from PIL import Image
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Manifest_, Running, write_signed

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.package.manifest_entries import TaskChoice

Array = np.ndarray[Any, np.dtype[Any]]

CELL = 16
SIDE = 64
LABELS = b"red\ngreen\n"
DETECTION = TaskChoice("detection", {"layout": "scored", "boxes": "corners"})
LETTERBOX = {"letterbox": [SIDE, SIDE], "fill": 0, "align": "corner", "scale": 1}


def make_cell_detector(shift: int = 0) -> bytes:
    """Return a model: the mean red and green of each cell of 16 pixels are the scores of the cell's box.

    It takes `pixels` float [N, 3, 64, 64], 0..255, and gives `boxes` [N, 4 + 2, 16] with corners, which are
    so many pixels too far to the right and down.
    """
    helper = onnx.helper
    top, left = (values.ravel() * CELL for values in np.mgrid[: SIDE // CELL, : SIDE // CELL])
    corners = np.stack([left, top, left + CELL, top + CELL]).astype(np.float32)[None] + np.float32(shift)
    weights = {
        "corners": corners,
        "begin": np.array([0], np.int64),
        "end": np.array([2], np.int64),
        "channel": np.array([1], np.int64),
        "shape": np.array([0, 2, -1], np.int64),
        "white": np.array([255], np.float32),
        "zero": np.array([0], np.float32),
    }
    nodes = [
        helper.make_node(
            "AveragePool", ["pixels"], ["means"], kernel_shape=[CELL, CELL], strides=[CELL, CELL]
        ),
        helper.make_node("Slice", ["means", "begin", "end", "channel"], ["both"]),
        helper.make_node("Div", ["both", "white"], ["shares"]),
        helper.make_node("Reshape", ["shares", "shape"], ["scores"]),
        helper.make_node("ReduceMean", ["scores"], ["mean"], axes=[1, 2], keepdims=1),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Add", ["corners", "nothing"], ["places"]),
        helper.make_node("Concat", ["places", "scores"], ["boxes"], axis=1),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "cells",
        [helper.make_tensor_value_info("pixels", kind, ["N", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("boxes", kind, ["N", 6, corners.shape[2]])],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


@functools.cache
def make_golden(shift: int) -> tuple[bytes, Array, Array]:
    """Return the detector, its golden input and its golden output."""
    content = make_cell_detector(shift)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, SIDE, SIDE)).astype(np.float32)
    (boxes,) = onnxruntime.InferenceSession(content).run(None, {"pixels": pixels})
    return content, pixels, boxes


def write_cell_detector(
    maker: PackageMaker,
    path: Path,
    *,
    version: str = "1.0.0",
    task: TaskChoice | None = DETECTION,
    preprocessing: Mapping[str, Any] | None = LETTERBOX,
    labels: bytes = LABELS,
    figures: Mapping[str, Any] | None = None,
    shift: int = 0,
) -> None:
    content, pixels, boxes = make_golden(shift)
    attachments = {"labels": labels}
    if preprocessing is not None:
        attachments["preprocessing"] = encode_json(dict(preprocessing))
    sketch = Manifest_("cells", version, {"pixels": "boxes"}, {"pixels": pixels})
    write_signed(maker, path, sketch, {"boxes": boxes}, content, figures, attachments=attachments, task=task)


def draw(width: int = 128, height: int = 128, **cells: tuple[int, int]) -> Array:
    """Return a black picture [height, width, 3] with coloured cells of the input, by column and row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    side = max(width, height) * CELL // SIDE
    for colour, (column, row) in cells.items():
        channel = ("red", "green").index(colour)
        pixels[row * side : (row + 1) * side, column * side : (column + 1) * side, channel] = 255
    return pixels


def encode(pixels: Array, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def exchange(
    service: Running, method: str, path: str, body: bytes, fields: Mapping[str, str]
) -> tuple[int, Mapping[str, str], bytes]:
    """Return status, headers and body of the response to a request over the Unix socket."""
    connection = _UnixConnection(service.socket_path)
    try:
        connection.request(method, path, body, dict(fields))
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def post(
    service: Running,
    body: bytes,
    content_type: str = "image/png",
    *,
    path: str = "/v2/models/cells/answer",
) -> tuple[int, Any]:
    """Return status and JSON of the response to a file."""
    status, _, answer = exchange(service, "POST", path, body, {"Content-Type": content_type})
    return status, json.loads(answer)
