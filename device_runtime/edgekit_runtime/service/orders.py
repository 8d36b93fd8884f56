"""What the service and a worker process say to each other beyond single words: forms of the messages."""

import struct
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.archive import Limits
from edgekit_runtime.manifest import Manifest
from edgekit_runtime.service.config import ServiceConfig
from edgekit_runtime.service.isolation import Isolation
from edgekit_runtime.signing import TrustStore

BEAT_S: Final = 1.0
LENT: Final = struct.Struct("<I??")  # index, is_local, whether the model was asked for without a version
INDEX: Final = struct.Struct("<I")
REGION: Final = struct.Struct("<QQ?H")  # offset_bytes, size_bytes, is_mapped, bytes of the name; name, key


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to do; it comes in a file, with the descriptors of the package and of the leases.

    Attributes:
        parent: process id of the service.
        config: of the service in the process, which does not listen.
        isolation: of this process.
        manifest: of the package, which must be the one that the service has verified.
        trust: whose packages are accepted.
        limits: of reading it.
        token: that clients over TCP must send, or None.
        connections: how many may be lent at one time.
    """

    parent: int
    config: ServiceConfig
    isolation: Isolation
    manifest: Manifest
    trust: TrustStore
    limits: Limits
    token: bytes | None
    connections: int
