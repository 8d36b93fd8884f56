"""The clients of docs/guide/clients.md against a real service; one whose toolchain is missing is skipped."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import draw, encode, write_cell_detector
from tests.service.service_parts import Running, make_config, running

from edgekit_runtime.client.client import Client
from edgekit_runtime.errors import DataError, RequestError
from edgekit_runtime.service.models.file_source import PackageFiles

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "clients"


@pytest.fixture(scope="module")
def cells(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cells")
    write_cell_detector(maker, folder / "cells.edgepkg")
    with running(make_config(folder), PackageFiles([folder / "cells.edgepkg"], maker.trust)) as service:
        yield service


def command(name: str, folder: Path) -> list[str]:
    """Return the command that runs a client, which is built before."""
    source = str(CLIENTS / name)
    program = {"mjs": "node", "go": "go", "cpp": "g++", "java": "java"}[name.rpartition(".")[2]]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    if program == "go":
        return ["go", "run", source]
    if program != "g++":
        return [program, source]
    built = subprocess.run(
        ["g++", "-std=c++17", source, "-lcurl", "-o", "answer"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if "curl/curl.h" in built.stderr:
        pytest.skip("libcurl4-openssl-dev is not installed")
    assert built.returncode == 0, built.stderr
    return [str(folder / "answer")]


# Java starts a compiler for each of both calls.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=pytest.mark.long if path.suffix == ".java" else ())
        for path in sorted(CLIENTS.iterdir())
        if path.suffix != ".md"
    ],
)
def test_client_in_another_language_prints_the_boxes(cells: Running, name: str, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(encode(draw(red=(1, 0)), "JPEG", quality=95))
    run = [*command(name, tmp_path), f"http://127.0.0.1:{cells.port}"]
    done = subprocess.run(
        [*run, "cells", str(tmp_path / "photo.jpg")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "red" in done.stdout
    assert all(number in done.stdout for number in ("32", "64"))
    refused = subprocess.run(
        [*run, "none", str(tmp_path / "photo.jpg")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert refused.returncode != 0
    assert "none" in refused.stdout + refused.stderr


def test_python_client_sends_files(cells: Running) -> None:
    with Client(cells.socket_path) as client:
        photo = encode(draw(green=(0, 0)) // 2, "JPEG", quality=95)
        (detection,) = client.answer("cells", photo)["detections"]
        assert detection["label"] == "green"
        assert client.answer("cells", photo, options={"min_score": 0.9})["detections"] == []
        with pytest.raises(RequestError, match="media type"):
            client.answer("cells", photo, "image/tiff")
        with pytest.raises(DataError):
            client.answer("cells", photo, "image/jpeg\r\nX: y")
