"""The endpoints with which clients register, list and unregister shared memory regions.

Source: Triton's extension shared_memory.
"""

from typing import Any

from edgekit_runtime.errors import RequestError
from edgekit_runtime.protocol.json_fields import load_small, take_field
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.response import make_json
from edgekit_runtime.service.oip.shared_memory import Region, Regions


class _OwnedRegions:
    """The memfds that a connection registered. As its `on_close` it moves with it to a worker and back.

    Attributes:
        regions: some of them may have been unregistered meanwhile.
    """

    __slots__ = ("_registered", "regions")

    def __init__(self, registered: Regions) -> None:
        self._registered = registered
        self.regions: list[Region] = []

    def __call__(self) -> None:
        """Unregister the regions when the connection ends: a client that dies unregisters nothing."""
        for region in self.regions:
            self._registered.remove(region)


class SharedMemoryHandler:
    """Handles requests about shared memory regions.

    A memfd is unregistered when the connection that registered it ends.
    """

    __slots__ = ("_regions",)

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    @property
    def allows_posix(self) -> bool:
        """Whether clients may register POSIX segments."""
        return self._regions.allows_posix

    def register(self, name: str, connection: Connection, _head: RequestHead, body: memoryview) -> None:
        """Register a POSIX segment, or a memfd that was sent with the request.

        A memfd is unregistered when the connection ends.
        """
        stated = load_small(body)
        key = stated.get("key")
        if not isinstance(key, str) or not 1 <= len(name) <= 256:
            raise RequestError(
                400, f"region '{name[:80]}': expected a name, a key, byte_size and maybe offset"
            )
        offset_bytes = take_field(stated, "offset", f"region '{name}'", int, 0)
        size_bytes = take_field(stated, "byte_size", f"region '{name}'", int)
        if connection.descriptors:
            region = self._regions.add_memfd(
                name,
                key,
                connection.descriptors[0],
                offset_bytes=offset_bytes,
                size_bytes=size_bytes,
                owner=connection.peer_pid,
            )
            del connection.descriptors[0]  # the region owns it from now on
            owned = connection.on_close
            if not isinstance(owned, _OwnedRegions):
                owned = connection.on_close = _OwnedRegions(self._regions)
            # Without regions that were unregistered meanwhile: their mappings end with the last reference.
            owned.regions = [
                *(open_region for open_region in owned.regions if open_region.descriptor >= 0),
                region,
            ]
        else:
            self._regions.add_posix(name, key, offset_bytes=offset_bytes, size_bytes=size_bytes)
        connection.respond(*make_json({}))

    def respond_status(
        self, name: str | None, connection: Connection, _head: RequestHead, _body: memoryview
    ) -> None:
        """Respond with the registration of the region `name`, or of all regions that this client can use."""
        is_local = connection.is_local
        regions = self._regions.of(is_local=is_local)
        selected = regions if name is None else [self._regions.find(name, is_local=is_local)]
        connection.respond(*make_json([_describe_region(region) for region in selected]))

    def unregister(
        self, name: str | None, connection: Connection, _head: RequestHead, _body: memoryview
    ) -> None:
        """Unregister the region `name`, and respond.

        If `name` is None, unregister all POSIX segments that this client can use, and the memfds of this
        connection. POSIX segments have no owner, so any connection may unregister them.

        Raises:
            RequestError: The region is a memfd that another process registered.
        """
        owned = connection.on_close.regions if isinstance(connection.on_close, _OwnedRegions) else ()
        for region in self._regions.of(is_local=connection.is_local):
            if region.name == name and region.owner not in (None, connection.peer_pid):
                raise RequestError(
                    400, f"region '{name}' was registered by another process, which alone can unregister it"
                )
            if region.name == name or (name is None and (not region.is_mapped or region in owned)):
                self._regions.remove(region)
        connection.respond(*make_json({}))


def _describe_region(region: Region) -> dict[str, Any]:
    return {
        "name": region.name,
        "key": region.key,
        "offset": region.offset_bytes,
        "byte_size": region.size_bytes,
    }
