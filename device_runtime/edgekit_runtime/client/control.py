"""Requests of commands to the running service: read its index or metrics, load another version.

A device without a running service needs none of this: the service opens what is installed when it starts.
"""

import json
import socket
from pathlib import Path
from typing import Final, Literal

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.client.link import Address, Link
from edgekit_runtime.client.requests import make_request_head
from edgekit_runtime.client.responses import Response
from edgekit_runtime.errors import SlotError, TransportError
from edgekit_runtime.protocol.rest import REPOSITORY_INDEX, decode_error, repository_path

_LOAD_TIMEOUT_S: Final = 180.0  # a big model is loaded, tested and warmed up meanwhile, for 120 s at most
_TIMEOUT_S: Final = 5.0  # of what needs neither the disk nor an engine
_MAX_BODY_BYTES: Final = 4 << 20
_OK: Final = 200


def load_installed(socket_path: Path, model: str, rollout: str | None = None) -> bool:
    """Make the service load the installed versions of `model`; return False if no service listens.

    Args:
        socket_path: socket of the service.
        model: a valid name of a model.
        rollout: `swap`, `canary` or `shadow` for this time; None as the service is configured.

    Raises:
        SlotError: the service refused or did not answer; its next start does not depend on it.
    """
    stated = b"" if rollout is None else encode_json({"parameters": {"rollout": rollout}})
    return _change(socket_path, model, "load", stated)


def unload_model(socket_path: Path, model: str) -> bool:
    """Make the service stop serving a model; return False if no service listens.

    Args:
        socket_path: socket of the service.
        model: a valid name of a model.

    Raises:
        SlotError: the service refused or did not answer.
    """
    return _change(socket_path, model, "unload", b"")


def is_listening(socket_path: Path) -> bool:
    """Return whether a service listens, also one that is too busy to answer."""
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
    """Return the versions that a running service states of each model, or None without an answer in time.

    Args:
        socket_path: socket of the service.

    Returns:
        model -> lines of the repository's index, each with `version`, `state` and `reason`.
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


def read_metrics(socket_path: Path) -> str:
    """Return the metrics of a running service, in Prometheus' text format.

    Args:
        socket_path: socket of the service.

    Raises:
        TransportError: it does not answer, or not with metrics.
    """
    status, body = _request(socket_path, "GET", "/metrics", _TIMEOUT_S)
    if status != _OK:
        raise TransportError(f"the service at {socket_path} gave no metrics ({status}): {_reason(body)}")
    return body.decode()


def _request(
    socket_path: Path, method: str, path: str, timeout_s: float, content: bytes = b""
) -> tuple[int, bytes]:
    """Return status and body of the response.

    Raises:
        TransportError: there is none, not in time, or a longer one.
    """
    link = Link(Address(path=str(socket_path)), _MAX_BODY_BYTES)
    request = make_request_head(method, path, "Host: localhost\r\n", len(content))
    parts = (request, content) if content else (request,)
    try:
        found: Response = link.ask(parts, len(request) + len(content), timeout_s)
    finally:
        link.close()
    head, body = found  # never None on a new connection
    return head.status, bytes(body)


def _reason(body: bytes) -> str:
    return decode_error(body) or body[:200].decode(errors="replace") or "without a reason"
