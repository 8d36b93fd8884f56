"""ONNX files to a `SourceModel`: read whole, checked, and known to load in onnxruntime.

The file is only ever read. It does not optimise (see `passes`), and it does not run the model.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import checker, inliner, shape_inference

from edgekit_runtime.errors import BackendError, ModelError
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.importers.external import external_files, merge_external
from edgekit_toolkit.importers.onnx_screen import (
    check_interface,
    check_names,
    check_operators,
    check_weights,
    explain_refusal,
)
from edgekit_toolkit.importers.sniff import describe, describe_folder
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.specs import tensor_specs

M_co = TypeVar("M_co", bound=Model, covariant=True)

_HASH_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """What a model may ask of memory.

    Attributes:
        max_model_bytes: the model file and its external data together. The default stays under the 2 GiB at
            which protobuf can no longer write a model as one file.
    """

    max_model_bytes: int = 2_000_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.max_model_bytes < 1 << 31:
            raise ValueError(f"max_model_bytes must be from 1 to 2**31 - 1, got {self.max_model_bytes}")


@dataclass(frozen=True, slots=True)
class SourceModel(Generic[M_co]):
    """A model as it was given, external data included.

    Attributes:
        path: the file.
        sha256: of the file; where there are external data, of the file followed by each external file in the
            order of their names, each after a line with its name and size. In hexadecimal.
        size_bytes: of the file and its external data together.
        model: the model, which no longer refers to other files. Functions of an ONNX model are written out; a
            `.tflite` that records another shape of an output than it makes has that one.
        inputs: what a session takes; of a `.tflite`, float32 where the file has codes with a scale.
        outputs: what a session gives.
    """

    path: Path
    sha256: str
    size_bytes: int
    model: M_co
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def load_onnx(path: Path, limits: ImportLimits | None = None) -> SourceModel[OnnxModel]:
    """Return the model in an ONNX file.

    Args:
        path: the `.onnx` file; external data lie beside it or below.
        limits: default: `ImportLimits()`.

    Raises:
        ModelError: not an ONNX model (it says what else), truncated, too large, damaged, or not to be run:
            unsupported operators or operator sets, custom domains, external data that are missing or outside
            the model's folder, NaN or infinite weights, no inputs or outputs.
    """
    limits = limits or ImportLimits()
    try:
        return _load(path, limits)
    except ModelError as err:
        raise ModelError(f"{path}: {err}") from err
    except OSError as err:
        raise ModelError(f"{path}: cannot be read: {err.strerror or err}") from err


def _load(path: Path, limits: ImportLimits) -> SourceModel[OnnxModel]:
    content = _read(path, limits)
    model = _parse(path, content)
    check_names(model)
    files = external_files(model, path.parent)
    total_bytes = len(content) + sum(file.stat().st_size for file in files.values())
    _check_size(total_bytes, limits)
    merge_external(model, files, limits.max_model_bytes - len(content))
    digest = _digest(content, files)
    check_interface(model)
    model = _without_functions(model)
    check_operators(model)
    check_weights(model)
    _complete_outputs(model)
    inputs, outputs = tensor_specs(model)
    _check_structure(model)
    _check_loads(model)
    return SourceModel(path, digest, total_bytes, OnnxModel(model), inputs, outputs)


def _read(path: Path, limits: ImportLimits) -> bytes:
    if not path.exists():
        raise ModelError("no such file; check the path")
    if path.is_dir():
        raise ModelError(f"is {describe_folder(path)}")
    if not path.is_file():
        raise ModelError("is not a regular file; give an .onnx file")
    _check_size(path.stat().st_size, limits)
    return path.read_bytes()


def _check_size(size_bytes: int, limits: ImportLimits) -> None:
    if size_bytes > limits.max_model_bytes:
        raise ModelError(
            f"has {size_bytes} bytes with its external data, at most {limits.max_model_bytes} are allowed"
            " (max_model_bytes); such a model is too large for edge devices, choose a smaller one"
        )


def _parse(path: Path, content: bytes) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as err:
        raise ModelError(f"is {describe(path, content)}") from err
    # Protobuf accepts much that is not a model: unknown fields, and no fields at all.
    if not model.HasField("ir_version") or not model.HasField("graph"):
        raise ModelError(f"is {describe(path, content)}")
    del model.training_info[:]  # graphs that never run here
    return model


def _digest(content: bytes, files: dict[str, Path]) -> str:
    digest = hashlib.sha256(content)
    for location, file in files.items():
        digest.update(f"\n{location} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _without_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its own functions written out, as no target knows them."""
    if not model.functions:
        return model
    try:
        return inliner.inline_local_functions(model)
    except Exception as err:  # the C++ inliner's exceptions have no common base but this
        raise ModelError(f"functions of the model cannot be written out: {err}; export without them") from err


def _complete_outputs(model: onnx.ModelProto) -> None:
    """Give outputs without a shape the one that ONNX infers, in place."""
    if all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
        return
    try:
        inferred = shape_inference.infer_shapes(model)
    except Exception as err:  # InferenceError, RuntimeError and ValueError, by the cause
        raise ModelError(f"outputs have no shape, and none can be inferred: {err}") from err
    for value, known in zip(model.graph.output, inferred.graph.output, strict=True):
        value.CopyFrom(known)


def _check_structure(model: onnx.ModelProto) -> None:
    try:
        checker.check_model(model)
    except Exception as err:  # ValidationError, and whatever a damaged field sets off in the C++ checker
        first_line = str(err).strip().splitlines()[0]
        raise ModelError(f"is not valid ONNX: {first_line}; export it again") from err


def _check_loads(model: onnx.ModelProto) -> None:
    try:
        OrtSession(model.SerializeToString(), OrtOptions(threads=1, optimise=False)).close()
    except BackendError as err:
        raise explain_refusal(model, err.__cause__ or err) from err
