"""Imports `.tflite` files as a `SourceModel`: reads and checks them, and runs them in LiteRT.

The file is not changed. The engine gets the model in this process only after it ran in a child process.
"""

import hashlib
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import BackendError, ModelError
from edgekit_toolkit.importers.file_kind import describe_signature
from edgekit_toolkit.importers.model_file import (
    MAX_MODEL_BYTES,
    SourceModel,
    errors_with_path,
    read_model_file,
)
from edgekit_toolkit.importers.tflite.bounds import check_bounds
from edgekit_toolkit.importers.tflite.screen import check_model
from edgekit_toolkit.importers.tflite.trial import mend_output_shapes, try_model
from edgekit_toolkit.models.model import Specs
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.tflite.flatbuffer import FILE_IDENTIFIER, Model, pack, parse

_IDENTIFIER_AT: Final = 4
_MAX_MEMORY_BYTES: Final = 16 << 30  # address space of the process that tries the model
_TIME_LIMIT_S: Final = 120.0
_DAMAGED: Final = "the file is damaged, copy or export it again"


def load_tflite(path: Path, *, time_limit_s: float = _TIME_LIMIT_S) -> SourceModel[TfliteModel]:
    """Return the model in a `.tflite` file.

    `time_limit_s` is the time limit of the child process that runs the model.

    Raises:
        ModelError: The file is not a `.tflite` model (the message says what it is), is truncated, too large
            or damaged, or LiteRT refuses it or crashes. Also raised for custom operators, weights in other
            files, a quantization that does not fit its tensor, NaN weights, and models without inputs or
            outputs.
        EngineMissingError: LiteRT is not installed.
    """
    with errors_with_path(path):
        content = read_model_file(path, ".tflite", MAX_MODEL_BYTES)
        _check_identifier(content)
        digest = hashlib.sha256(content).hexdigest()
        model = read_model(content)
        run_outputs = try_model(content, max_memory_bytes=_MAX_MEMORY_BYTES, time_limit_s=time_limit_s)
        if mend_output_shapes(model, run_outputs):
            content = pack(model)
        imported = TfliteModel(content)
        inputs, outputs = _specs(imported)
    return SourceModel(
        path=path, sha256=digest, size_bytes=len(content), model=imported, inputs=inputs, outputs=outputs
    )


def read_model(content: bytes) -> Model:
    """Check the content of a file and return it as an object. No engine reads it.

    Raises:
        ModelError: The content is damaged or inconsistent, or has parts that are not supported.
    """
    check_bounds(content)
    try:
        model = parse(content)
    except Exception as error:  # whatever damaged options set off in the generated reader
        raise ModelError(f"an operator's options cannot be read ({error}); {_DAMAGED}") from error
    check_model(model)
    return model


def _check_identifier(content: bytes) -> None:
    if not content.startswith(FILE_IDENTIFIER, _IDENTIFIER_AT):
        content_kind = describe_signature(content) or (
            "its bytes 4 to 7 are not 'TFL3'" if content else "empty"
        )
        raise ModelError(f"is no .tflite model: {content_kind}; give a .tflite file, or copy it again")


def _specs(model: TfliteModel) -> Specs:
    try:
        return model.specs()
    except BackendError as error:
        raise ModelError(str(error)) from error
