"""The Python backend that `edgekit offload export` writes, with Triton's module replaced by a small one."""

import importlib.resources
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgekit_runtime.codecs.media import MediaCodec, encode_media

pytest.importorskip("PIL")
Array = np.ndarray[Any, np.dtype[Any]]


class Response:
    def __init__(self, tensors: list[tuple[str, Array]], error: str | None = None) -> None:
        self.outputs, self.error = dict(tensors), error


class Sent:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def as_numpy(self) -> Array:
        return np.frombuffer(self.data, np.uint8)


def open_model(folder: Path, monkeypatch: pytest.MonkeyPatch, *shape: int | str, codec: str) -> Any:
    """Return the backend for a model that takes uint8 of this shape, and answers what it got."""
    utils: Any = types.ModuleType("triton_python_backend_utils")
    utils.get_input_tensor_by_name = lambda request, name: request[name]
    utils.InferenceResponse, utils.TritonError = Response, str
    utils.Tensor = lambda name, array: (name, array)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.setattr(np, "__version__", "1.26.4")
    made: dict[str, Any] = {}
    source = importlib.resources.files("edgekit_offload.export") / "triton_model.py"
    exec(compile(source.read_text(), "triton_model.py", "exec"), made)  # noqa: S102  # our own file
    (folder / "1").mkdir()
    x, y = (helper.make_tensor_value_info(name, TensorProto.UINT8, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        folder / "1/model.onnx",
    )
    config = {"max_batch_size": 0, "parameters": {"decode": {"string_value": json.dumps({"x": codec})}}}
    backend = made["TritonPythonModel"]()
    backend.initialize(
        {"model_config": json.dumps(config), "model_repository": str(folder), "model_version": "1"}
    )
    return backend


@pytest.mark.parametrize("codec", ["jpeg", "webp"])
@pytest.mark.parametrize("shape", [(1, 16, 24, 3), (16, 24, 1)])
def test_photographs_in_colour_and_grey_reach_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, shape: tuple[int, ...]
) -> None:
    backend = open_model(tmp_path, monkeypatch, *shape, codec=codec)
    photo = np.full(shape[-3:], 128, np.uint8)
    if codec == "webp" and shape[-1] == 1:
        photo = photo.repeat(3, axis=2)  # it has no grey
    (answer,) = backend.execute([{"x": Sent(encode_media(MediaCodec.parse(codec), photo))}])
    assert answer.error is None
    assert answer.outputs["y"].shape == shape
    assert abs(answer.outputs["y"].astype(int) - 128).max() <= 4


@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_file_that_is_larger_than_the_model_takes_is_refused_beside_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    backend = open_model(tmp_path, monkeypatch, 1, 16, 24, 3, codec=codec)
    files = [
        encode_media(MediaCodec.parse(codec), np.zeros((height, 24, 3), np.uint8)) for height in (16, 4000)
    ]
    answers = backend.execute([{"x": Sent(file)} for file in (*files, b"no photograph")])
    assert [answer.error is None for answer in answers] == [True, False, False]
    assert "288000 values, the model takes 1152" in answers[1].error
