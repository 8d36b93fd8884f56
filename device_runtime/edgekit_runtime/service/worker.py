"""A worker process: the service with one model and without a listening socket.

It gets connections from the service that started it, answers on them itself, and gives each back when its
next request is for something else. It ends when its channel to the service ends.
"""

import asyncio
import json
import logging
import mmap
import os
import socket
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.archive import read_package
from edgekit_runtime.errors import DigestError, EdgekitError
from edgekit_runtime.service.channel import Channel, Kind
from edgekit_runtime.service.confinement import confine, end_with
from edgekit_runtime.service.connection import Connection
from edgekit_runtime.service.heads import Head
from edgekit_runtime.service.isolation import find_infer
from edgekit_runtime.service.leases import Lease
from edgekit_runtime.service.loading import Loaded, ModelOptions, load
from edgekit_runtime.service.orders import BEAT_S, INDEX, LENT, REGION, Order
from edgekit_runtime.service.plain import from_plain
from edgekit_runtime.service.screening import refuse_stranger
from edgekit_runtime.service.server import Service
from edgekit_runtime.service.sharedmem import Region, RegionLimits, Regions
from edgekit_runtime.service.snapshots import write_snapshot
from edgekit_runtime.service.versions import Installed
from edgekit_runtime.statements import Statement, read_unverified

_DESCRIPTORS: Final = 3

_logger = logging.getLogger(__name__)


class _Verdict:
    """A `Verifier` of the one package whose signature the service has verified."""

    def __init__(self, manifest_sha256: str) -> None:
        self._manifest_sha256 = manifest_sha256

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        """Return what the envelope says, where it is about that package."""
        statement, key_id = read_unverified(envelope, predicate_type, where)
        if statement.sha256 != self._manifest_sha256:
            raise DigestError(f"{where}: the file has changed since it was verified; load the model again")
        return statement, key_id


class _OnePackage:
    """A `Source` of the package that was handed over."""

    def __init__(self, order: Order, package: int) -> None:
        self._order = order
        self._path = Path(f"/proc/self/fd/{package}")
        self._trust = _Verdict(order.manifest_sha256)
        self.limits = order.limits

    def names(self) -> Sequence[str]:
        return (self._order.name,)

    def find(self, name: str) -> Sequence[Installed]:
        return (Installed(name, self._order.version, self._path),)

    def find_proven(self, _name: str) -> Installed | None:
        return None

    def open(self, _name: str, options: ModelOptions) -> list[Loaded]:
        return [self.reopen(self._path, options)]

    def reopen(self, path: Path, options: ModelOptions) -> Loaded:
        with read_package(path, self._trust, self.limits) as package:
            return load(package, options)

    def confirm(self, _name: str, _version: str) -> None:
        pass

    def reject(self, _name: str, _version: str, _reason: str) -> bool:
        return False


