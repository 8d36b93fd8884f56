"""The listening sockets of the service: Unix sockets and TCP, for HTTP and gRPC, with optional TLS on TCP."""

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.service.api.routes import Router
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.listeners import SocketFile, inherit_listeners, listen_tcp, listen_unix
from edgekit_runtime.service.http.server import Connect, HttpServer
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.options.config import ServiceConfig
from edgekit_runtime.system.install_hint import install_command

if TYPE_CHECKING:
    from edgekit_runtime.service.http.tls import TlsListener


class Listening:
    """The listening sockets of a service. The HTTP server accepts and closes all their connections."""

    def __init__(self, http: HttpServer, config: ServiceConfig) -> None:
        self._http, self._config = http, config
        self._socket_files: list[SocketFile] = []
        self._tls: list[TlsListener] = []

    def open(self, router: Router, registry: Registry, *, token: bytes | None) -> list[str]:
        """Start to accept connections, and return the addresses. The address of HTTP over TCP is last.

        Args:
            router: The router for HTTP and gRPC requests.
            registry: The registry of the models.
            token: The result of `read_token`, or None if TCP clients need no token.

        Raises:
            TransportError: An address is in use or not usable.
            ConfigError: gRPC is configured, but its package is not installed.
        """
        listen, grpc = self._config.listen, self._config.grpc
        connect = functools.partial(Connection, self._http)
        listeners = inherit_listeners()
        if listen.unix_socket and not listeners:
            listeners.append(self._listen_unix(listen.unix_socket))
        addresses = [self._serve(listener, connect) for listener in listeners]
        if grpc.unix_socket or grpc.port is not None:
            try:
                import hpack  # noqa: F401  # of the extra
            except ModuleNotFoundError as cause:
                raise ConfigError(f"grpc: {cause}; {install_command('grpc')}") from cause
            from edgekit_runtime.service.grpc.connection import GrpcConnection  # most services have no gRPC
            from edgekit_runtime.service.grpc.service import GrpcService

            service = GrpcService(self._http, router, registry, self._config, token=token)
            connect_grpc = functools.partial(GrpcConnection, service)
            if grpc.unix_socket:
                listener = self._listen_unix(grpc.unix_socket)
                addresses.append(f"grpc+{self._serve(listener, connect_grpc)}")
            if grpc.port is not None:
                addresses.append(f"grpc://{self._serve_tcp(grpc.host, grpc.port, connect_grpc, ('h2',))}")
        if listen.host:
            scheme = "" if listen.tls_certificate is None else "https://"
            addresses.append(scheme + self._serve_tcp(listen.host, listen.port, connect))
        return addresses

    def _listen_unix(self, name: str) -> socket.socket:
        path = Path(name)
        listener = listen_unix(path)
        self._socket_files.append(SocketFile.find(path))
        return listener

    def _serve(self, listener: socket.socket, connect: Connect) -> str:
        self._http.listen(listener, functools.partial(self._http.serve, connect))
        return _name(listener)

    def _serve_tcp(self, host: str, port: int, connect: Connect, protocols: Sequence[str] = ()) -> str:
        """Accept connections, encrypted if there is a certificate; return the address."""
        certificate, key = self._config.listen.tls_certificate, self._config.listen.tls_key
        if certificate is None or key is None:
            return self._serve(listen_tcp(host, port), connect)
        from edgekit_runtime.service.http.tls import TlsListener, make_context

        context = make_context(certificate, key, protocols)
        listener = listen_tcp(host, port)
        self._tls.append(TlsListener(self._http, listener, context, connect))
        return _name(listener)

    def begin_stop(self) -> None:
        """Cancel unfinished handshakes, and remove the files of the Unix sockets."""
        for tls in self._tls:
            tls.close()
        for socket_file in self._socket_files:
            socket_file.remove()  # while it listens: later its inode may be that of another file


def _name(listener: socket.socket) -> str:
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{os.fsdecode(address)}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"
