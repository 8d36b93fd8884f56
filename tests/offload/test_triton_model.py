"""The Python backend that `edgekit offload export` writes, with Triton's module replaced by a small one."""

import io
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.runtime.gpu_stand_in import CPU, CUDA, give_gpu

from edgekit_offload.export.tails import Tail
from edgekit_offload.export.triton import write_repository
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.tensors import TensorSpec

pytest.importorskip("PIL")
Array = np.ndarray[Any, np.dtype[Any]]
TYPES = {"uint8": TensorProto.UINT8, "int16": TensorProto.INT16}

# In a process that knows the packages of `requirements.txt`, and edgekit only as far as it is exported.
ALONE = """
import json, runpy, sys, types
model, *packages = sys.argv[1:]
sys.path += packages
import numpy as np
np.__version__ = "1.26.4"
utils = sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
utils.get_input_tensor_by_name = lambda request, name: request[name]
utils.InferenceResponse = lambda outputs, error=None: error
utils.TritonError, utils.Tensor = str, lambda name, array: None
backend = runpy.run_path(model + "/1/model.py")["TritonPythonModel"]()
config = {"max_batch_size": 0, "parameters": {"decode": {"string_value": '{"x": "jpeg"}'}}}
backend.initialize({"model_config": json.dumps(config), "model_repository": model, "model_version": "1"})
file = sys.stdin.buffer.read()
sent = types.SimpleNamespace(as_numpy=lambda: np.frombuffer(file, np.uint8))
ours = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("edgekit")}
print(json.dumps([*backend.execute([{"x": sent}]), ours]))
"""


class Response:
    def __init__(self, tensors: list[tuple[str, Array]], error: str | None = None) -> None:
        self.outputs, self.error = dict(tensors), error


class Sent:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def as_numpy(self) -> Array:
        return np.frombuffer(self.data, np.uint8)


def write_model(folder: Path, *shape: int | str, codec: str) -> Path:
    """Write a repository with a model that takes an array of this shape, and answers what it got."""
    dtype = "int16" if codec == "opus" else "uint8"
    x, y = (helper.make_tensor_value_info(name, TYPES[dtype], shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    inputs, outputs = ((TensorSpec(name, dtype, shape),) for name in "xy")
    write_repository(
        (
            Tail(
                name="same",
                inputs=inputs,
                outputs=outputs,
                decode={"x": codec},
                model=model,
                is_batched=False,
            ),
        ),
        folder,
        "python",
    )
    return folder / "same"


def open_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *shape: int | str, codec: str, kind: str = "CPU"
) -> Any:
    """Return the backend of such a repository, in this process."""
    utils: Any = types.ModuleType("triton_python_backend_utils")
    utils.get_input_tensor_by_name = lambda request, name: request[name]
    utils.InferenceResponse, utils.TritonError = Response, str
    utils.Tensor = lambda name, array: (name, array)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.setattr(sys, "path", list(sys.path))  # it adds its folder
    monkeypatch.setattr(np, "__version__", "1.26.4")
    model, made = write_model(folder, *shape, codec=codec), dict[str, Any]()
    exec(compile((model / "1/model.py").read_text(), "model.py", "exec"), made)  # noqa: S102  # our own file
    config = {"max_batch_size": 0, "parameters": {"decode": {"string_value": json.dumps({"x": codec})}}}
    backend = made["TritonPythonModel"]()
    arguments = {"model_config": json.dumps(config), "model_repository": str(model), "model_version": "1"}
    backend.initialize(arguments | {"model_instance_kind": kind, "model_instance_device_id": "1"})
    return backend


def test_instance_on_a_gpu_asks_for_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = give_gpu(monkeypatch)
    open_model(tmp_path, monkeypatch, 1, 16, 24, 3, codec="jpeg", kind="GPU")
    assert opened[-1] == {CUDA: {"device_id": "1", "use_tf32": "0"}, CPU: {}}


def test_instance_on_a_gpu_without_the_wheel_runs_on_the_processor_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_model(tmp_path, monkeypatch, 1, 16, 24, 3, codec="jpeg", kind="GPU")
    assert "using the processor" in capsys.readouterr().err


def make_bomb() -> bytes:
    """Return a JPEG of 16 x 24 pixels with a thousand scans, each of which costs a pass over all pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * 1000 + data[-2:]


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
    assert "24 x 4000 pixels are more than 1152 bytes" in answers[1].error


def test_jpeg_bomb_and_other_colours_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    backend = open_model(tmp_path, monkeypatch, 1, 16, 24, 3, codec="jpeg")
    print_colours = io.BytesIO()
    Image.new("CMYK", (24, 16)).save(print_colours, "JPEG")
    answers = backend.execute([{"x": Sent(file)} for file in (make_bomb(), print_colours.getvalue())])
    assert "more than 64 scans" in answers[0].error
    assert "CMYK, expected RGB" in answers[1].error


def test_sound_that_is_no_opus_of_one_channel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile = pytest.importorskip("soundfile")
    backend = open_model(tmp_path, monkeypatch, 1, 4800, codec="opus")
    sound, two, wav = np.zeros(4800, np.int16), io.BytesIO(), io.BytesIO()
    soundfile.write(two, np.stack([sound, sound], axis=1), 16_000, format="OGG", subtype="OPUS")
    soundfile.write(wav, sound, 16_000, format="WAV")
    right = encode_media(MediaCodec.parse("opus"), sound)
    answers = backend.execute([{"x": Sent(file)} for file in (right, two.getvalue(), wav.getvalue())])
    assert answers[0].error is None
    assert answers[0].outputs["y"].shape == (1, 4800)
    assert "channels: 2" in answers[1].error
    assert "WAV" in answers[2].error


def test_exported_model_carries_all_of_edgekit_that_it_needs(tmp_path: Path) -> None:
    model = write_model(tmp_path, 1, 16, 24, 3, codec="jpeg")
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE, model, *packages],
        input=make_bomb(),
        capture_output=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr.decode()
    refused, ours = json.loads(found.stdout)
    assert "more than 64 scans" in refused
    assert "edgekit_runtime.codecs.media" in ours
    assert all(Path(file).is_relative_to(model / "1") for file in ours.values())


def test_model_that_decodes_nothing_carries_nothing(tmp_path: Path) -> None:
    spec = (TensorSpec("x", "uint8", ("N", 4)),)
    x = helper.make_tensor_value_info("x", TYPES["uint8"], ("N", 4))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [x])
    tail = Tail(
        name="same", inputs=spec, outputs=spec, decode={}, model=helper.make_model(graph), is_batched=True
    )
    write_repository((tail,), tmp_path, "python")
    assert {path.name for path in (tmp_path / "same/1").iterdir()} == {"model.onnx", "model.py"}
