"""Requests to the running service, for example to read its metrics or load another version.

Unlike the client, this module does not import numpy, so that the agent of a fleet uses little memory.
"""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import SlotError, TransportError
from edgekit_runtime.protocol.rest import (
    FLEET_LOG,
    FLEET_SETTINGS,
    REPOSITORY_INDEX,
    SAMPLES,
    STREAMS,
    decode_error,
    repository_path,
)
from edgekit_runtime.system.local_sockets import connect_local

# A big model is opened and tested in a child, then loaded, tested and warmed up, each for 120 s at most.
_LOAD_TIMEOUT_S: Final = 300.0
_TIMEOUT_S: Final = 5.0  # of what needs neither the disk nor an engine
_NO_LIMIT_S: Final = 1e6  # the kernel would limit a socket without a time limit of Python's
_MAX_BODY_BYTES: Final = 4 << 20
_OK: Final = 200


def load_installed(socket_path: Path, model: str, rollout: str | None = None) -> bool:
    """Make the service load the installed versions of `model`. Return False if no service is listening.

    Args:
        socket_path: socket of the service.
        model: a valid name of a model.
        rollout: `swap`, `canary` or `shadow` for this load, or None for the configuration of the service.

    Raises:
        SlotError: the service refused or did not answer. The service loads the versions at its next start.
    """
    stated = b"" if rollout is None else encode_json({"parameters": {"rollout": rollout}})
    return _change(socket_path, model, "load", stated)


def unload_model(socket_path: Path, model: str) -> bool:
    """Make the service stop serving a model. Return False if no service is listening.

    Raises:
        SlotError: the service refused or did not answer.
    """
    return _change(socket_path, model, "unload", b"")


def is_listening(socket_path: Path) -> bool:
    """Return whether a service is listening, even if it is too busy to answer."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_TIMEOUT_S)
        try:
            probe.connect(str(socket_path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # too many wait for it
            return True
        return True


def _change(socket_path: Path, model: str, action: Literal["load", "unload"], body: bytes) -> bool:
    try:
        status, body = _request(socket_path, "POST", repository_path(model, action), _LOAD_TIMEOUT_S, body)
    except TransportError as error:
        if isinstance(error.__cause__, (ConnectionRefusedError, FileNotFoundError)):
            return False
        raise SlotError(
            f"{model}: the service did not answer: {error}; restart it to open what is installed"
        ) from error
    if status != _OK:
        verb = "switch" if action == "load" else "unload it"
        raise SlotError(f"{model}: the service refused to {verb} ({status}): {_reason(body)}")
    return True


def read_index(socket_path: Path) -> dict[str, list[dict[str, str]]] | None:
    """Return the index of a running service, or None if it does not answer in time.

    Returns:
        A dict from model to a list with the `version`, `state` and `reason` of each version.
    """
    models: dict[str, list[dict[str, str]]] = {}
    try:
        status, body = _request(socket_path, "POST", REPOSITORY_INDEX, _TIMEOUT_S)
        if status != _OK:
            return None
        for line in json.loads(body):
            stated = {key: str(line[key]) for key in ("version", "state", "reason")}
            models.setdefault(str(line["name"]), []).append(stated)
    except (TransportError, ValueError, KeyError, TypeError):
        return None
    return models


def read_metrics(socket_path: Path, *, timeout_s: float = _TIMEOUT_S) -> str:
    """Return the metrics of a running service in Prometheus' text format.

    Raises:
        TransportError: the service does not answer, or does not answer with metrics.
    """
    status, body = _request(socket_path, "GET", "/metrics", timeout_s)
    if status != _OK:
        raise TransportError(f"the service at {socket_path} gave no metrics ({status}): {_reason(body)}")
    return body.decode(errors="replace")


def read_fleet_streams(socket_path: Path) -> dict[str, Any]:
    """Return a dict from name to state of the fleet's streams, empty if there is no answer within 5 s.

    Each state contains the fields of `ReportedStream` as JSON.
    """
    stated = _read_own(socket_path, STREAMS).get("fleet", {})
    return stated if isinstance(stated, dict) else {}


def read_service_settings(socket_path: Path) -> dict[str, str]:
    """Return a dict from each fleet setting to the reason why it has no effect in the service.

    The reason is empty if the setting has an effect. The dict is empty if there is no answer.
    """
    stated = _read_own(socket_path, FLEET_SETTINGS).get("settings", {})
    return {str(key): str(problem) for key, problem in stated.items()} if isinstance(stated, dict) else {}


def read_service_log(socket_path: Path, count: int) -> list[str]:
    """Return the last `count` lines of the service's log, empty if there is no answer in time."""
    stated = _read_own(socket_path, FLEET_LOG).get("lines", [])
    return [str(line) for line in stated][-count:] if isinstance(stated, list) else []


