"""`edgekit export`: packages for other tools, and a model package of onnxruntime or Olive as a model."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.package_run import TINY, edgekit

from edgekit_cli.export import command
from edgekit_runtime.errors import ConfigError, ModelError
from edgekit_toolkit.importers.local_sources import find_model
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.packaging.export_formats import FORMATS

MODEL = TINY / "italy_power_mlp.onnx"
# onnxruntime refuses a manifest with any other.
MANIFEST_FIELDS = {
    "schema_version",
    "package_name",
    "package_version",
    "description",
    "layout",
    "components",
    "shared_assets",
    "additional_metadata",
}


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packages")
    outcome = edgekit("package", MODEL, "-t", "x86-64", "--backend", "ort", "-o", out, "--name", "power")
    assert outcome.code == 0, outcome.stderr
    return out / "power-1.0.0-x86-64.edgepkg"


def export(packaged: Path, form: str, folder: Path) -> list[Path]:
    outcome = edgekit("export", packaged, "--format", form, "-o", folder, "--json")
    assert outcome.code == 0, outcome.stdout
    return [Path(path) for path in outcome.json["written"]]


def test_command_offers_the_formats_of_the_table() -> None:
    (choice,) = [option.type for option in command.params if option.name == "form"]
    assert list(choice.choices) == list(FORMATS)  # type: ignore[attr-defined]


def test_exported_onnx_file_is_the_model_of_the_package(packaged: Path, tmp_path: Path) -> None:
    (path,) = export(packaged, "onnx", tmp_path)
    assert path.name == "power-1.0.0.onnx"
    assert path.read_bytes() in packaged.read_bytes()
    assert load_model(path).inputs == load_model(MODEL).inputs


def test_package_without_a_model_of_the_format_is_refused(packaged: Path, tmp_path: Path) -> None:
    outcome = edgekit("export", packaged, "--format", "tflite", "-o", tmp_path / "out")
    assert outcome.code == ConfigError.exit_code
    assert "none of its models is tflite" in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_layout_of_oci_holds_the_signed_package_under_its_digest(packaged: Path, tmp_path: Path) -> None:
    (root,) = export(packaged, "oci", tmp_path)
    assert json.loads((root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}

    def read(descriptor: dict[str, Any]) -> bytes:
        algorithm, _, digest = descriptor["digest"].partition(":")
        content = (root / "blobs" / algorithm / digest).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (digest, descriptor["size"])
        return content

    (described,) = json.loads((root / "index.json").read_text())["manifests"]
    image = json.loads(read(described))
    assert read(image["config"]) == b"{}"
    assert read(image["layers"][0]) == packaged.read_bytes()
    assert image["layers"][0]["annotations"]["org.opencontainers.image.title"] == packaged.name


def test_model_package_is_read_again_as_a_model(packaged: Path, tmp_path: Path) -> None:
    (root,) = export(packaged, "ort-model-package", tmp_path)
    (plain,) = export(packaged, "onnx", tmp_path)
    found = find_model(str(root))
    assert found.name == "power-1.0.0"
    assert found.path.read_bytes() == plain.read_bytes()


def test_model_package_is_in_the_format_of_onnxruntime(packaged: Path, tmp_path: Path) -> None:
    (root,) = export(packaged, "ort-model-package", tmp_path)
    manifest = json.loads((root / "manifest.json").read_text())
    assert manifest["schema_version"] == "1.0"
    assert manifest["components"] == {"power": "power"}
    assert manifest.keys() <= MANIFEST_FIELDS
    variants = json.loads((root / "power/component.json").read_text())["variants"]
    assert variants == {
        "default": {
            "ep": "CPUExecutionProvider",
            "device": "cpu",
            "executor_info": {"ort": {"model_file": "model.onnx"}},
        }
    }


@pytest.mark.skipif(
    not hasattr(onnxruntime, "ModelPackageContext"), reason="this onnxruntime has no interface to them"
)
def test_onnxruntime_opens_the_model_package(packaged: Path, tmp_path: Path) -> None:
    (root,) = export(packaged, "ort-model-package", tmp_path)
    (plain,) = export(packaged, "onnx", tmp_path)
    options = onnxruntime.ModelPackageOptions(onnxruntime.SessionOptions())
    context = onnxruntime.ModelPackageContext(str(root))
    session = context.select_component("power", options).create_session()
    (value,) = session.get_inputs()
    feed = {value.name: np.ones([1, *value.shape[1:]], np.float32)}
    (output,) = session.run(None, feed)
    np.testing.assert_array_equal(output, onnxruntime.InferenceSession(plain).run(None, feed)[0])


def write_inline_package(folder: Path, variant: dict[str, Any]) -> Path:
    """Write a package whose only component is in its manifest."""
    root = folder / "net.ortpackage"
    (root / "cpu").mkdir(parents=True)
    for name in ("net.onnx", "other.onnx"):
        (root / "cpu" / name).write_bytes(MODEL.read_bytes())
    components = {"net": {"variants": {"cpu": {"ep": "CPUExecutionProvider", **variant}}}}
    (root / "manifest.json").write_text(json.dumps({"schema_version": "1.0", "components": components}))
    return root


@pytest.mark.parametrize("is_inline", [True, False])
def test_model_that_a_variant_states_is_taken(tmp_path: Path, is_inline: bool) -> None:
    info = {"model_file": "net.onnx"}
    root = write_inline_package(tmp_path, {"executor_info": {"ort": info if is_inline else "info.json"}})
    (root / "cpu/info.json").write_text(json.dumps(info))
    assert find_model(str(root)).path == root / "cpu/net.onnx"


@cases(
    "variant",
    [
        {"executor_info": {"ort": {"model_file": "../../outside.onnx"}}},
        {"executor_info": {"ort": "../../outside.json"}},
        {"executor_info": {"ort": {"model_file": "/outside.onnx"}}},
        {"variant_directory": "../outside"},
        {"variant_directory": "/outside"},
        {"variant_directory": ["cpu"]},
        {"executor_info": {"ort": {"model_file": f"sha256:{'0' * 64}/net.onnx"}}},
        {"executor_info": []},
    ],
)
def test_variant_of_a_path_trick_is_refused(tmp_path: Path, variant: dict[str, Any]) -> None:
    (tmp_path / "outside.onnx").write_bytes(MODEL.read_bytes())
    (tmp_path / "outside.json").write_text('{"model_file": "net.onnx"}')
    root = write_inline_package(tmp_path, variant)
    with pytest.raises(ModelError, match=r"net\.ortpackage: "):
        find_model(str(root))


def write_model_package(folder: Path, variants: dict[str, str], component: str = "net") -> Path:
    """Write a package as Olive 0.13 does: variant -> provider."""
    root = folder / "net.ortpackage"
    for name in variants:
        path = root / "models" / component / name / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(MODEL.read_bytes())
    metadata = {"component_name": component, "variants": {name: {"ep": ep} for name, ep in variants.items()}}
    (root / "models" / component / "metadata.json").write_text(json.dumps({"schema_version": 1, **metadata}))
    manifest = {
        "schema_version": 1,
        "package_name": "net",
        "components": [component],
        "configs_dir": "configs",
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def test_variant_of_the_processor_is_taken(tmp_path: Path) -> None:
    root = write_model_package(tmp_path, {"gpu": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"})
    assert find_model(str(root)).path == root / "models/net/cpu/model.onnx"


def test_several_variants_of_the_processor_are_listed(tmp_path: Path) -> None:
    root = write_model_package(tmp_path, {"a": "CPUExecutionProvider", "b": "CPUExecutionProvider"})
    with pytest.raises(ModelError, match=r"2 variants could be meant \(a, b\)"):
        find_model(str(root))


def rename(root: Path, file: str, key: str, value: Any) -> None:
    path = root / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize("name", ["../../../outside", "..", "a\\b"])
def test_names_that_lead_out_of_a_model_package_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/model.onnx").write_bytes(MODEL.read_bytes())
    root = write_model_package(tmp_path, {"cpu": "CPUExecutionProvider"})
    rename(root, "models/net/metadata.json", "variants", {name: {"ep": "CPUExecutionProvider"}})
    with pytest.raises(ModelError, match="refused unread"):
        find_model(str(root))
    rename(root, "manifest.json", "components", [name])
    with pytest.raises(ModelError, match="refused unread"):
        find_model(str(root))


@pytest.mark.parametrize("file", ["models/net/cpu/model.onnx", "models/net/metadata.json", "models/net/cpu"])
def test_links_out_of_a_model_package_are_refused(tmp_path: Path, file: str) -> None:
    root = write_model_package(tmp_path, {"cpu": "CPUExecutionProvider"})
    (root / file).rename(tmp_path / "outside")
    (root / file).symlink_to(tmp_path / "outside")
    with pytest.raises(ModelError, match="refused unread"):
        find_model(str(root))


@cases("place", ["../outside", "/outside", "outside/../..", 7])
def test_component_outside_of_its_package_is_refused(tmp_path: Path, place: object) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/component.json").write_text('{"variants": {"cpu": {}}}')
    root = write_inline_package(tmp_path, {})
    rename(root, "manifest.json", "components", {"net": place})
    with pytest.raises(ModelError, match=r"net\.ortpackage: "):
        find_model(str(root))


@cases("content", ["", "[]", "{}", '{"components": {"net": "x"}}', "[" * 100_000])
def test_damaged_manifest_is_refused(tmp_path: Path, content: str) -> None:
    root = write_model_package(tmp_path, {"cpu": "CPUExecutionProvider"})
    (root / "manifest.json").write_text(content)
    with pytest.raises(ModelError, match=r"net\.ortpackage: "):
        find_model(str(root))
