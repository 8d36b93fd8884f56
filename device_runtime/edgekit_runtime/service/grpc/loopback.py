"""A request over HTTP from inside the service, on a socket pair, as TLS does it.

A worker takes connections, not calls. So what comes over gRPC for an isolated model goes to it on a
connection of its own.
"""

import asyncio
import socket
from typing import Final

from edgekit_runtime.errors import RequestError, UnavailableError
from edgekit_runtime.protocol.rest import HEADER_LENGTH, decode_error
from edgekit_runtime.service.grpc.rpcs import MessageResponder
from edgekit_runtime.service.http.connection import Connection

_MAX_HEAD_BYTES: Final = 16 << 10


async def post(responder: MessageResponder, path: str, json_bytes: int, body: "bytes | memoryview") -> None:
    """Send a request with the rights of the client of `responder`, which gets the response.

    Raises:
        RequestError: it is refused.
        UnavailableError: the connection ended first, or there are too many.
    """
    owner, authorization = responder.rpc.owner, responder.rpc.head.authorization
    if owner.server.is_full(is_local=owner.is_local):
        raise UnavailableError("too many connections; try again", 1.0)
    outer, inner = socket.socketpair()
    Connection(owner.server, inner, is_local=owner.is_local).address = owner.client
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"{HEADER_LENGTH}: {json_bytes}", f"Content-Length: {len(body)}"]
    if authorization is not None:
        lines.append(f"Authorization: {authorization.decode('latin-1')}")
    reader, writer = await asyncio.open_connection(sock=outer, limit=_MAX_HEAD_BYTES)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        status_line, *stated = head.decode("latin-1").strip().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in stated)}
        content = await reader.readexactly(int(fields["content-length"]))
    except (OSError, EOFError) as cause:
        raise UnavailableError("the model's process ended; try again", 1.0) from cause
    finally:
        writer.transport.abort()
    status, retry_after = int(status_line.split(" ")[1]), fields.get("retry-after")
    if status != 200:
        retry_after_s = None if retry_after is None else int(retry_after)
        raise RequestError(status, decode_error(content) or "refused", retry_after_s=retry_after_s)
    at = int(fields.get(HEADER_LENGTH.lower(), len(content)))
    responder.respond(head + content[:at], content[at:])
