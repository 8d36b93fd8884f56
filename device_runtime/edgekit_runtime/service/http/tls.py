"""TLS in front of the HTTP server. Decrypted bytes reach the server through a socket pair.

The HTTP server therefore needs no TLS code, and an encrypted connection can be lent to a worker like any
other. Clients that need speed can use the Unix socket.
"""

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Final

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.service.http.server import Connect, HttpServer

_READ_BYTES: Final = 64 << 10
_HANDSHAKE_TIMEOUT_S: Final = 10.0

_logger = logging.getLogger(__name__)


def make_context(certificate: str, key: str, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return a server context for TLS 1.2 and later.

    Args:
        certificate: The path of a PEM file with the certificate and its chain.
        key: The path of a PEM file with the private key, without a password.
        protocols: The protocols to offer by ALPN (RFC 7301). Empty for HTTP/1.1.

    Raises:
        ConfigError: A file is missing or invalid, or the two files do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if protocols:
        context.set_alpn_protocols(protocols)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as cause:  # ssl.SSLError is an OSError
        raise ConfigError(f"listen: cannot use tls_certificate {certificate} with {key}: {cause}") from cause
    return context


class TlsListener:
    """Accepts TLS connections and passes them to an HTTP server.

    TLS connections have their own limit, because each takes three file descriptors and 256 KiB. The limit
    includes unfinished handshakes. If the limit is reached, the oldest connection that has not yet sent the
    token is closed, so that unauthorized clients cannot lock out others.
    """

    def __init__(
        self,
        http: HttpServer,
        listener: socket.socket,
        context: ssl.SSLContext,
        connect: Connect,
    ) -> None:
        """Start to accept connections. `http` closes the listener when it drains."""
        self._http, self._context, self._connect = http, context, connect
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._leaving: set[asyncio.Task[None]] = set()  # no longer counted, and not ended yet
        http.listen(listener, self._accept)

    def close(self) -> None:
        """Cancel unfinished handshakes. Established connections stay open."""
        for task in list(self._handshakes):
            task.cancel()

    def _accept(self, connected: socket.socket) -> None:
        is_full = self._http.is_full(is_local=False)
        if is_full or len(self._tasks) >= self._http.limits.max_tls_connections:
            if not self._strangers:
                connected.close()
                return
            self._evict(next(iter(self._strangers)))
        task = self._http.loop.create_task(self._serve(connected))
        self._tasks.add(task)
        self._handshakes.add(task)
        self._strangers[task] = None
        task.add_done_callback(functools.partial(self._forget, connected))

    def _evict(self, stranger: "asyncio.Task[None]") -> None:
        self._admit(stranger)
        self._tasks.discard(stranger)
        self._leaving.add(stranger)
        stranger.cancel()

    def _admit(self, task: "asyncio.Task[None] | None") -> None:
        if task is not None:
            self._strangers.pop(task, None)

    def _forget(self, connected: socket.socket, task: "asyncio.Task[None]") -> None:
        for tasks in (self._tasks, self._handshakes, self._leaving):
            tasks.discard(task)
        self._admit(task)
        connected.close()  # of a task that was cancelled before it began

    async def _serve(self, connected: socket.socket) -> None:
        task = asyncio.current_task()
        try:
            address = str(connected.getpeername()[0])
            reader, writer = await _handshake(connected, self._context)
        except OSError as cause:
            _logger.debug("a TLS handshake failed: %s", cause)
            return
        finally:
            self._handshakes.discard(task)
        timeout_s = self._http.limits.read_timeout_s
        try:
            outer, inner = socket.socketpair()
            outer.setblocking(False)
            with outer:
                if self._http.is_full(is_local=False):
                    inner.close()
                else:
                    on_admit = functools.partial(self._admit, task)
                    self._connect(inner, is_local=False, on_admit=on_admit, address=address)
                await _bridge(reader, writer, outer, timeout_s)
        except (OSError, asyncio.TimeoutError) as cause:
            _logger.debug("a TLS connection ended: %s", cause)
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()
            try:  # a client may never confirm the end
                await asyncio.wait_for(writer.wait_closed(), timeout_s)
            except (OSError, asyncio.TimeoutError):
                pass
            finally:
                writer.transport.abort()


async def _handshake(
    connected: socket.socket, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READ_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connected, ssl=context, ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S
        )
    except BaseException:
        connected.close()
        raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _bridge(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outer: socket.socket, timeout_s: float
) -> None:
    """Carry bytes both ways until the service ends the connection or one way fails.

    Both tasks have ended when this returns: else the loop would go on watching a descriptor that is closed
    next, and would never poll the next socket that gets its number.
    """
    pumps = [
        asyncio.ensure_future(_inwards(reader, outer)),
        asyncio.ensure_future(_outwards(outer, writer, timeout_s)),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
    for pump in pumps:
        if not pump.cancelled():
            pump.result()


async def _inwards(reader: asyncio.StreamReader, outer: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(_READ_BYTES):
        await loop.sock_sendall(outer, data)
    outer.shutdown(socket.SHUT_WR)


async def _outwards(outer: socket.socket, writer: asyncio.StreamWriter, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(outer, _READ_BYTES):
        writer.write(data)
        await asyncio.wait_for(writer.drain(), timeout_s)
    # The service has ended the connection; what the client may still send is not needed.
    raise ConnectionResetError("the service closed the connection")


def _refuse_password() -> str:
    raise ValueError("the private key has a password; store it without one")
