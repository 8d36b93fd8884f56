"""Options of a backend: read from a manifest, checked field by field.

Options change how a model runs, so an unknown one is refused, never skipped.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError

Options = TypeVar("Options")


def parse_options(
    kind: type[Options], backend: str, options: Mapping[str, JsonValue], threads: int | None
) -> Options:
    """Return the options in a manifest, with `threads` instead of theirs unless it is None.

    Args:
        kind: a dataclass whose fields are the options; it checks their values.
        backend: its name, for the message.
        options: the `backend.options` of a manifest.
        threads: of one inference, or None.

    Raises:
        BackendError: an option is unknown or has a wrong value.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass, see above
    if unknown := sorted(set(options) - set(known)):
        raise BackendError(
            f"backend '{backend}': unknown options {unknown}, known are {known}; update edgekit"
        )
    return kind(**(dict(options) if threads is None else {**options, "threads": threads}))


def require_count(backend: str, name: str, value: Any, most: int | None = None) -> None:
    """Raise `BackendError` unless `value` is None or a whole number of at least 1, and at most `most`."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is None or (is_count and (most is None or value <= most)):
        return
    wanted = "at least 1" if most is None else f"1 to {most}"
    raise BackendError(f"backend '{backend}': {name} is {value!r}, expected null or {wanted}")


def require_names(backend: str, name: str, value: Any) -> None:
    """Raise `BackendError` unless `value` is a list or tuple of words that are not empty."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value):
        raise BackendError(f"backend '{backend}': {name} is {value!r}, expected a list of names")


def require_flag(backend: str, name: str, value: Any) -> None:
    """Raise `BackendError` unless `value` is true or false."""
    if not isinstance(value, bool):
        raise BackendError(f"backend '{backend}': {name} is {value!r}, expected true or false")
