"""Options of a backend, as a manifest states them.

Options change how a model runs, so an unknown one is refused, never skipped.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import BackendError

Options = TypeVar("Options")

DECODE: Final = "decode"
"""The option of any backend to decode inputs before the engine gets them, see `MediaSession`."""


def read_options(
    kind: type[Options], backend: str, options: Mapping[str, JsonValue], threads: int | None = None
) -> Options:
    """Return the options that a manifest states, except `decode`, as an instance of `kind`.

    Args:
        kind: a dataclass whose fields are the options.
        backend: name of the backend, for the message.
        options: the `backend.options` of a manifest.
        threads: replaces the option `threads`, unless it is None.

    Raises:
        BackendError: an option is unknown or has a wrong value.
    """
    stated = {name: value for name, value in options.items() if name != DECODE}
    if threads is not None:
        stated["threads"] = threads
    try:
        return from_plain(kind, stated, error=BackendError)
    except BackendError as cause:
        raise BackendError(f"backend '{backend}': {cause}") from cause