class _Worker:
    """One worker, in its event loop."""

    def __init__(self, order: Order, connected: socket.socket, states: memoryview) -> None:
        self._order, self._states = order, states
        self._loop = asyncio.get_running_loop()
        self._name, self._version = order.name, order.version
        self._token = None if order.token is None else order.token.encode("ascii")
        self._is_default = self._is_retired = False
        self._indices: dict[Connection, int] = {}
        self._later: deque[tuple[Kind, bytes, list[int]]] = deque()
        self._said = b""
        self._channel = Channel(self._loop, connected, self._take, _end)

    async def run(self, source: _OnePackage) -> None:
        """Load, then serve until the process ends."""
        order = self._order
        self._regions = _ForwardedRegions(order.config.shared_memory, self._channel)
        self._service = Service(order.config, source, self._regions)
        self._http = self._service.http
        self._http.screen = self._screen
        self._beat()
        try:
            await self._service.registry.load(self._name)
        except EdgekitError as error:
            self._channel.send(Kind.WORKER_FAILED, str(error).encode())
        else:
            self._channel.send(Kind.WORKER_READY)
        await self._loop.create_future()

    def _take(self, kind: Kind, payload: bytes, descriptors: list[int]) -> None:
        """Take regions in at once, since a request may already name them, and all else in its order."""
        if kind is Kind.MAIN_REGION:
            offset_bytes, size_bytes, is_mapped, length = REGION.unpack_from(payload)
            text = payload[REGION.size :].decode()
            region = Region(
                text[:length], text[length:], descriptors[0], offset_bytes=offset_bytes, size_bytes=size_bytes
            )
            if is_mapped:
                region.map()
            self._regions.put(region)
        elif kind is Kind.MAIN_FORGET_REGION:
            for region in self._regions.of(is_local=True):
                if region.name == payload.decode():
                    self._regions.remove(region)
        else:
            self._later.append((kind, payload, descriptors))
            self._loop.call_soon(self._take_later)

    def _take_later(self) -> None:
        kind, payload, descriptors = self._later.popleft()
        if kind is Kind.MAIN_LEND:
            self._adopt(payload, descriptors)
        elif kind is Kind.MAIN_RETIRE:
            self._retire()

    def _adopt(self, payload: bytes, descriptors: list[int]) -> None:
        index, is_local, is_default = LENT.unpack_from(payload)
        self._is_default |= is_default
        if not descriptors:  # this process had no descriptor free
            self._channel.send(Kind.WORKER_CLOSED, INDEX.pack(index))
            return
        connected = socket.socket(fileno=descriptors[0])
        unread = payload[LENT.size :]
        connection = self._http.adopt(
            connected,
            is_local=is_local,
            lease=Lease(self._states, index),
            on_close=lambda: self._forget(connection),
        )
        self._indices[connection] = index
        if self._is_retired:
            self._give_back(connection, unread)
        else:
            connection.resume(unread)

    def _forget(self, connection: Connection) -> None:
        self._channel.send(Kind.WORKER_CLOSED, INDEX.pack(self._indices.pop(connection)))

    def _screen(self, connection: Connection, head: Head) -> bool:
        if not connection.is_local:
            refuse_stranger(head, self._token)
        target = find_infer(head.path)
        is_ours = target is not None and target[0] == self._name
        if is_ours and target is not None and not self._is_retired:
            version = target[1]
            if version == self._version or (version is None and self._is_default):
                return False
        self._give_back(connection)
        return True

    def _give_back(self, connection: Connection, unread: bytes = b"") -> None:
        index = self._indices.pop(connection)
        connection.on_close = None
        connected, waiting = connection.release()
        # Closed first: from when the service is told, it reads this connection itself.
        connected.close()
        self._channel.send(Kind.WORKER_RETURNS, INDEX.pack(index) + unread + waiting)

    def _retire(self) -> None:
        """Give all connections back, those that are in use after their answers."""
        self._is_retired = True
        self._http.on_rest = self._give_back
        for connection in list(self._indices):
            if connection.is_at_rest:
                self._give_back(connection)

    def _beat(self) -> None:
        """Show life, and what was counted if there is news."""
        self._loop.call_later(BEAT_S, self._beat)
        snapshot = b""
        for served in self._service.registry.models.served():
            snapshot = write_snapshot(served.metrics)
        self._channel.send(Kind.WORKER_BEAT, b"" if snapshot == self._said else snapshot)
        self._said = snapshot


class _ForwardedRegions(Regions):
    """Regions that the service registers; its word of one may still lie in the channel."""

    __slots__ = ("_channel",)

    def __init__(self, limits: RegionLimits, channel: Channel) -> None:
        super().__init__(limits)
        self._channel = channel

    def find(self, name: str, *, is_local: bool) -> Region:
        try:
            return super().find(name, is_local=is_local)
        except EdgekitError:
            self._channel.receive()
            return super().find(name, is_local=is_local)


def _end(_reason: str) -> None:
    os._exit(0)  # whoever started this is gone, or wants it gone: nothing here is worth an orderly end


def main() -> None:
    """Serve on the channel whose descriptor is the first argument, until it ends."""
    connected = socket.socket(fileno=int(sys.argv[1]))
    connected.set_inheritable(False)
    room = socket.CMSG_SPACE(_DESCRIPTORS * array("i").itemsize)
    _, extras, _, _ = connected.recvmsg(16, room, socket.MSG_CMSG_CLOEXEC)
    order_file, package, table = array("i", extras[0][2])
    with os.fdopen(order_file) as file:
        file.seek(0)
        order = from_plain(Order, json.load(file))
    end_with(order.parent)
    logging.basicConfig(format=f"edgekit-worker {order.name}: %(message)s", level=logging.WARNING)
    for refused in confine(order.isolation):
        _logger.warning("the system does not allow %s", refused)
    states = memoryview(mmap.mmap(table, order.connections))
    os.close(table)

    async def serve() -> None:
        await _Worker(order, connected, states).run(_OnePackage(order, package))

    asyncio.run(serve())


if __name__ == "__main__":
    main()
