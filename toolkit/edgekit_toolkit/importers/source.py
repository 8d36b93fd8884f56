"""Chooses the importer for a model file of any supported kind."""

from collections.abc import Mapping
from pathlib import Path

from edgekit_runtime.canonical_json import JsonValue
from edgekit_toolkit.importers.file_kind import is_tflite
from edgekit_toolkit.importers.fixed_inputs import fix_inputs
from edgekit_toolkit.importers.model_file import SourceModel
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.importers.pt2 import is_pt2, load_pt2
from edgekit_toolkit.importers.states import name_states
from edgekit_toolkit.models.model import Model


def load_model(
    path: Path,
    fixed: Mapping[str, JsonValue] | None = None,
    states: Mapping[str, str] | None = None,
) -> SourceModel[Model]:
    """Return the model in a `.onnx` or `.tflite` file, or the program in a `.pt2` file as an ONNX model.

    `fixed` is a dict from input name to value, see `fix_inputs`. `states` is a dict from output name to the
    name of an input of the next run, see `name_states`.

    Raises:
        ModelError: The file has another format or cannot be used. See `load_onnx`, `load_tflite` and
            `load_pt2`.
        EngineMissingError: The file is a `.tflite`, and LiteRT is not installed.
    """
    return name_states(fix_inputs(_load(path), fixed or {}), states or {})


def _load(path: Path) -> SourceModel[Model]:
    if is_pt2(path):
        return load_pt2(path)
    if not is_tflite(path):
        return load_onnx(path)
    from edgekit_toolkit.importers.tflite.importer import load_tflite

    return load_tflite(path)
