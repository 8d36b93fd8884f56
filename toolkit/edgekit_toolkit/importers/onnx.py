"""Imports ONNX files as a `SourceModel`: reads and checks them, and loads them in onnxruntime.

The file is not changed. This module does not optimise the model (see `passes`).
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import onnx
import onnxruntime
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import checker, helper, inliner, version_converter

from edgekit_runtime.errors import BackendError, ModelError
from edgekit_runtime.sessions.ort import OrtOptions
from edgekit_toolkit.importers.external import external_files, merge_external
from edgekit_toolkit.importers.file_kind import describe_no_model
from edgekit_toolkit.importers.model_file import (
    MAX_MODEL_BYTES,
    SourceModel,
    check_size,
    errors_with_path,
    read_model_file,
)
from edgekit_toolkit.importers.onnx_screen import (
    check_interface,
    check_names,
    check_operators,
    check_weights,
    explain_refusal,
)
from edgekit_toolkit.importers.output_shapes import correct_outputs, infer_outputs
from edgekit_toolkit.importers.sparse_weights import store_densely
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.functions import foreign_functions, inline_functions, named_functions
from edgekit_toolkit.onnx_graph.index import opset
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.openings.model_opening import check_opening
from edgekit_toolkit.openings.sessions import open_ort

_HASH_CHUNK_BYTES: Final = 1 << 20
# Every onnxruntime since 1.18 reads it, and it has all types of operator sets up to 22.
_READ_IR_VERSION: Final = 10


def load_onnx(path: Path, *, max_bytes: int = MAX_MODEL_BYTES) -> SourceModel[OnnxModel]:
    """Return the model in an ONNX file.

    Args:
        path: The path of the `.onnx` file. External data are in the same folder or below.
        max_bytes: The maximum size of the file and its external data.

    Raises:
        ModelError: The file is not an ONNX model (the message says what it is), or it is truncated, too
            large or damaged. Also raised for unknown operators or operator sets, custom domains, external
            data that are missing or outside the folder, NaN or infinite weights, and models without inputs or
            outputs.
    """
    with errors_with_path(path):
        return _load(path, max_bytes)


def _load(path: Path, max_bytes: int) -> SourceModel[OnnxModel]:
    content = read_model_file(path, ".onnx", max_bytes)
    model = _parse(path, content)
    check_names(model)
    files = external_files(model, path)
    total_bytes = len(content) + sum(file.stat().st_size for file in files.values())
    check_size(total_bytes, max_bytes)
    merge_external(model, files, max_bytes - len(content))
    digest = _digest(content, files)
    model = _without_functions(model)
    store_densely(model, max_bytes)
    check_interface(model)
    check_operators(model)
    check_weights(model)
    check_inference(model.SerializeToString())
    unstated = infer_outputs(model)
    tensor_specs(model)
    _check_structure(model)
    loadable = _loadable(model)
    original = None if loadable is model else model
    correct_outputs(loadable, unstated)
    inputs, outputs = tensor_specs(loadable)
    return SourceModel(
        path=path,
        sha256=digest,
        size_bytes=total_bytes,
        model=OnnxModel(loadable),
        inputs=inputs,
        outputs=outputs,
        original=original,
    )


def check_inference(content: bytes) -> None:
    """Check that the shape inference of onnx does not crash, for example because of an invalid attribute.

    Raises:
        ModelError: onnx crashes on this model.
    """
    try:
        check_opening("onnx", content, {})
    except BackendError as err:
        raise ModelError(f"{err}; an attribute of an operator is impossible: export the model again") from err


def _parse(path: Path, content: bytes) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as err:
        raise ModelError(f"is {describe_no_model(path, content)}") from err
    # Protobuf accepts much that is not a model: unknown fields, and no fields at all.
    if not model.HasField("ir_version") or not model.HasField("graph"):
        raise ModelError(f"is {describe_no_model(path, content)}")
    del model.training_info[:]  # graphs that never run here
    # Exporters write the newest IR version that they know, and engines refuse a newer one than they know.
    if model.ir_version <= onnx.IR_VERSION:
        model.ir_version = min(model.ir_version, _ir_version(model.opset_import))
    return model


def _ir_version(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    """Return the oldest IR version that has these operator sets and that all engines read."""
    return max(helper.find_min_ir_version_for(list(imports), ignore_unknown=True), _READ_IR_VERSION)


def _digest(content: bytes, files: dict[str, Path]) -> str:
    digest = hashlib.sha256(content)
    for location, file in files.items():
        digest.update(f"\n{location} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _without_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its own functions and those of previews written out, as no target knows them."""
    try:
        result = inliner.inline_local_functions(model) if model.functions else model
    except Exception as err:  # the C++ inliner's exceptions have no common base but this
        raise ModelError(f"functions of the model cannot be written out: {err}; export without them") from err
    return inline_functions(result, foreign_functions(result)) or result


def _check_structure(model: onnx.ModelProto) -> None:
    try:
        checker.check_model(model)
    except Exception as err:  # ValidationError, and whatever a damaged field sets off in the C++ checker
        first_line = str(err).strip().splitlines()[0]
        raise ModelError(f"is not valid ONNX: {first_line}; export it again") from err


def _loadable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, with what onnxruntime refuses to load written out or in an older operator set."""
    content = model.SerializeToString()
    try:
        open_ort(content, OrtOptions(threads=1, optimise=False)).close()
    except BackendError as err:
        reason = err.__cause__ or err
        older = _in_older_set(model, str(reason))
        loadable = inline_functions(model, named_functions(model, str(reason))) if older is None else older
        if loadable is None:
            raise explain_refusal(model, reason) from err
        return _loadable(loadable)
    return model


def _in_older_set(model: onnx.ModelProto, reason: str) -> onnx.ModelProto | None:
    """Return the model in the newest operator set that the engine reads; None if another reason stops it.

    Raises:
        ModelError: ONNX's converter has no way back for an operator.
    """
    stated = opset(model)
    if ir := re.search(r"max supported IR version: (\d+)", reason):
        older = range(stated - 1, 0, -1)
        newest = next(v for v in older if _ir_version([helper.make_opsetid("", v)]) <= int(ir[1]))
    elif match := re.search(r"under development.*domain ai.onnx is till opset (\d+)", reason, re.DOTALL):
        newest = int(match[1])
    else:
        return None
    try:
        result = version_converter.convert_version(model, newest)
    except Exception as err:  # the C++ converter's exceptions have no common base
        raise ModelError(
            f"opset {stated} is too new for onnxruntime {onnxruntime.__version__}, and ONNX cannot convert"
            f" the model to opset {newest} ({err}); export with opset_version={newest}"
        ) from err
    result.ir_version = _ir_version(result.opset_import)
    return result


def older_set_notes(source: SourceModel[Model]) -> list[str]:
    """Return a list with a note for the user if the model was converted to an older operator set, else []."""
    if source.original is None or not isinstance(source.model, OnnxModel):
        return []
    stated, used = opset(source.original), opset(source.model.proto)
    if used >= stated:
        return []
    return [f"onnxruntime does not read opset {stated} yet; the model is converted to opset {used}"]
