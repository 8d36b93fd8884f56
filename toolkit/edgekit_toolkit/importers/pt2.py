"""Converts PyTorch exported programs (`.pt2`) to ONNX with torch's exporter in a child process.

Only the child process imports torch. It must not unpickle objects of the file, because they could run code.
It evaluates the size expressions of the file, so open only programs from a trusted source.
"""

import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import ModelError
from edgekit_runtime.system.child_process import ChildProcess, describe_end
from edgekit_runtime.system.install_hint import install_command
from edgekit_toolkit.importers.model_file import (
    MAX_MODEL_BYTES,
    SourceModel,
    errors_with_path,
    read_model_file,
)
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.importers.pt2_child import MISSING_TORCH
from edgekit_toolkit.models.onnx import OnnxModel

_ZIP: Final = b"PK\x03\x04"
_TIME_LIMIT_S: Final = 600.0
_MODULE: Final = "edgekit_toolkit.importers.pt2_child"


def is_pt2(path: Path) -> bool:
    """Return whether a file is a PyTorch exported program: it is named `.pt2` and is a ZIP archive."""
    try:
        with path.open("rb") as file:
            return path.suffix == ".pt2" and file.read(len(_ZIP)) == _ZIP
    except OSError:
        return False


def load_pt2(path: Path) -> SourceModel[OnnxModel]:
    """Return the program in a `.pt2` file as an ONNX model.

    `sha256` is the digest of the `.pt2` file. `size_bytes` is the size of the ONNX model, because the file
    also contains example inputs. If the program returns a dict, its keys are the names of the outputs. The
    model has operator set 18, contains its weights, and has no trace of the machine that exported it.

    Raises:
        ModelError: torch is not installed, or an operator has no ONNX counterpart. The file is damaged, is
            from another version of torch, or needs code to be unpickled. See also `load_onnx`.
    """
    with errors_with_path(path):
        content = read_model_file(path, ".pt2", MAX_MODEL_BYTES)
    with tempfile.TemporaryDirectory(prefix="edgekit-pt2-") as name:
        result = Path(name, "model.onnx")
        _export(path.absolute(), result)
        try:
            source = load_onnx(result)
        except ModelError as error:
            reason = str(error).replace(f"{result}: ", "")
            raise ModelError(f"{path}: exported to ONNX, it cannot be used: {reason}") from error
    digest = hashlib.sha256(content).hexdigest()
    return replace(source, path=path, sha256=digest)


def _export(program: Path, result: Path) -> None:
    with ChildProcess(_MODULE, str(program), str(result), folder=result.parent) as child:
        code, last_line = child.wait(_TIME_LIMIT_S), child.last_line or "no message"
    if code != 0 or not result.is_file():
        raise explain_failure(program, code, last_line)


def explain_failure(
    program: Path, code: int | None, last_line: str, python: Path | None = None
) -> ModelError:
    """Return the error that explains why an export in a child process failed, and what to do.

    Args:
        program: The `.pt2` file.
        code: The exit code of the child process, or None if it took too long.
        last_line: The last line of the child's standard error.
        python: The user's own interpreter if the child ran in it.
    """
    if code is None:
        return ModelError(
            f"{program}: torch did not export it within {_TIME_LIMIT_S:g} s; export it to ONNX yourself"
        )
    if code == MISSING_TORCH and python is not None:
        return ModelError(
            f"{program}: {python} lacks what exports it ({last_line}); pip install torch onnxscript there"
        )
    if code == MISSING_TORCH:
        return ModelError(
            f"{program}: a PyTorch exported program needs torch to be read ({last_line}): name the Python"
            " that wrote it by --python ENV/bin/python; or install torch's CPU build from PyTorch's CPU"
            f" index, then {install_command('pt2')} (docs/guide/install.md); or"
            " export it to ONNX where torch is: torch.onnx.export(program, dynamo=True).save('model.onnx')"
        )
    if last_line.startswith("UnpicklingError"):
        return ModelError(
            f"{program}: holds pickled objects other than tensors, which could run code when they are loaded;"
            " save it again with torch.export.save, or export it to ONNX yourself if you trust it"
        )
    how = f"was ended {describe_end(code)}" if code < 0 else last_line
    return ModelError(f"{program}: torch cannot export it to ONNX: {how}")
