"""Exports a verified package in formats of other tools.

An OCI artifact contains the whole package. The other formats contain only the models.

Source: OCI image format 1.1, "Image Layout" and "Artifacts usage", and onnxruntime,
`model_package/README.md`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.system.atomic_files import hash_file, write_atomically, write_text_atomically
from edgekit_runtime.system.engines import find_engine
from edgekit_toolkit.packaging.android_export import list_android_files

MODEL_PACKAGE_SUFFIX: Final = ".ortpackage"
PROCESSOR: Final = "CPUExecutionProvider"
_EXECUTOR: Final = "ort"  # onnxruntime, in a model package
_GPU: Final = "TensorrtExecutionProvider"
_ARTIFACT_TYPE: Final = "application/vnd.edgekit.package.v1"
_EMPTY: Final = b"{}"  # the configuration of an artifact without one


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format of another tool.

    Attributes:
        name: The value of `--format`.
        content: A description of the exported files for the user.
        write: Writes a package to a folder, and returns the paths that the other tool needs.
    """

    name: str
    content: str
    write: Callable[[OpenedPackage, Path], list[Path]]


@dataclass(frozen=True, slots=True)
class _VariantModel:
    variant: str
    content: memoryview
    provider: str


def _list_models(package: OpenedPackage, file_format: str) -> list[_VariantModel]:
    """Return the models of a format, each once, in the order of the variants.

    Raises:
        ConfigError: there is none.
    """
    models: dict[str, _VariantModel] = {}
    for variant in package.manifest.all_variants:
        for choice in variant.backend.chain:
            engine = find_engine(choice.name)
            if engine.file_format == file_format and choice.artifact not in models:
                provider = _GPU if engine.on_gpu else PROCESSOR
                models[choice.artifact] = _VariantModel(variant.name, package.read(choice.artifact), provider)
    if not models:
        raise ConfigError(
            f"{package.path}: none of its models is {file_format}; `edgekit inspect` shows what it has"
        )
    return list(models.values())


def _write_models(package: OpenedPackage, folder: Path, file_format: str) -> list[Path]:
    models, paths = _list_models(package, file_format), []
    for model in models:
        variant = f"-{model.variant}" if len(models) > 1 else ""
        name = f"{package.manifest.name}-{package.manifest.version}{variant}.{file_format}"
        paths.append(folder / name)
        _write_bytes(folder / name, model.content)
    return paths


def _write_onnx(package: OpenedPackage, folder: Path) -> list[Path]:
    return _write_models(package, folder, "onnx")


def _write_tflite(package: OpenedPackage, folder: Path) -> list[Path]:
    return _write_models(package, folder, "tflite")


def _write_model_package(package: OpenedPackage, folder: Path) -> list[Path]:
    """Write a component with a variant for each model; a provider gets its first variant."""
    manifest = package.manifest
    root = folder / f"{manifest.name}-{manifest.version}{MODEL_PACKAGE_SUFFIX}"
    component = root / manifest.name
    variants = {}
    for model in _list_models(package, "onnx"):
        variants[model.variant] = {
            "ep": model.provider,
            "device": "cpu" if model.provider == PROCESSOR else "gpu",
            "executor_info": {_EXECUTOR: {"model_file": "model.onnx"}},
        }
        _write_bytes(component / model.variant / "model.onnx", model.content)
    _write_json(component / "component.json", {"component_name": manifest.name, "variants": variants})
    description = {
        "schema_version": "1.0",
        "package_name": manifest.name,
        "package_version": manifest.version,
        "components": {manifest.name: manifest.name},
        "additional_metadata": {"producer": "edgekit"},
    }
    _write_json(root / "manifest.json", description)
    return [root]


def _write_android(package: OpenedPackage, folder: Path) -> list[Path]:
    root = folder / f"{package.manifest.name}-{package.manifest.version}-android"
    for path, content in list_android_files(package).items():
        _write_bytes(root / path, content)
    return [root]


def _write_oci(package: OpenedPackage, folder: Path) -> list[Path]:
    """Write an OCI image layout with the signed package as the only layer of an artifact."""
    manifest = package.manifest
    root = folder / f"{manifest.name}-{manifest.version}-oci"
    blobs = root / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    unnamed = blobs / "package"
    with write_atomically(unnamed) as target:
        package.copy_to(target)
    digest = hash_file(unnamed)
    blob = unnamed.replace(blobs / digest)
    title = {"org.opencontainers.image.title": manifest.file_name}
    layer = {"mediaType": _ARTIFACT_TYPE, "digest": f"sha256:{digest}", "size": blob.stat().st_size}
    image = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": _ARTIFACT_TYPE,
        "config": _write_blob(blobs, _EMPTY, "application/vnd.oci.empty.v1+json"),
        "layers": [{**layer, "annotations": title}],
        "annotations": {"org.opencontainers.image.version": manifest.version},
    }
    described = _write_blob(blobs, json.dumps(image).encode(), "application/vnd.oci.image.manifest.v1+json")
    tag = {"org.opencontainers.image.ref.name": manifest.version}
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{**described, "artifactType": _ARTIFACT_TYPE, "annotations": tag}],
    }
    _write_json(root / "index.json", index)
    _write_json(root / "oci-layout", {"imageLayoutVersion": "1.0.0"})
    return [root]


def _write_blob(blobs: Path, content: bytes, media_type: str) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    _write_bytes(blobs / digest, content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _write_bytes(path: Path, content: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as file:
        file.write(content)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(document, indent=2) + "\n")


FORMATS: Final = {
    form.name: form
    for form in (
        ExportFormat("onnx", "each ONNX model", _write_onnx),
        ExportFormat("tflite", "each LiteRT model", _write_tflite),
        ExportFormat(
            "ort-model-package", "the ONNX models as variants, for onnxruntime 1.32", _write_model_package
        ),
        ExportFormat(
            "android", "a folder for an app: the LiteRT model, Kotlin, golden tensors", _write_android
        ),
        ExportFormat("oci", "the signed package as an artifact for registries", _write_oci),
    )
}
