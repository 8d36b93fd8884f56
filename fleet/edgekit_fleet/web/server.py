"""The web server in a thread of its own, so that slow disks and downloads do not delay the manager."""

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgekit_fleet.access.client_network import find_network
from edgekit_fleet.identity.authority import TLS_1_2_CIPHERS, Authority
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.web.app import make_app
from edgekit_runtime.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from typing_extensions import Self

_START_S: Final = 10.0
_STOP_S: Final = 5.0
_MAX_CONNECTIONS = 500
_MAX_HANDSHAKES = 200  # at a time; an honest one takes as long as three packets
_IDLE_S: Final = 10
_HEAD_S = 20.0
_NOTHING_TAKEN_S = 120


class _Listener(socket.socket):
    """Accepts connections. Too many TLS handshakes end the oldest, so silent clients use up no descriptors.

    Attributes:
        handshakes: address and port -> connection that is not ready yet.
    """

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self.handshakes: dict[Any, socket.socket] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self.handshakes[address] = connection
        if len(self.handshakes) > _MAX_HANDSHAKES:
            oldest = self.handshakes.pop(next(iter(self.handshakes)))
            with contextlib.suppress(OSError):  # it has been closed already
                oldest.shutdown(socket.SHUT_RDWR)
        return connection, address


class _BoundedConnection(H11Protocol):
    """A connection that ends if the head of a request takes too long, or if the client receives no data.

    uvicorn itself waits for ever for both, and a few hundred such connections would use up its limit. At the
    limit, a new connection replaces one of the address with the most connections.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *, listener: _Listener, **options: Any) -> None:
        super().__init__(**options)
        self._listener = listener
        self._begin_s = 0.0
        self._address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listener.handshakes.pop(transport.get_extra_info("peername"), None)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NOTHING_TAKEN_S * 1000)
        # asyncio leaves it off for a socket that was made elsewhere; each answer would be delayed by 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._begin_s = self.loop.time()
        self._address = find_network(self.client[0] if self.client else "")
        self._time_head()
        if len(self.connections) >= _MAX_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._head_timer is not None:
            self._head_timer.cancel()

    @property
    def _has_head(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _time_head(self) -> None:
        if self._head_timer is None and not self._has_head:
            self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)
        elif self._head_timer is not None and self._has_head:
            self._head_timer.cancel()
            self._head_timer = None

    def _make_room(self) -> None:
        """End the oldest connection without a request, of the address that has most connections.

        If all have a request, end one of another address that has more than half of all connections. No
        address has a limit of its own: a proxy, and a site whose devices share an address, may use what is
        free.
        """
        connections = [each for each in self.connections if isinstance(each, _BoundedConnection)]
        counts = Counter(each._address for each in connections)
        victims = [each for each in connections if not each._has_head and each is not self]
        if not victims:
            most, count = counts.most_common(1)[0]
            if most == self._address or count <= _MAX_CONNECTIONS // 2:
                return  # uvicorn answers 503
            victims = [each for each in connections if each._address == most]
        victim = max(victims, key=lambda each: (counts[each._address], -each._begin_s))
        self.connections.discard(victim)  # at once: uvicorn counts them at the next request
        victim.transport.abort()


class WebServer:
    """A running web server; ends with the `with` block.

    Attributes:
        port: port that it listens on.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, pair: tuple[Path, Path] | None, *, option: str
    ) -> None:
        """Start the server.

        Args:
            app: application that answers.
            host: address to listen on.
            port: TCP port; 0 for a free one.
            pair: certificate and key, or None for plain HTTP.
            option: option of the command that sets the port, for messages.

        Raises:
            TransportError: the port is taken or may not be used.
            ConfigError: certificate or key cannot be read.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = _Listener(socket.create_server((host, port), family=family))
        except OSError as cause:
            reason = (cause.strerror or str(cause)).partition(" (")[0]
            raise TransportError(
                f"the web server cannot listen on {host}:{port}: {reason}; choose another port with {option}"
            ) from cause
        self.port: int = self._socket.getsockname()[1]
        certificate, key = pair or (None, None)
        config = uvicorn.Config(
            app,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ssl_ciphers=TLS_1_2_CIPHERS,
            http=functools.partial(_BoundedConnection, listener=self._socket),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # else anybody on this machine could choose the address that limits count
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=2,
            lifespan="off",
            ws="none",
        )
        try:
            config.load()
        except OSError as cause:  # also of the ssl module
            self._socket.close()
            raise ConfigError(f"cannot use {certificate} with {key}: {cause}") from cause
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=f"web {self.port}", daemon=True)
        self._thread.start()
        self._wait(f"{host}:{port}")

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def _wait(self, address: str) -> None:
        limit = time.monotonic() + _START_S
        while self._thread.is_alive() and time.monotonic() < limit:
            if self._server.started:
                return
            self._thread.join(0.02)
        self.close()
        raise TransportError(f"the web server does not start on {address}")


def serve_devices(
    store: Store, folder: FleetFolder, settings: FleetSettings, authority: Authority
) -> WebServer:
    """Return the running server of devices: enrolment, renewal, and the files that they fetch.

    Raises:
        TransportError: the port is taken or may not be used.
    """
    app = make_app(store, folder, settings, authority)
    return WebServer(app, settings.host, settings.web_port, authority.pair("server"), option="--web-port")
