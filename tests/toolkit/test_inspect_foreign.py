"""`edgekit inspect` of what is no package: it says what the file is, and what to do with it."""

import io
import re
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image
from tests.toolkit.cases import cases
from tests.toolkit.command_run import invoker
from tests.toolkit.package_run import mlp
from tests.toolkit.package_sample import write_linear

from edgekit_cli.inspect import command
from edgekit_runtime.errors import PackageError

pytestmark = pytest.mark.usefixtures("new_home")
invoke = invoker(command)


def wav(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(8))


def zipped(member: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(member, "x")
    return content.getvalue()


def image(path: Path) -> None:
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(path)


@cases(
    ("name", "write", "words"),
    [
        ("a.onnx", lambda path: onnx.save(mlp(), path), "an ONNX model; `edgekit package FILE --target"),
        ("model", lambda path: onnx.save(mlp(), path), "an ONNX model; `edgekit package FILE --target"),
        ("a.jpg", image, "a JPEG image; it serves as samples"),
        ("a.png", image, "a PNG image; it serves as samples"),
        ("a.wav", wav, "a WAV recording; it serves as samples"),
        ("a.npy", lambda path: np.save(path, np.zeros(3)), r"a NumPy array \(.npy\); it serves as samples"),
        ("a.npz", lambda path: np.savez(path, x=np.zeros(3)), r"an archive of NumPy arrays \(.npz\)"),
        ("a.pt2", lambda path: path.write_bytes(zipped("a/model.json")), "a PyTorch exported program"),
        ("a.pt", lambda path: path.write_bytes(zipped("a/data.pkl")), "a PyTorch file"),
        ("a.zip", lambda path: path.write_bytes(zipped("x.txt")), "a ZIP archive, but no package"),
        ("a.h5", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"), "an HDF5 file"),
        ("a.pem", lambda path: path.write_text("-----BEGIN PUBLIC KEY-----"), "a public key; `edgekit keys"),
        (
            "a.recipe.json",
            lambda path: path.write_text('{"format": "https://edgekit.dev/recipe/v1"}'),
            "a recipe; `edgekit package MODEL --recipe FILE`",
        ),
        ("a.html", lambda path: path.write_text("<!doctype html><title>"), "an HTML page"),
        ("a.edgepkg", lambda path: path.touch(), "empty; copy or write the file again"),
        ("models", lambda path: path.mkdir(), "a folder; give the model file in it"),
    ],
)
def test_other_file_is_named_with_what_to_do(
    name: str, write: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    with pytest.raises(PackageError, match=rf"{re.escape(name)}: no package, but {words}") as caught:
        invoke(tmp_path / name)
    assert caught.value.exit_code == 7


def test_folder_of_packages_names_one(tmp_path: Path) -> None:
    write_linear(tmp_path / "linear.edgepkg")
    with pytest.raises(PackageError, match=r"a folder; inspect a package in it, such as linear.edgepkg"):
        invoke(tmp_path)


def test_damaged_package_keeps_its_own_message(tmp_path: Path) -> None:
    path = write_linear(tmp_path / "linear.edgepkg")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(PackageError) as caught:
        invoke(path)
    assert "no package, but" not in str(caught.value)
