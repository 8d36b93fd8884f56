"""Reads the file of a model up to a size limit, and defines the model that importers return."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import onnx

from edgekit_runtime.errors import ModelError
from edgekit_runtime.package.states import RecurrentState
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.importers.file_kind import describe_folder
from edgekit_toolkit.models.model import Model

# Below 2 GiB: protobuf can write no larger model as one file, and a flatbuffer can address no more.
MAX_MODEL_BYTES: Final = 2_000_000_000

M_co = TypeVar("M_co", bound=Model, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel(Generic[M_co]):
    """An imported model, including external data.

    Attributes:
        sha256: The SHA-256 of the file in hexadecimal. If the model has external files, the digest also
            covers their names, sizes and contents.
        size_bytes: The size of the file and its external data. For a `.pt2`, the size of the exported ONNX
            model.
        model: The model, which does not refer to other files. Functions of an ONNX model are inlined. Outputs
            of a `.tflite` have the shapes that test runs produced, even if the file states other shapes.
        inputs: The inputs of a session. A quantized `.tflite` input with a scale is float32 here.
        original: The model before operators were replaced by their definitions, or before it was converted to
            an older operator set for the engine. None without such a change.
        states: The outputs that are inputs of the next run.
    """

    path: Path
    sha256: str
    size_bytes: int
    model: M_co
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    original: onnx.ModelProto | None = None
    states: tuple[RecurrentState, ...] = ()


def read_model_file(path: Path, ending: str, max_bytes: int) -> bytes:
    """Return the content of a file. `ending` is the expected kind for error messages, such as `.onnx`.

    Raises:
        ModelError: The file is missing, is not a regular file, or is larger than `max_bytes`.
    """
    if not path.exists():
        raise ModelError("no such file; check the path")
    if path.is_dir():
        raise ModelError(f"is {describe_folder(path)}")
    if not path.is_file():
        raise ModelError(f"is not a regular file; give an {ending} file")
    check_size(path.stat().st_size, max_bytes)
    return path.read_bytes()


def check_size(size_bytes: int, max_bytes: int) -> None:
    """Check that a model has at most `max_bytes`.

    Raises:
        ModelError: The model is larger.
    """
    if size_bytes > max_bytes:
        raise ModelError(
            f"has {size_bytes} bytes with all its data, at most {max_bytes} are allowed; such a model is too"
            " large for edge devices, choose a smaller one"
        )


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Convert a ModelError or OSError of the block to a ModelError whose message starts with `path`."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
