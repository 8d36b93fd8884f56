"""Where a service is, and how to connect to it."""

import socket
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgekit_runtime.errors import TransportError

_TIMEVAL: Final = np.dtype([("seconds", np.int64), ("microseconds", np.int64)])
_MAX_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service is.

    Attributes:
        path: of a Unix socket, or None.
        host, port: of TCP.
        is_tls: whether to speak TLS.
        ca_file: PEM file of the authority that signed the service's certificate; None for the system's.
    """

    path: str | None = None
    host: str = ""
    port: int = 0
    is_tls: bool = False
    ca_file: str | None = None

    @classmethod
    def parse(cls, text: str, ca_file: str | None = None) -> "Address":
        """Return the address in `text`: a path, `host:port`, `http://host:port` or `https://host:port`.

        Raises:
            TransportError: it is none of these.
        """
        if text.startswith("unix:"):
            return cls(path=text.removeprefix("unix:"))
        scheme, has_scheme, rest = text.partition("://")
        if not has_scheme and ("/" in text or ":" not in text):
            return cls(path=text)
        host, _, port = (rest if has_scheme else text).rstrip("/").rpartition(":")
        if (has_scheme and scheme not in ("http", "https")) or not host or not _is_port(port):
            raise TransportError(
                f"address {text!r}: expected the path of a Unix socket, host:port or https://host:port"
            )
        return cls(None, host.strip("[]"), int(port), scheme == "https", ca_file)

    def __str__(self) -> str:
        return self.path if self.path is not None else f"{self.host}:{self.port}"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text[:6]) <= _MAX_PORT


def connect(address: Address, timeout_s: float) -> socket.socket:
    """Return a connection to a service.

    Raises:
        TransportError: it cannot be reached.
    """
    try:
        if address.path is not None:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # A socket that does not block cannot stand in the queue of one that is busy.
                limit_time(connected, timeout_s)
                connected.connect(address.path)
            except BaseException:
                connected.close()
                raise
            return connected
        connected = socket.create_connection((address.host, address.port), timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.is_tls:
            import ssl

            context = ssl.create_default_context(cafile=address.ca_file)
            return context.wrap_socket(connected, server_hostname=address.host)
        connected.settimeout(None)
    except (OSError, UnicodeError) as cause:  # the latter of names that no host can have
        raise TransportError(f"cannot reach the service at {address}: {cause}; is it running?") from cause
    return connected


def limit_time(connected: socket.socket, timeout_s: float) -> None:
    """Let the kernel keep the time: Python's own time-outs ask poll() before each call."""
    value = np.array((int(timeout_s), int(timeout_s % 1 * 1e6) or 1), _TIMEVAL).tobytes()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
