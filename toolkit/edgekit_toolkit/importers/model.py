"""A model file of any kind that is read here: which importer it is for."""

from pathlib import Path

from edgekit_toolkit.importers.onnx import SourceModel, load_onnx
from edgekit_toolkit.importers.pt2 import is_pt2, load_pt2


def load_model(path: Path) -> SourceModel:
    """Return the model in a `.onnx` file, or the program in a `.pt2` file as an ONNX model.

    Raises:
        ModelError: the file is neither, or cannot be used; see `load_onnx` and `load_pt2`.
    """
    return load_pt2(path) if is_pt2(path) else load_onnx(path)
