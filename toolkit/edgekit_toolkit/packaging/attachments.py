"""Reads the attachments of a model: the names of its classes and its preprocessing."""

import json
from pathlib import Path
from typing import Any

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.rules import PRESETS, expand_preset


def read_labels(path: Path) -> str:
    """Return the text of a file with one class name per line.

    Raises:
        DataError: The file is unreadable, not UTF-8, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"labels {path}: {error}; expected a UTF-8 text file with one class a line"
        ) from error
    if not text.strip():
        raise DataError(f"labels {path}: the file is empty, expected one class a line")
    return text


def read_preprocessing(path: Path) -> dict[str, Any]:
    """Return the preprocessing of a model from a JSON file or a preset.

    A preset is replaced by its fields, so that the package does not depend on it.

    Args:
        path: The path of a JSON file, or the name of a preset.

    Raises:
        DataError: The file is unreadable or not a JSON object, or there is no such preset.
    """
    if str(path) in PRESETS and not path.exists():
        return expand_preset({"preset": str(path)})
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        encode_json(value)  # refuses NaN and lone surrogates, which Python's reader takes
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"preprocessing {path}: {error}; expected a JSON object in a file, or one of {', '.join(PRESETS)}"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"preprocessing {path}: got {type(value).__name__}, expected a JSON object")
    return expand_preset(value)
