"""Submodels whose weights lie in another artifact, with an onnxruntime that takes them from files alone."""

import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions import ort
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

WEIGHTS = np.arange(300, dtype=np.float32)
FILE = b"model" + WEIGHTS.tobytes() + b"end"
IN_MEMORY = "add_external_initializers_from_files_in_memory"


def submodel(location: str) -> bytes:
    """y = x + w, where w lies in the file of that name from byte 5 on."""
    weight = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[300], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("offset", "5"), ("length", str(WEIGHTS.nbytes))):
        weight.external_data.add(key=key, value=value)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 300]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "graph", value[:1], value[1:], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The folders that an onnxruntime without weights in memory was given; it runs on copies of them.

    The real one of this test follows no links out of a folder; 1.23 and older, of which it takes the place,
    do.
    """
    seen: list[Path] = []
    create = ort.create_session

    def create_from_copy(
        path: str, settings: "onnxruntime.SessionOptions", options: OrtOptions, provider: str
    ) -> "onnxruntime.InferenceSession":
        graph = Path(path)
        seen.append(graph.parent)
        copy = tmp_path / f"copy{len(seen)}"
        shutil.copytree(graph.parent, copy)
        return create(str(copy / graph.name), settings, options, provider)

    if hasattr(onnxruntime.SessionOptions, IN_MEMORY):
        monkeypatch.delattr(onnxruntime.SessionOptions, IN_MEMORY)
        monkeypatch.setattr(ort, "create_session", create_from_copy)
    return seen


def check(name: str) -> None:
    session = OrtSession(submodel(name), OrtOptions(threads=1, weights=name), memoryview(FILE))
    x = np.ones((2, 300), np.float32)
    np.testing.assert_array_equal(session.run({"x": x})["y"], x + WEIGHTS)


@pytest.mark.parametrize("name", ["model.onnx", "variants/2/model.onnx"])
def test_weights_are_read_from_memory_where_onnxruntime_can(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", ["model.onnx", "variants/2/model.onnx"])
def test_weights_are_read_beside_the_graph_by_an_old_onnxruntime(folders: list[Path], name: str) -> None:
    check(name)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b", ""])
def test_weights_out_of_the_folder_are_refused_for_an_old_onnxruntime(folders: list[Path], name: str) -> None:
    with pytest.raises(BackendError, match="expected the path of an artifact"):
        OrtSession(submodel(name), OrtOptions(threads=1, weights=name), FILE)
    assert not folders


def test_refused_graph_leaves_no_folder_of_an_old_onnxruntime(folders: list[Path]) -> None:
    with pytest.raises(BackendError):
        OrtSession(submodel("model.onnx"), OrtOptions(weights="model.onnx"), b"short")
    assert not any(folder.exists() for folder in folders)
