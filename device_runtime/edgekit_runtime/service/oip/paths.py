"""Paths of the Open Inference Protocol that must be known before a request is routed."""

import functools
from typing import Final
from urllib.parse import unquote

_MAX_PATH_CHARACTERS: Final = 512  # longer paths are parsed, but not remembered


def find_infer(path: str) -> tuple[str, str | None] | None:
    """Return name and version that an inference at `path` asks for, or None where it is no such path."""
    if len(path) > _MAX_PATH_CHARACTERS:
        return _parse_infer(path)
    return _recall_infer(path)


def _parse_infer(path: str) -> tuple[str, str | None] | None:
    match [unquote(part) for part in path.strip("/").split("/")]:
        case ["v2", "models", name, "infer"]:
            return name, None
        case ["v2", "models", name, "versions", version, "infer"]:
            return name, version
    return None


_recall_infer = functools.lru_cache(256)(_parse_infer)
