"""What commands say to a running service: that another version is to be opened; and what they ask it.

A device without a running service needs none of this: the version is opened at the next start.
"""

import http.client
import json
import socket
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import SlotError, TransportError

_TIMEOUT_S: Final = 180.0  # a big model is loaded, tested and warmed up meanwhile, for 120 s at most
_INDEX_TIMEOUT_S: Final = 5.0  # it needs neither the disk nor an engine
_MAX_ANSWER_BYTES: Final = 64 << 10
_MAX_INDEX_BYTES: Final = 4 << 20


def tell_service(socket_path: Path, model: str) -> bool:
    """Let the service load `model` anew; return False where nobody listens on the socket any more.

    Args:
        socket_path: of the service.
        model: a valid name of a model.

    Raises:
        SlotError: the service refused it or broke off; what it opens at its next start does not depend on it.
    """
    connection = _UnixConnection(socket_path)
    try:
        connection.request("POST", f"/v2/repository/models/{model}/load", body=b"")
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER_BYTES)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except (OSError, http.client.HTTPException) as cause:
        raise SlotError(
            f"{model}: the service at {socket_path} did not answer: {cause}; restart it to open what is"
            " installed"
        ) from cause
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise SlotError(f"{model}: the service refused to switch ({response.status}): {_reason(answer)}")
    return True


def ask_service(socket_path: Path) -> dict[str, list[dict[str, str]]] | None:
    """Return what a running service says of each model, or None where it does not say anything in time.

    Args:
        socket_path: of the service.

    Returns:
        model -> lines of the repository's index, each with `version`, `state` and `reason`.
    """
    connection = _UnixConnection(socket_path, _INDEX_TIMEOUT_S)
    try:
        connection.request("POST", "/v2/repository/index", body=b"")
        response = connection.getresponse()
        if response.status != http.client.OK:
            return None
        models: dict[str, list[dict[str, str]]] = {}
        for line in json.loads(response.read(_MAX_INDEX_BYTES)):
            said = {key: str(line[key]) for key in ("version", "state", "reason")}
            models.setdefault(str(line["name"]), []).append(said)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    else:
        return models
    finally:
        connection.close()


def read_metrics(socket_path: Path) -> str:
    """Return the metrics of a running service, in Prometheus' text format.

    Args:
        socket_path: of the service.

    Raises:
        TransportError: it does not answer, or not with metrics.
    """
    connection = _UnixConnection(socket_path, _INDEX_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        answer = response.read(_MAX_INDEX_BYTES)
    except (OSError, http.client.HTTPException) as cause:
        raise TransportError(f"the service at {socket_path} did not answer: {cause}; does it run?") from cause
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise TransportError(
            f"the service at {socket_path} gave no metrics ({response.status}): {_reason(answer)}"
        )
    return answer.decode()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float = _TIMEOUT_S) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _reason(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace") or "without a reason"
