"""What the service and a worker process say to each other beyond single words: forms of the messages."""

import struct
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.archive import Limits
from edgekit_runtime.service.config import ServiceConfig
from edgekit_runtime.service.isolation import Isolation

LENT: Final = struct.Struct("<I??")  # index, is_local, whether the model was asked for without a version
INDEX: Final = struct.Struct("<I")
REGION: Final = struct.Struct("<QQ?H")  # offset_bytes, size_bytes, is_mapped, bytes of the name; name, key
BEAT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to do; it comes as JSON in a file, with the package and the memory of the leases.

    Attributes:
        parent: process id of the service.
        config: of the service in the process, which does not listen.
        isolation: of this process.
        name, version: of the model.
        manifest_sha256: of the package that the service has verified, which must still be this one.
        limits: of reading the package.
        token: that clients over TCP must send, or None.
        connections: how many may be lent at one time.
    """

    parent: int
    config: ServiceConfig
    isolation: Isolation
    name: str
    version: str
    manifest_sha256: str
    limits: Limits
    token: str | None
    connections: int
