"""Shared memory of clients in a worker process. The service registers it and sends it to the worker."""

import logging

from edgekit_runtime.errors import EdgekitError, UnavailableError
from edgekit_runtime.service.oip.shared_memory import Region, Regions
from edgekit_runtime.service.options.resources import RegionLimits
from edgekit_runtime.service.worker_wire.channel import Channel
from edgekit_runtime.service.worker_wire.messages import REGION

_logger = logging.getLogger(__name__)


class ForwardedRegions(Regions):
    """Regions that the service has registered and sent over the channel."""

    __slots__ = ("_channel", "_missing")

    def __init__(self, limits: RegionLimits, channel: Channel) -> None:
        super().__init__(limits)
        self._channel = channel
        self._missing: dict[str, bool] = {}  # name -> is_mapped

    def receive(self, payload: bytes, descriptors: list[int]) -> None:
        """Register a region that the service sent. If it cannot be opened, `find` reports this later.

        Args:
            payload: The packed message.
            descriptors: The file descriptor of the region. Empty if none was received.
        """
        offset_bytes, size_bytes, is_mapped, length = REGION.unpack_from(payload)
        words = payload[REGION.size :]
        name, key = (text.decode(errors="surrogatepass") for text in (words[:length], words[length:]))
        if not descriptors:  # none was free, or it is unregistered already, which the next message says
            self._missing[name] = is_mapped
            return
        region = Region(name, key, descriptors[0], offset_bytes=offset_bytes, size_bytes=size_bytes)
        try:
            if is_mapped:
                region.map()
        except EdgekitError as error:  # the service could: what this process lacks is no fault of the region
            region.close()
            self._missing[name] = is_mapped
            _logger.warning("%s", error)
        else:
            self.put(region)

    def forget(self, payload: bytes) -> None:
        name = payload.decode(errors="surrogatepass")
        self._missing.pop(name, None)
        for region in self.of(is_local=True):
            if region.name == name:
                self.remove(region)

    def find(self, name: str, *, is_local: bool) -> Region:
        """Return the region `name`, see `Regions.find`.

        Raises:
            UnavailableError: The service has registered the region, but this process could not open it.
        """
        try:
            return super().find(name, is_local=is_local)
        except EdgekitError:
            self._channel.receive()
            if name in self._missing and (is_local or not self._missing[name]):
                raise UnavailableError(
                    f"shared memory region '{name}' could not be opened in the model's process, which had no"
                    " descriptor free; register it again"
                ) from None
            return super().find(name, is_local=is_local)
