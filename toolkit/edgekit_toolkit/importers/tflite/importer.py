"""`.tflite` files to a `SourceModel`: read whole, screened, and known to run in LiteRT.

The file is only ever read. Nothing of it reaches the engine in this process before it ran in another one.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import BackendError, ModelError
from edgekit_toolkit.importers.onnx import SourceModel
from edgekit_toolkit.importers.sniff import SIGNATURES, describe_folder
from edgekit_toolkit.importers.tflite.bounds import check_bounds
from edgekit_toolkit.importers.tflite.screen import check_model
from edgekit_toolkit.importers.tflite.shapes import mend_output_shapes
from edgekit_toolkit.importers.tflite.trial import try_model
from edgekit_toolkit.models.model import Specs
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.tflite.flatbuffer import FILE_IDENTIFIER, Model, pack, parse

_IDENTIFIER_AT: Final = 4
_DAMAGED: Final = "the file is damaged, copy or export it again"


@dataclass(frozen=True, slots=True)
class TfliteLimits:
    """What a model may ask of this machine.

    Attributes:
        max_model_bytes: of the file; the default stays under what a flatbuffer can address.
        max_memory_bytes: address space of the process that tries the model.
        trial_limit_s: time of that process.
    """

    max_model_bytes: int = 2_000_000_000
    max_memory_bytes: int = 16 << 30
    trial_limit_s: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_model_bytes < 1 << 31:
            raise ValueError(f"max_model_bytes must be from 1 to 2**31 - 1, got {self.max_model_bytes}")


def load_tflite(path: Path, limits: TfliteLimits | None = None) -> SourceModel[TfliteModel]:
    """Return the model in a `.tflite` file.

    Args:
        path: the file.
        limits: default: `TfliteLimits()`.

    Raises:
        ModelError: not a `.tflite` model (it says what else), truncated, too large, damaged, or not to be
            run: custom operators, weights in other files, a quantization that does not fit its tensor, NaN
            weights, no inputs or outputs, or LiteRT refuses it or crashes on it.
        EngineMissingError: LiteRT is not installed.
    """
    limits = limits or TfliteLimits()
    try:
        content = _read(path, limits)
        digest = hashlib.sha256(content).hexdigest()
        model = read_model(content)
        made = try_model(content, max_memory_bytes=limits.max_memory_bytes, time_limit_s=limits.trial_limit_s)
        if mend_output_shapes(model, made):
            content = pack(model)
        found = TfliteModel(content)
        inputs, outputs = _specs(found)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    return SourceModel(path, digest, len(content), found, inputs, outputs)


def read_model(content: bytes) -> Model:
    """Return a file's content as an object once it is screened; no engine sees it.

    Raises:
        ModelError: damaged, inconsistent, or with what is not supported.
    """
    check_bounds(content)
    try:
        model = parse(content)
    except Exception as error:  # whatever damaged options set off in the generated reader
        raise ModelError(f"an operator's options cannot be read ({error}); {_DAMAGED}") from error
    check_model(model)
    return model


def _read(path: Path, limits: TfliteLimits) -> bytes:
    if not path.exists():
        raise ModelError("no such file; check the path")
    if path.is_dir():
        raise ModelError(f"is {describe_folder(path)}")
    if not path.is_file():
        raise ModelError("is not a regular file; give a .tflite file")
    size = path.stat().st_size
    if size > limits.max_model_bytes:
        raise ModelError(
            f"has {size} bytes, at most {limits.max_model_bytes} are allowed (max_model_bytes); such a model"
            " is too large for edge devices, choose a smaller one"
        )
    content = path.read_bytes()
    if not content.startswith(FILE_IDENTIFIER, _IDENTIFIER_AT):
        known = (words for offset, signature, words in SIGNATURES if content.startswith(signature, offset))
        what = next(known, "empty" if not content else "its bytes 4 to 7 are not 'TFL3'")
        raise ModelError(f"is no .tflite model: {what}; give a .tflite file, or copy it again")
    return content


def _specs(model: TfliteModel) -> Specs:
    try:
        return model.specs()
    except BackendError as error:
        raise ModelError(str(error)) from error
