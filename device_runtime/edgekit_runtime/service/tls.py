"""TLS in front of the HTTP server: decrypted bytes go through a socket pair, as if a client had sent them.

So there is one HTTP layer, and a connection can be given to a worker whether it is encrypted or not. It costs
a copy and two calls of the system each way, off the path of what is fast.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import Final

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.service.http import HttpServer

_READ_BYTES: Final = 64 << 10
_HANDSHAKE_TIMEOUT_S: Final = 10.0

_logger = logging.getLogger(__name__)


def make_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return the server's side of TLS 1.2 and later.

    Args:
        certificate: path of a PEM file with the certificate and what leads to its authority.
        key: path of a PEM file with the private key, without a password.

    Raises:
        ConfigError: a file is missing or wrong, or they do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as cause:  # ssl.SSLError is an OSError
        raise ConfigError(f"listen: cannot use tls_certificate {certificate} with {key}: {cause}") from cause
    return context


async def listen_tls(http: HttpServer, listener: socket.socket, context: ssl.SSLContext) -> asyncio.Server:
    """Accept TLS connections from `listener` and hand them to `http`, until the server is closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outer, inner = socket.socketpair()
        outer.setblocking(False)
        timeout_s = http.limits.read_timeout_s
        with outer:
            if http.is_full:
                inner.close()
            else:
                http.adopt(inner, is_local=False)
            try:
                await asyncio.gather(_inwards(reader, outer), _outwards(outer, writer, timeout_s))
            except (OSError, asyncio.TimeoutError) as cause:
                _logger.debug("a TLS connection ended: %s", cause)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    return await asyncio.start_server(
        serve, sock=listener, ssl=context, ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S, limit=_READ_BYTES
    )


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
    # The service has ended the connection; nobody needs what the client may still send.
    raise ConnectionResetError("the service closed the connection")


def _refuse_password() -> str:
    raise ValueError("the private key has a password, which nobody can type here")
