"""HTTP requests from inside the service, over socket pairs.

An isolated model can only be called over a connection. The service therefore opens a connection to itself and
lends it to the model's process, like the connection of a client.
"""

import asyncio
import socket
import weakref
from collections.abc import Mapping
from typing import Final, TypeAlias

from edgekit_runtime.errors import RequestError, UnavailableError
from edgekit_runtime.protocol.rest import decode_error
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.server import HttpServer

_OK: Final = 200
_Pair: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Loopback:
    """A client inside the server's process. It counts as a local client unless `is_local` is False."""

    def __init__(self, server: HttpServer, *, is_local: bool = True, address: str = "") -> None:
        self._server, self._is_local, self._address = server, is_local, address
        self._idle: list[_Pair] = []
        self._open: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()

    def close(self) -> None:
        """Close all connections, including those in use."""
        for writer in self._open:
            writer.transport.abort()

    async def post(
        self, path: str, fields: Mapping[str, str], body: "bytes | memoryview"
    ) -> tuple[Mapping[str, str], bytes]:
        """Send a POST request.

        Returns:
            The response's header fields, with names in lower case, and its body.

        Raises:
            RequestError: The status is not 200.
            UnavailableError: The connection ended before the response.
        """
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                break
            writer.transport.abort()  # the service closes idle ones
        else:
            reader, writer = await self._connect()
        stated = {"Host": "localhost", "Content-Length": str(len(body)), **fields}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in stated.items())]
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
            writer.write(body)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status_line, *received = head.strip().split("\r\n")
            fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in received)}
            content = await reader.readexactly(int(fields["content-length"]))
        except (OSError, EOFError) as cause:
            writer.transport.abort()
            raise UnavailableError("the model's process ended; try again", 1.0) from cause
        except BaseException:
            writer.transport.abort()
            raise
        self._idle.append((reader, writer))
        status, retry_after = int(status_line.split(" ")[1]), fields.get("retry-after")
        if status != _OK:
            retry_after_s = None if retry_after is None else int(retry_after)
            raise RequestError(status, decode_error(content) or "refused", retry_after_s=retry_after_s)
        return fields, content

    async def _connect(self) -> _Pair:
        outer, inner = socket.socketpair()
        Connection(self._server, inner, is_local=self._is_local, address=self._address)
        pair = await asyncio.open_connection(sock=outer)
        self._open.add(pair[1])
        return pair
