"""A process with a TCP proxy that emulates a slow link. `Testbed` starts it without root rights.

All connections share the bandwidth of each direction. The proxy delays bytes instead of packets. It therefore
emulates no packet loss and no TCP slow start, and a handshake takes no round trip. While the link is blocked,
bytes wait.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from edgekit_runtime.system.child_process import open_channel

HOST: Final = "127.0.0.1"
_MOST_CHUNK_BYTES: Final = 16_384
_CHUNK_S: Final = 0.005  # time that a chunk takes on the link
_LEAST_CHUNK_BYTES: Final = 256
_MOST_LATE_S: Final = 0.05
_INSTANT_S: Final = 0.0005  # a read that takes less found its bytes in the buffer,
_PROMPT_S: Final = 0.003  # and one that takes less in the kernel, if the chunk before it was full
_MOST_CHUNKS: Final = 32  # chunks that wait for delivery


class SharedWire:
    """One direction of the link.

    Attributes:
        delay_s: Half a round trip.
        is_open: An event that is cleared while the link is blocked.
        bytes_per_s: The payload bandwidth, which all connections share.
    """

    def __init__(self) -> None:
        self.bytes_per_s, self.delay_s = 1.0, 0.0
        self.is_open = asyncio.Event()
        self._free_at = 0.0

    @property
    def chunk_bytes(self) -> int:
        """The maximum number of bytes that are sent at once."""
        return min(_MOST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, int(self.bytes_per_s * _CHUNK_S)))

    async def send(self, size_bytes: int, *, was_waiting: bool) -> float:
        """Wait until the link has sent the bytes, and return their time of arrival by the monotonic clock.

        `was_waiting` says whether the bytes were available before the call. If so, they are sent directly
        after the previous bytes, even if the call is slightly late.
        """
        now = time.monotonic()
        is_late = was_waiting and now - self._free_at < _MOST_LATE_S
        self._free_at = (
            self._free_at if is_late else max(now, self._free_at)
        ) + size_bytes / self.bytes_per_s
        mine = self._free_at
        await asyncio.sleep(mine - time.monotonic())
        return mine + self.delay_s


class ProxyLink:
    def __init__(self) -> None:
        self._up, self._down = SharedWire(), SharedWire()
        self._servers: list[asyncio.Server] = []
        self._pairs: set[asyncio.Task[None]] = set()

    async def listen(self, port: int) -> int:
        """Listen on a free loopback port, forward its connections to `port`, and return the free port."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101  # streams start a task for each connection
            self._pairs.add(task)
            try:
                await self._connect(port, reader, writer)
            finally:
                self._pairs.discard(task)

        server = await asyncio.start_server(accept, HOST, 0, limit=_MOST_CHUNK_BYTES)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def apply(self, order: Mapping[str, Any]) -> None:
        """Change the bandwidths and the delay of the link, or block it. Connections stay open.

        `order` contains `is_blocked`. Unless the link is blocked, `order` also contains the round-trip time
        `rtt_s` and the payload bandwidths `up_bits_per_s` and `down_bits_per_s`.
        """
        for wire, rate in ((self._up, "up_bits_per_s"), (self._down, "down_bits_per_s")):
            if order["is_blocked"]:
                wire.is_open.clear()
                continue
            wire.bytes_per_s, wire.delay_s = order[rate] / 8, order["rtt_s"] / 2
            wire.is_open.set()

    async def _connect(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection. If one side aborts, abort the other side."""
        try:
            server_reader, server_writer = await asyncio.open_connection(HOST, port)
        except OSError:
            writer.transport.abort()
            return
        directions = (
            asyncio.ensure_future(_carry(reader, server_writer, self._up)),
            asyncio.ensure_future(_carry(server_reader, writer, self._down)),
        )
        try:
            await asyncio.gather(*directions)
        except OSError:
            pass
        finally:
            for direction in directions:
                direction.cancel()
            server_writer.transport.abort()
            writer.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: SharedWire) -> None:
    """Forward the bytes of one direction until its end."""
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_CHUNKS)

    async def deliver() -> None:
        while True:
            due, chunk = await on_the_way.get()
            await asyncio.sleep(due - time.monotonic())
            await wire.is_open.wait()
            if not chunk:
                with contextlib.suppress(OSError):  # closed already
                    writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()

    delivery = asyncio.ensure_future(deliver())
    is_full = False
    try:
        while True:
            read_start_s, max_bytes = time.monotonic(), wire.chunk_bytes
            chunk = await reader.read(max_bytes)
            was_waiting = time.monotonic() - read_start_s < (_PROMPT_S if is_full else _INSTANT_S)
            is_full = len(chunk) == max_bytes
            await wire.is_open.wait()
            await on_the_way.put((await wire.send(len(chunk), was_waiting=was_waiting), chunk))
            if not chunk:
                break
        await delivery
    finally:
        delivery.cancel()


async def _serve() -> None:
    """Execute orders until the channel closes."""
    reader, writer = await asyncio.open_connection(sock=open_channel())
    link = ProxyLink()
    while line := await reader.readline():
        order = json.loads(line)
        if "port" in order:
            answer = {"port": await link.listen(order["port"])}
        else:
            link.apply(order)
            answer = {}
        writer.write(f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    asyncio.run(_serve())
