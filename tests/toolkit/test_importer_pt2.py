"""PyTorch exported programs as input. Most tests need torch: scripts/test-with-torch runs them."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.toolkit.package_run import edgekit, mlp, package
from tests.toolkit.package_run import saved as saved_onnx

from edgekit_runtime.errors import ModelError
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_toolkit.importers.pt2 import is_pt2, load_pt2

STUB = """
from types import SimpleNamespace
import onnx as formats
program = SimpleNamespace(call_spec=SimpleNamespace(out_spec=None))
made = SimpleNamespace(model_proto=formats.load_from_string({made!r}))
export = SimpleNamespace(load=lambda path: program)
onnx = SimpleNamespace(export=lambda *arguments, **options: made)
"""


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A program that returns a dictionary, and the module it was made from."""
    pytest.importorskip("onnxscript", reason="scripts/test-with-torch has it")
    torch = pytest.importorskip("torch", reason="scripts/test-with-torch has it")

    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.Hardswish(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 5),
    ).eval()

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, image: Any) -> dict[str, Any]:
            return {"logits": self.network(image)}

    torch.manual_seed(0)
    dims = {"image": {0: torch.export.Dim("N")}}
    program = torch.export.export(Named(), (torch.randn(2, 3, 16, 16),), dynamic_shapes=dims)
    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    torch.export.save(program, path)
    return path, network


def test_program_without_torch_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child imports from this path first.
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    (tmp_path / "onnxscript.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    path = archive(tmp_path / "net.pt2", {"net/archive_format": b"pt2"})
    with pytest.raises(ModelError, match=r"net.pt2: .*no torch here.*CPU build .*-m pip install .*\[pt2\]'"):
        load_pt2(path)


def test_example_inputs_in_the_file_do_not_count_in_the_size_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saved_onnx(mlp(), tmp_path / "made.onnx").read_bytes()
    # A torch that exports this model, whatever the program; the child imports from this path first.
    (tmp_path / "torch.py").write_text(STUB.format(made=made))
    (tmp_path / "onnxscript.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    path = archive(tmp_path / "net.pt2", {"net/data/sample_inputs/model.pt": bytes(1_000_000)})
    source = load_pt2(path)
    assert source.size_bytes == len(made) < 10_000
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_only_zip_archives_named_pt2_are_programs(tmp_path: Path) -> None:
    assert is_pt2(archive(tmp_path / "net.pt2", {"a": b""}))
    assert not is_pt2(archive(tmp_path / "net.pt", {"a": b""}))
    (tmp_path / "text.pt2").write_text("not a program")
    assert not is_pt2(tmp_path / "text.pt2")
    assert not is_pt2(tmp_path / "missing.pt2")


@pytest.mark.torch
def test_program_becomes_the_same_function_with_its_names(saved: tuple[Path, Any]) -> None:
    import torch

    path, network = saved
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    source = load_pt2(path)
    assert (source.sha256, source.size_bytes) == (before, source.model.size_bytes)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert [spec.name for spec in source.inputs] == ["image"]
    assert isinstance(source.inputs[0].shape[0], str)
    assert [spec.name for spec in source.outputs] == ["logits"]
    images = np.random.default_rng(0).normal(size=(5, 3, 16, 16)).astype(np.float32)
    got = OrtSession(source.model.content).run({"image": images})["logits"]
    want = network(torch.from_numpy(images)).detach().numpy()
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.torch
def test_stored_program_of_an_earlier_day_becomes_the_same_function() -> None:
    torch = pytest.importorskip("torch", reason="scripts/test-with-torch has it")
    path = Path(__file__).with_name("hardswish_net.pt2")  # written by torch 2.13.0
    images = np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)
    expected = torch.export.load(path).module()(torch.from_numpy(images))["logits"].detach().numpy()
    outputs = OrtSession(load_pt2(path).model.content).run({"image": images})["logits"]
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


@pytest.mark.torch
def test_export_is_repeatable_and_names_no_file_of_the_machine(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    first, second = (load_pt2(path).model.content for _ in range(2))
    assert first == second
    assert Path(__file__).name.encode() not in first
    assert str(path.parent).encode() not in first


class Evil:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


def pickled_sample(members: dict[str, bytes], evil: bytes) -> dict[str, bytes]:
    name = next(name for name in members if name.endswith("sample_inputs/model.pt"))
    return {**members, name: evil}


def pickled_weight(members: dict[str, bytes], evil: bytes) -> dict[str, bytes]:
    name = next(name for name in members if name.endswith("model_weights_config.json"))
    config = json.loads(members[name])
    weight = next(iter(config["config"].values()))
    weight["use_pickle"] = True
    place = next(other for other in members if other.endswith("/" + weight["path_name"]))
    return {**members, name: json.dumps(config).encode(), place: evil}


@pytest.mark.torch
@pytest.mark.parametrize("damage", [pickled_sample, pickled_weight])
def test_code_in_a_program_does_not_run(
    damage: Callable[[dict[str, bytes], bytes], dict[str, bytes]], saved: tuple[Path, Any], tmp_path: Path
) -> None:
    import torch

    buffer, trace = io.BytesIO(), tmp_path / "trace"
    torch.save(Evil(trace), buffer)
    with zipfile.ZipFile(saved[0]) as file:
        members = {name: file.read(name) for name in file.namelist()}
    path = archive(tmp_path / "net.pt2", damage(members, buffer.getvalue()))
    with pytest.raises(ModelError, match="pickled objects other than tensors, which could run code"):
        load_pt2(path)
    assert not trace.exists()


@pytest.mark.torch
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_truncated_program_is_refused(kept: float, saved: tuple[Path, Any], tmp_path: Path) -> None:
    content = saved[0].read_bytes()
    path = tmp_path / "net.pt2"
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ModelError, match="torch cannot export it to ONNX"):
        load_pt2(path)


@pytest.mark.torch
@pytest.mark.usefixtures("home")
def test_program_is_packaged_and_repeated_with_the_same_bytes(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = saved
    out = package(path, tmp_path / "first", target="rpi5")
    assert (out.code, out.stderr) == (0, "")
    recipe = next((tmp_path / "first").glob("*.recipe.json"))
    assert edgekit("package", path, "--recipe", recipe, "-o", tmp_path / "second").code == 0
    first, second = (next((tmp_path / name).glob("*.edgepkg")).read_bytes() for name in ("first", "second"))
    assert first == second
