"""The web server, in a separate thread so that slow disks and downloads do not delay the manager."""

import asyncio
import asyncio.sslproto
import contextlib
import functools
import gc
import random
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgekit_fleet.access.client_network import PEER, find_network
from edgekit_fleet.identity.authority import TLS_1_2_CIPHERS, Authority
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.web.app import make_app
from edgekit_fleet.web.sample_uploads import CERTIFICATE, UploadLimits
from edgekit_runtime.errors import ConfigError, TransportError
from edgekit_runtime.system.own_process import trim_memory

if TYPE_CHECKING:
    from typing_extensions import Self

_START_S: Final = 10.0
_STOP_S: Final = 5.0
_MAX_BURST: Final = 64  # connections that are accepted in a turn of the loop: each takes 256 kB for TLS
_IDLE_S: Final = 10
_MIN_BYTES_PER_S: Final = 256  # at less the agent gives up by itself, see `artifacts.download`
_BUFFER_BYTES: Final = 16 << 10  # asyncio keeps 512 KiB of an answer under TLS, and 256 KiB to read into
_UNSENT_BYTES: Final = 128 << 10  # in the kernel, which takes megabytes for a slow client
_TRIM_EVERY_S: Final = 1
# Of 32 and 64 bits, in `struct tcp_info` of linux/tcp.h. Of a socket that listens, `tcpi_unacked` counts the
# connections that wait to be accepted.
_UNACKED, _BYTES_ACKED = 24, 120


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits for the connections of clients.

    Attributes:
        connections: The maximum number of open connections.
        handshakes: The maximum number of simultaneous TLS handshakes.
        head_s: The time limit for the header of a request.
        window_s: The time in seconds over which the download rate of a client is measured. A slow client is
            disconnected.
        waiting: The maximum number of connections that wait to be accepted.
        trim_connections: The number of closed connections after which the process returns unused memory to
            the system.
        settle_s: The delay in seconds after which a closed connection is counted a second time for
            `trim_connections`, because some of its memory is freed late.
    """

    connections: int = 500
    handshakes: int = 500
    head_s: float = 20.0
    window_s: float = 60.0
    waiting: int = 1000
    trim_connections: int = 50
    settle_s: float = 15.0


DEFAULT_LIMITS: Final = ConnectionLimits()


class _Listener(socket.socket):
    """Accepts connections, with limits against floods.

    If there are too many TLS handshakes, the oldest one of the address with the most is closed. Idle clients
    thus use up no file descriptors, and one address does not shut out others. If too many connections wait to
    be accepted, only the newest of each address is accepted, and the others are closed before their
    handshakes. Otherwise a device would wait behind a flood for longer than its timeout.

    Attributes:
        handshakes: The network and the connection of each handshake, by address and port.
        ended: The number of ended connections and handshakes since memory was returned.
    """

    def __init__(self, listening: socket.socket, limits: ConnectionLimits) -> None:
        super().__init__(fileno=listening.detach())
        self.limits = limits
        self.handshakes: dict[Any, tuple[str, socket.socket]] = {}
        self.ended = 0
        self._burst = 0
        self._accepted: list[tuple[socket.socket, Any]] = []

    def count_end(self) -> None:
        self.ended += 1

    def accept(self) -> tuple[socket.socket, Any]:
        if not self._burst:
            self._thin_out()
        self._burst += 1
        try:
            # asyncio takes as many as wait, and closes none meanwhile.
            if self._burst > _MAX_BURST and not self._accepted:
                raise BlockingIOError("others have their turn")
            connection, address = self._accepted.pop() if self._accepted else super().accept()
        except OSError:
            self._burst = 0
            raise
        self.handshakes[address] = find_network(address[0]), connection
        if len(self.handshakes) > self.limits.handshakes:
            ((most, _),) = Counter(network for network, _ in self.handshakes.values()).most_common(1)
            peer = next(peer for peer, (network, _) in self.handshakes.items() if network == most)
            _, oldest = self.handshakes.pop(peer)
            with contextlib.suppress(OSError):  # it has been closed already
                oldest.shutdown(socket.SHUT_RDWR)
            self.count_end()
        return connection, address

    def _thin_out(self) -> None:
        """If too many connections wait, accept the newest of each network, and close the others."""
        information = self.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED + 4)
        (waiting,) = struct.unpack_from("=I", information, _UNACKED)
        if waiting <= self.limits.waiting:
            return
        newest: dict[str, tuple[socket.socket, Any]] = {}
        with contextlib.suppress(OSError):  # some have gone meanwhile, or no descriptor is free
            for _ in range(waiting):
                connection, address = super().accept()
                network = find_network(address[0])
                if network in newest:
                    newest[network][0].close()
                newest[network] = connection, address
        accepted = list(newest.values())
        random.shuffle(accepted)
        for connection, _ in accepted[self.limits.handshakes :]:
            connection.close()
        self._accepted = accepted[: self.limits.handshakes]


class _BoundedConnection(H11Protocol):
    """A connection that is closed if its client sends a header or receives data too slowly.

    uvicorn itself has no such limits, so a few hundred slow clients could block it. If there are too many
    connections, a new one replaces one from the address with the most connections.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _rate_timer: asyncio.TimerHandle | None = None

    def __init__(self, *, listener: _Listener, **options: Any) -> None:
        super().__init__(**options)
        self._listener, self._limits = listener, listener.limits
        self._begin_s = 0.0
        self._address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listener.handshakes.pop(transport.get_extra_info("peername"), None)
        # asyncio leaves it off for a socket that was made elsewhere; each answer would be delayed by 40 ms.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        transport.set_write_buffer_limits(_BUFFER_BYTES)
        below_tls = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
        if below_tls is not None:  # asyncio has no public way to it
            below_tls.set_write_buffer_limits(_BUFFER_BYTES)
        self._begin_s = self.loop.time()
        self._address = find_network(self.client[0] if self.client else "")
        self._time_head()
        if (tls := self.transport.get_extra_info("ssl_object")) is not None:
            self.app_state = {CERTIFICATE: tls.getpeercert(binary_form=True)}
        if len(self.connections) >= self._limits.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def pause_writing(self) -> None:
        """Start to measure the download rate of the client."""
        super().pause_writing()
        if self._rate_timer is None:
            self._time_answer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._listener.count_end()
        self.loop.call_later(self._listener.limits.settle_s, self._listener.count_end)
        for timer in (self._head_timer, self._rate_timer):
            if timer is not None:
                timer.cancel()

    @property
    def _has_head(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _time_head(self) -> None:
        if self._head_timer is None and not self._has_head:
            self._head_timer = self.loop.call_later(self._limits.head_s, self.transport.abort)
        elif self._head_timer is not None and self._has_head:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_answer(self) -> None:
        """Check after each window how much data the client has acknowledged, while data waits to be sent."""
        connection, window_s = self.transport.get_extra_info("socket"), self._limits.window_s

        def read_acknowledged() -> int:
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
            return struct.unpack_from("=Q", information, _BYTES_ACKED)[0]  # type: ignore[no-any-return]

        def check(previous: int) -> None:
            self._rate_timer = None
            if not self.flow.write_paused or connection.fileno() < 0:  # TLS is told later of the end
                return
            acknowledged = read_acknowledged()
            if acknowledged - previous < _MIN_BYTES_PER_S * window_s:
                self.transport.abort()
            else:
                self._rate_timer = self.loop.call_later(window_s, check, acknowledged)

        self._rate_timer = self.loop.call_later(window_s, check, read_acknowledged())

    def _make_room(self) -> None:
        """Close a connection of the address with the most: the oldest without a request, or else the oldest.

        Addresses with fewer connections than this client keep theirs. Addresses with as many lose only idle
        ones. No address has its own limit, because a proxy or a site with many devices may use all free
        connections.
        """
        connections = [
            connection for connection in self.connections if isinstance(connection, _BoundedConnection)
        ]
        counts = Counter(connection._address for connection in connections)
        own = counts[self._address]
        victims = [
            connection
            for connection in connections
            if connection is not self
            and counts[connection._address] >= own + connection._has_head  # one more if it is busy
        ]
        if not victims:
            self.limit_concurrency = 0  # uvicorn answers this connection with 503, and no other
            return
        victim = max(
            victims,
            key=lambda connection: (
                counts[connection._address],
                not connection._has_head,
                -connection._begin_s,
            ),
        )
        self.connections.discard(victim)  # at once: the next connection counts them
        victim.transport.abort()


def _listen(host: str, port: int, option: str, limits: ConnectionLimits) -> _Listener:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _Listener(socket.create_server((host, port), family=family), limits)
    except OSError as cause:
        reason = (cause.strerror or str(cause)).partition(" (")[0]
        raise TransportError(
            f"the web server cannot listen on {host}:{port}: {reason}; choose another port with {option}"
        ) from cause


class WebServer:
    """A running web server, which stops at the end of the `with` block. It listens on `port`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        pair: tuple[Path, Path] | None,
        *,
        option: str,
        trusted_proxies: Sequence[str] = (),
        client_authority: Path | None = None,
        limits: ConnectionLimits = DEFAULT_LIMITS,
    ) -> None:
        """Start the server.

        Args:
            app: The application that answers requests.
            host: The address to listen on.
            port: The TCP port, or 0 for a free one.
            pair: The paths of the certificate and the key, or None for plain HTTP.
            option: The command line option for the port, for messages.
            trusted_proxies: See `FleetSettings`.
            client_authority: The authority of client certificates, or None.
            limits: The limits for connections.

        Raises:
            TransportError: The port is taken or not permitted.
            ConfigError: The certificate or key cannot be read.
        """
        self._socket = _listen(host, port, option, limits)
        self.port: int = self._socket.getsockname()[1]
        certificate, key = pair or (None, None)
        # Of each connection under TLS, from Python 3.11 on: 500 of asyncio's own 256 KiB are 125 MiB.
        asyncio.sslproto.SSLProtocol.max_size = _BUFFER_BYTES  # type: ignore[attr-defined]
        config = uvicorn.Config(
            _note_peer(app, trusted_proxies),
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ssl_ciphers=TLS_1_2_CIPHERS,
            ssl_ca_certs=None if client_authority is None else str(client_authority),
            ssl_cert_reqs=ssl.CERT_NONE if client_authority is None else ssl.CERT_OPTIONAL,
            http=functools.partial(_BoundedConnection, listener=self._socket),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # see `_note_peer`
            log_level="error",  # a line for each request that is malformed or refused would fill the disk
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=2,
            callback_notify=self._trim_memory,
            timeout_notify=_TRIM_EVERY_S,
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
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()

    async def _trim_memory(self) -> None:
        """Return the memory of closed connections to the system."""
        if self._socket.ended >= self._socket.limits.trim_connections:
            self._socket.ended = 0
            await run_in_threadpool(_give_memory_back)  # anyio ends idle threads, whose objects hold arenas

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


def _note_peer(app: ASGIApp, trusted_proxies: Sequence[str]) -> ASGIApp:
    """Return an application that records the peer, and the client that a trusted proxy names.

    Other peers may not name a client, because they could choose the address that limits count.
    """
    inner: Any = ProxyHeadersMiddleware(app, list(trusted_proxies)) if trusted_proxies else app  # type: ignore[arg-type]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope[PEER] = (scope.get("client") or ("",))[0]
        await inner(scope, receive, send)

    return answer


def _give_memory_back() -> None:
    gc.collect()  # a connection is a cycle of objects
    trim_memory()


def serve_devices(
    store: Store,
    folder: FleetFolder,
    settings: FleetSettings,
    authority: Authority,
    *,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    upload_limits: UploadLimits | None = None,
) -> WebServer:
    """Start the web server for devices: enrolment, renewal, downloads and uploads of samples.

    Raises:
        TransportError: The port is taken or not permitted.
    """
    app = make_app(store, folder, settings, authority, upload_limits)
    return WebServer(
        app,
        settings.host,
        settings.web_port,
        authority.pair("server"),
        option="--web-port",
        trusted_proxies=settings.trusted_proxies,
        client_authority=authority.certificate_path,
        limits=limits,
    )
