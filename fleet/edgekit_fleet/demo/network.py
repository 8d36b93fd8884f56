"""The network between the real device of the demo and its fleet: a relay that can be interrupted.

During an interruption, the relay closes all connections and refuses new ones.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Self

_CHUNK_BYTES: Final = 1 << 16


class Network:
    """Forwards TCP ports from one local address to another. It is used as a context manager."""

    def __init__(self, near: str, far: str, ports: Sequence[int]) -> None:
        """Prepare the network. Forwarding starts with the `with` block.

        Args:
            near: The address that the device connects to.
            far: The address of the servers.
            ports: The ports, which are the same at both addresses.
        """
        self._near, self._far, self._ports = near, far, tuple(ports)
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)

    def __enter__(self) -> "Self":
        self._thread.start()
        self.restore()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    def restore(self) -> None:
        """Accept connections again.

        Raises:
            OSError: A port is taken.
        """
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> None:
        for port in self._ports:
            take = partial(self._forward, port)
            self._servers.append(await asyncio.start_server(take, self._near, port))

    async def _cut(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.transport.abort()
        while self._writers:  # until each has noticed it
            await asyncio.sleep(0.01)
        self._servers.clear()

    async def _forward(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._far, port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            for task in both:
                task.transport.abort()
            self._writers -= both


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
