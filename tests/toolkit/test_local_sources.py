"""`hf:` and `mlflow:` as models: what they name, and links and paths that lead elsewhere."""

from pathlib import Path

import pytest
from tests.toolkit.package_run import TINY, edgekit

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.importers.local_sources import find_model
from edgekit_toolkit.importers.source import load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MLMODEL = """artifact_path: model
flavors:
  python_function:
    data: other.onnx
    env:
      conda: c.yaml
  {flavor}:
    code: null
    data: {data}
    providers:
    - CPUExecutionProvider
run_id: 7
"""
CONTENT = (TINY / "italy_power_mlp.onnx").read_bytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Hugging Face with one repository that has one model."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    folder = tmp_path / "home/hub/models--acme--net"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    add(folder, "onnx/model.onnx")
    return folder


def add(repository: Path, file: str, target: Path | None = None) -> Path:
    """Add a file to the snapshot, as a link to a blob or to `target`."""
    path = repository / "snapshots" / COMMIT / file
    path.parent.mkdir(parents=True, exist_ok=True)
    blob = repository / "blobs" / file.replace("/", "-")
    if target is None:
        blob.write_bytes(CONTENT)
    path.symlink_to(target or blob)
    return path


def test_repository_of_the_cache_is_packaged_under_its_name(hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = edgekit("package", "hf:acme/net", "-t", "x86-64", "--backend", "ort", "-o", out)
    assert outcome.code == 0, outcome.stderr
    assert (out / "net-1.0.0-x86-64.edgepkg").is_file()
    assert "edgekit package hf:acme/net" in (out / "net-1.0.0-x86-64.report.html").read_text()


@pytest.mark.parametrize(
    "source",
    [
        "hf:acme/net",
        "hf:acme/net:onnx/model.onnx",
        "hf:acme/net@main",
        f"hf:acme/net@{COMMIT}:onnx/model.onnx",
    ],
)
def test_names_of_one_file_are_found(hub: Path, source: str) -> None:
    found = find_model(source)
    assert (found.path, found.name) == (hub / "snapshots" / COMMIT / "onnx/model.onnx", "net")
    assert load_model(found.path).model.content == load_model(TINY / "italy_power_mlp.onnx").model.content


def test_of_several_models_the_usual_one_is_taken_else_they_are_listed(hub: Path) -> None:
    add(hub, "onnx/model_int8.onnx")
    assert find_model("hf:acme/net").path.name == "model.onnx"
    add(hub, "model.onnx")
    with pytest.raises(ModelError, match=r"it has model\.onnx, onnx/model\.onnx, .* hf:acme/net:model\.onnx"):
        find_model("hf:acme/net")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:acme/other", "`hf download acme/other` puts it there"),
        ("hf:acme/net@v2", "lacks revision 'v2'"),
        ("hf:acme/net:absent.onnx", "has no 'absent.onnx'"),
        ("hf:acme", "expected hf:OWNER/NAME"),
        ("hf:../net", "expected hf:OWNER/NAME"),
        ("hf:acme/net:../../../../secret.onnx", "leads out"),
        ("hf:acme/net:/etc/passwd", "leads out"),
        ("hf:acme/net@../../x", "is no name of a branch"),
    ],
)
def test_source_that_is_not_there_or_leads_out_is_refused(hub: Path, source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_model(source)


def test_link_out_of_the_cache_is_refused_unread(hub: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.onnx"
    outside.write_bytes(CONTENT)
    add(hub, "linked.onnx", outside)
    with pytest.raises(ModelError, match=r"link to .*outside\.onnx.*refused unread"):
        find_model("hf:acme/net:linked.onnx")


def test_folder_or_reference_that_is_a_link_out_of_the_cache_is_refused(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/model.onnx").write_bytes(CONTENT)
    (hub / "snapshots" / COMMIT / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="refused unread"):
        find_model("hf:acme/net:more/model.onnx")
    (tmp_path / "commit").write_text(COMMIT)
    (hub / "refs/next").symlink_to(tmp_path / "commit")
    with pytest.raises(ModelError, match="refused unread"):
        find_model("hf:acme/net@next")


def test_links_in_a_loop_are_refused(hub: Path) -> None:
    path = hub / "snapshots" / COMMIT / "loop.onnx"
    path.symlink_to(path)
    with pytest.raises(ModelError, match=r"has no 'loop\.onnx'"):
        find_model("hf:acme/net:loop.onnx")


def save_mlflow(folder: Path, data: str, flavor: str = "onnx") -> Path:
    folder.mkdir()
    (folder / "MLmodel").write_text(MLMODEL.format(flavor=flavor, data=data))
    (folder / "model.onnx").write_bytes(CONTENT)
    return folder


def test_onnx_file_of_an_mlflow_model_is_found(tmp_path: Path) -> None:
    folder = save_mlflow(tmp_path / "sales", "model.onnx")
    found = find_model(f"mlflow:{folder}")
    assert (found.path, found.name) == (folder / "model.onnx", "sales")


def test_mlflow_model_of_another_flavor_or_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="saved as python_function, sklearn, expected onnx"):
        find_model(f"mlflow:{save_mlflow(tmp_path / 'a', 'model.onnx', 'sklearn')}")
    with pytest.raises(ModelError, match="leads out"):
        find_model(f"mlflow:{save_mlflow(tmp_path / 'b', '../a/model.onnx')}")
    with pytest.raises(ModelError, match="a file MLmodel"):
        find_model(f"mlflow:{tmp_path}")
    folder = save_mlflow(tmp_path / "c", "linked.onnx")
    (folder / "linked.onnx").symlink_to(tmp_path / "a/model.onnx")
    with pytest.raises(ModelError, match="refused unread"):
        find_model(f"mlflow:{folder}")
