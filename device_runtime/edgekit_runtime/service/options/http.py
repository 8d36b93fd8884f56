"""How much the service takes from its clients before it refuses."""

from dataclasses import dataclass, fields
from typing import Annotated

from edgekit_runtime.dataclass_json import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of the HTTP layer.

    Attributes:
        max_head_bytes: of a request line with its headers.
        max_body_bytes: of one body.
        max_receiving_bytes: of all bodies that are being received at one time, as far as they have come.
        max_sending_bytes: of all answers that clients have not yet taken; beyond them a connection is closed.
        max_connections: beyond them a connection gets 503 and is closed. Where clients come both over the
            Unix socket and over TCP, so does one beyond three quarters of them that come over one of these.
        max_tls_connections: of those, over TLS, unfinished handshakes among them. Where no place is left, a
            new client takes the place of the one that has been there longest without a request that may ask.
        idle_timeout_s: how long a connection may wait for its next request.
        read_timeout_s: for a head; over TCP the first one counts from the start of the connection. For a body
            or an answer it is how often its progress is looked at.
        min_bytes_per_s: the slowest client that is waited for, sending or receiving.

    Raises:
        ValueError: a limit is not over 0.
    """

    max_head_bytes: int = 16 << 10
    max_body_bytes: int = 64 << 20
    max_receiving_bytes: int = 256 << 20
    max_sending_bytes: int = 256 << 20
    max_connections: Annotated[int, Range(1, 1 << 20)] = 16_384
    max_tls_connections: Annotated[int, Range(1, 1 << 20)] = 256
    idle_timeout_s: float = 75.0
    read_timeout_s: float = 10.0
    min_bytes_per_s: int = 64 << 10

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)!r}, expected more than 0")

    @property
    def step_bytes(self) -> float:
        """How much must come or go between two looks."""
        return self.read_timeout_s * self.min_bytes_per_s
