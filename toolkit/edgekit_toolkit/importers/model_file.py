"""A model's file, read whole and within a limit, and the model that an importer makes from it."""

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
    """A model as it was given, external data included.

    Attributes:
        sha256: digest of the file, in hexadecimal. With external data it covers the file and then each
            external file, in the order of their names, each after a line with its name and size.
        size_bytes: size of the file and its external data together; for a `.pt2`, size of the resulting ONNX
            model.
        model: the model, which no longer refers to other files. Functions of an ONNX model are inlined.
            Outputs of a `.tflite` have the shapes of test runs, even if the file recorded others.
        inputs: inputs of a session. A `.tflite` input of codes with a scale is float32 here.
        original: the model before operators were replaced by their definitions, or before it was converted to
            an older operator set, so that the engine runs it. None without such a change.
        states: outputs that are inputs of the next run.
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
    """Return the content of a file; `ending`: which kind to ask for in an error message, such as `.onnx`.

    Raises:
        ModelError: there is no such file, it is no regular file, or it is larger than `max_bytes`.
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
        ModelError: it has more.
    """
    if size_bytes > max_bytes:
        raise ModelError(
            f"has {size_bytes} bytes with all its data, at most {max_bytes} are allowed; such a model is too"
            " large for edge devices, choose a smaller one"
        )


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Re-raise a ModelError or OSError of the block as a ModelError whose message begins with `path`."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
