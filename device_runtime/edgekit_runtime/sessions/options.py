"""Reads the options of a backend in a manifest.

Options change how a model runs, so unknown options are refused instead of ignored.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import BackendError

Options = TypeVar("Options")

DECODE: Final = "decode"
"""An option of any backend: decode inputs before the engine gets them. See `MediaSession`."""


def read_options(
    kind: type[Options], backend: str, options: Mapping[str, JsonValue], threads: int | None = None
) -> Options:
    """Return the options in a manifest as an instance of `kind`. The option `decode` is skipped.

    Args:
        kind: A dataclass whose fields are the options.
        backend: The name of the backend, for messages.
        options: The `backend.options` of a manifest.
        threads: Replaces the option `threads` unless it is None.

    Raises:
        BackendError: An option is unknown or invalid.
    """
    stated = {name: value for name, value in options.items() if name != DECODE}
    if threads is not None:
        stated["threads"] = threads
    try:
        return from_plain(kind, stated, error=BackendError)
    except BackendError as cause:
        raise BackendError(f"backend '{backend}': {cause}") from cause
