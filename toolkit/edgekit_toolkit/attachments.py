"""What travels with a model and is not computed: names of its classes, a description of its preprocessing."""

import json
from pathlib import Path
from typing import Any

from edgekit_runtime.canonical import encode_json
from edgekit_runtime.errors import DataError


def read_labels(path: Path) -> str:
    """Return the class names in a file, one a line.

    Raises:
        DataError: unreadable, not UTF-8, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"labels {path}: {error}; expected a UTF-8 text file with one class a line"
        ) from error
    if not text.strip():
        raise DataError(f"labels {path}: the file is empty, expected one class a line")
    return text


def read_preprocessing(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DataError: unreadable, no JSON, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        encode_json(value)  # refuses NaN and lone surrogates, which Python's reader takes
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"preprocessing {path}: {error}; expected a JSON object") from error
    if not isinstance(value, dict):
        raise DataError(f"preprocessing {path}: got {type(value).__name__}, expected a JSON object")
    return value
