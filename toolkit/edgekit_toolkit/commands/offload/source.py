"""The model that a command of `edgekit offload` is about: an ONNX file, or the one in a package."""

from pathlib import Path
from typing import NamedTuple

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from edgekit_offload.profiling.machine import RunnableGraph
from edgekit_runtime.errors import CutError, ModelError
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.tensors import Array
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.importers.external import external_files
from edgekit_toolkit.importers.file_kind import describe_no_model

_PACKAGE_SUFFIX = ".edgepkg"
_BACKENDS = ("offload", "ort")


class NamedModel(NamedTuple):
    """A model as it is measured, with its name: that of the package or of the file."""

    name: str
    graph: RunnableGraph


def read_named_model(path: Path) -> NamedModel:
    """Return the model at `path` with the options that its sessions have.

    Raises:
        ModelError: it is no ONNX model, or its external data are not beside it.
        PackageError: the package cannot be used; of a subclass that says why.
        CutError: the package does not run in onnxruntime.
    """
    if path.suffix == _PACKAGE_SUFFIX:
        return _read_packed(path)
    try:
        content = path.read_bytes()
    except OSError as cause:
        raise ModelError(f"{path}: {cause.strerror}; check the path") from cause
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as cause:
        raise ModelError(f"{path}: is {describe_no_model(path, content)}") from cause
    if not model.graph.node:
        raise ModelError(f"{path}: is {describe_no_model(path, content)}")
    files = external_files(model, path.parent)
    weights = {location: file.read_bytes() for location, file in files.items()}
    return NamedModel(path.stem, RunnableGraph(content, weights=weights))


def _read_packed(path: Path) -> NamedModel:
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        for choice in package.manifest.backend.chain:
            if choice.name in _BACKENDS:
                content = bytes(package.read(choice.artifact))
                graph = RunnableGraph(content, choice.options, inputs=_one_request(package))
                return NamedModel(package.manifest.name, graph)
    raise CutError(f"{path}: no backend of it is onnxruntime, which alone can be split; package it for 'ort'")


def _one_request(package: OpenedPackage) -> dict[str, Array]:
    """Return the golden inputs, one row of them: made-up ones may have sizes that the model cannot take."""
    free = {spec.name for spec in package.manifest.inputs if isinstance(next(iter(spec.shape), 1), str)}
    golden = read_golden_inputs(package)
    return {name: array[:1] if name in free else array for name, array in golden.items()}