def read_samples(socket_path: Path) -> dict[str, Any]:
    """Return the state of the samples in the service. It is empty if there is no answer within 5 s.

    Its member `allowed` states whether the owner allows samples. `orders` is a dict from order id to the
    fields of `ReportedSamples`.
    """
    return _read_own(socket_path, SAMPLES)


def _read_own(socket_path: Path, path: str) -> dict[str, Any]:
    """Return a document that the service gives to its own user; an empty one without an answer in time."""
    try:
        status, body = _request(socket_path, "GET", path, _TIMEOUT_S)
        document = json.loads(body) if status == _OK else {}
    except (TransportError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def read_stream(socket_path: Path, order: Mapping[str, Any]) -> Iterator[bytes]:
    """Run a stream in the service until the iteration ends, and yield lines of JSON.

    A line with `frame` is an answer, and a line with `sinks` contains the counts at the end. Any other line
    is a state of the stream. `order` is the result of `StreamOptions.to_json()`, and may also contain the
    `name` of the stream.

    Raises:
        TransportError: the service refuses the stream, or ends.
    """
    with _connected(socket_path, _TIMEOUT_S) as connection:
        connected = connection.sock  # the response takes it
        connection.request("POST", STREAMS, encode_json(dict(order)))
        response = connection.getresponse()
        if response.status != _OK:
            raise TransportError(f"the service refuses the stream: {_reason(response.read(_MAX_BODY_BYTES))}")
        connected.settimeout(_NO_LIMIT_S)
        yield from response


def _request(
    socket_path: Path, method: str, path: str, timeout_s: float, content: bytes = b""
) -> tuple[int, bytes]:
    """Return status and body of the response.

    Raises:
        TransportError: the response is missing, late, torn, or over the limit.
    """
    with _connected(socket_path, timeout_s) as connection:
        connection.request(method, path, content or None)
        response = connection.getresponse()
        if response.length is None or response.length > _MAX_BODY_BYTES:
            raise TransportError(f"{socket_path}: the answer states no length up to {_MAX_BODY_BYTES} bytes")
        return response.status, response.read()  # with a number of bytes it would return a torn body


@contextlib.contextmanager
def _connected(socket_path: Path, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
    """Return a connection to the service; its failures become `TransportError`."""
    connection = http.client.HTTPConnection("localhost")
    try:
        connection.sock = connect_local(str(socket_path), timeout_s)
        connection.sock.settimeout(timeout_s)  # the kernel's limit makes a late body look like an absent one
    except OSError as cause:
        raise TransportError(f"cannot reach the service at {socket_path}: {cause}; is it running?") from cause
    with contextlib.closing(connection):
        try:
            yield connection
        except TimeoutError as cause:
            raise TransportError(f"{socket_path}: no answer within {timeout_s:g} s") from cause
        except (OSError, http.client.HTTPException) as cause:
            raise TransportError(f"{socket_path}: {cause}") from cause


def _reason(body: bytes) -> str:
    return decode_error(body) or body[:200].decode(errors="replace") or "without a reason"
