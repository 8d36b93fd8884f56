"""The HTTP part of the protocol: paths, the header for binary data, and errors."""

import functools
import json
from typing import Any, Final
from urllib.parse import quote, unquote

from edgekit_runtime.errors import (
    DataError,
    DeadlineError,
    EdgekitError,
    PackageError,
    RefusedInputError,
    RequestError,
    SlotError,
    UnavailableError,
)

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
"""The header with the size of the JSON in a body. Binary data follow the JSON."""

REPOSITORY_INDEX: Final = "/v2/repository/index"
STREAMS: Final = "/v2/streams"
FLEET_SETTINGS: Final = "/v2/fleet/settings"
FLEET_LOG: Final = "/v2/fleet/log"
SETTINGS_FILE: Final = "settings.json"
"""The fleet's settings. The agent writes this file beside its journal, and the service applies it."""
SAMPLES: Final = "/v2/samples"
_MAX_MESSAGE: Final = 2000  # characters: a message may quote a client's text


def quote_segment(text: str) -> str:
    """Return `text` as one segment of a URL path, with percent-encoded special characters."""
    return quote(text, safe="", errors="surrogatepass")


def model_path(name: str, version: str | None = None) -> str:
    path = f"/v2/models/{quote_segment(name)}"
    return path if version is None else f"{path}/versions/{quote_segment(version)}"


def repository_path(name: str, action: str) -> str:
    """Return the URL path at which a client can `load` or `unload` a model."""
    return f"/v2/repository/models/{quote_segment(name)}/{action}"


def region_path(name: str, action: str) -> str:
    """Return the URL path to `register` or `unregister` a shared memory region, or to get its `status`."""
    return f"/v2/systemsharedmemory/region/{quote_segment(name)}/{action}"


@functools.lru_cache(256)
def parse_infer_path(path: str) -> tuple[str, str | None] | None:
    """Return the model name and the version in an inference path, or None for other paths.

    Inference paths end in `infer`, `answer` or `keep`. The version is None if the path does not contain one.
    """
    match [unquote(part) for part in path.strip("/").split("/")]:
        case ["v2", "models", name, "infer" | "answer" | "keep"]:
            return name, None
        case ["v2", "models", name, "versions", version, "infer" | "answer" | "keep"]:
            return name, version
    return None


def status_of(error: EdgekitError) -> int:
    """Return the HTTP status of the response for `error`."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, UnavailableError):
        return 503
    if isinstance(error, DeadlineError):
        return 504
    if isinstance(error, (DataError, RefusedInputError, PackageError, SlotError)):
        return 400
    return 500


def encode_error(error: EdgekitError) -> dict[str, Any]:
    """Return the JSON document of an error response. Long messages are truncated."""
    return {"error": str(error)[:_MAX_MESSAGE]}


def decode_error(body: bytes) -> str | None:
    """Return the message in the body of an error response, or None if the body has no message."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return None
