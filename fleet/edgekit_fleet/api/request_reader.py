"""Reads requests, with limits on their size, time and form."""

import dataclasses
import functools
import hashlib
import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from edgekit_fleet.api.endpoints.endpoint import AnyEndpoint
from edgekit_fleet.web.request_body import read_pieces
from edgekit_fleet.web.uploads import MAX_PACKAGE_BYTES, PIECE_S
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import OutputError, RequestError

_MAX_DEPTH: Final = 20
_MOST_EXACT: Final = 1 << 53
_NUMBERS: Final[dict[type, str]] = {
    int: r"-?[0-9]{1,18}",
    float: r"-?[0-9]{1,18}(\.[0-9]{1,18})?(e[-+]?[0-9]{1,3})?",
}
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class _UnreadableError(RequestError):
    """An error that takes one argument, as `from_plain` needs."""

    def __init__(self, message: str) -> None:
        super().__init__(422, message)


@asynccontextmanager
async def receive_file(request: Request, folder: Path, sha256: str) -> AsyncIterator[Path]:
    """Write the body of a request to a temporary file, and yield its path.

    The file is deleted at the end of the `with` block. `folder` is the folder for temporary files. `sha256`
    is the expected SHA-256 in hexadecimal digits.

    Raises:
        RequestError: 404, `sha256` is malformed. 408, the client is too slow. 409, the SHA-256 differs. 413,
            the file is too large.
        OutputError: The file cannot be written.
    """
    if _SHA256.fullmatch(sha256) is None:
        raise RequestError(404, "the path ends with the sha256 of the package: 64 hexadecimal digits")
    path: Path | None = None
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".upload-", delete=False) as file:
            path = Path(file.name)
            digest = hashlib.sha256()
            async for piece in read_pieces(request, MAX_PACKAGE_BYTES, PIECE_S):
                digest.update(piece)
                await run_in_threadpool(file.write, piece)
        actual_sha256 = digest.hexdigest()
        if actual_sha256 != sha256:
            raise RequestError(409, f"the body has sha256 {actual_sha256}, expected {sha256}; send it again")
        yield path
    except OSError as cause:
        raise OutputError(f"cannot keep the package: {cause.strerror}") from cause
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def parse_request(endpoint: AnyEndpoint, request: Request, body: bytes, **own: Any) -> Any:
    """Return an instance of `endpoint.request` from the path and the body or query of a request.

    `body` is JSON in a POST request. `own` are fields that the caller sets, such as the path of a received
    file.

    Raises:
        RequestError: 400, the body is not JSON. 415, it has another media type. 422, a field is missing,
            unknown or invalid.
    """
    plain: dict[str, Any] = dict(request.path_params)
    values = _read_json(request, body) if endpoint.method == "POST" else _read_query(endpoint, request)
    doubled = plain.keys() & values.keys()
    if doubled:
        raise RequestError(422, f"'{min(doubled)}' stands in the path, and may not be repeated elsewhere")
    plain |= values
    _check_text(plain, 0)
    if own and values:
        raise RequestError(422, "the path takes no query")
    if own:
        return endpoint.request(**plain, **own)
    return from_plain(endpoint.request, plain, "", _UnreadableError)


def _read_json(request: Request, body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, f"Content-Type is {kind[:80]!r}, expected application/json")
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant, parse_float=_read_float)
    except (ValueError, RecursionError) as cause:
        raise RequestError(400, f"the body is not JSON: {cause}"[:300]) from cause
    if not isinstance(parsed, dict):
        raise RequestError(422, f"the body is a {type(parsed).__name__}, expected an object")
    return parsed


def _read_float(text: str) -> float:
    """Return a number of JSON, in which 2.0 is an integer too."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _MOST_EXACT else value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _read_query(endpoint: AnyEndpoint, request: Request) -> dict[str, Any]:
    kinds = _kinds_of(endpoint.request)  # type: ignore[arg-type]  # classes can be hashed
    values: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        if name in values:
            raise RequestError(422, f"'{name[:80]}' stands twice in the query")
        kind = kinds.get(name, str)
        pattern = _NUMBERS.get(kind)
        if pattern is not None and re.fullmatch(pattern, text) is None:
            raise RequestError(422, f"'{name}' is {text[:80]!r}, expected a number")
        values[name] = text if pattern is None else kind(text)
    return values


@functools.cache
def _kinds_of(record: type[Any]) -> dict[str, type]:
    """Return a dict from field to its type, without range and None."""
    hints = get_type_hints(record, include_extras=True)
    kinds = {}
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        hint = get_args(hint)[0] if get_origin(hint) is Union else hint
        kinds[field.name] = hint
    return kinds


def _check_text(value: Any, depth: int) -> None:
    """Refuse text that no database takes: NUL, and halves of surrogate pairs."""
    if depth > _MAX_DEPTH:
        raise RequestError(422, f"the body is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, str):
        if "\0" in value or (
            not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
        ):
            raise RequestError(422, "a text holds NUL or half of a surrogate pair")
    elif isinstance(value, dict):
        for name, member in value.items():
            _check_text(name, depth)
            _check_text(member, depth + 1)
    elif isinstance(value, list):
        for member in value:
            _check_text(member, depth + 1)
