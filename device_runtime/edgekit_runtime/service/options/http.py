"""Options of HTTP, of the page `/live`, and of gRPC."""

from typing import Annotated

from edgekit_runtime.dataclass_json import PositiveBytes, PositiveSeconds, Range
from edgekit_runtime.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of HTTP connections, requests and responses.

    Attributes:
        max_head_bytes: The size limit of a request line with its headers.
        max_body_bytes: The size limit of one request body.
        max_receiving_bytes: The size limit of the received parts of all request bodies together. The
            compressed bodies that wait for decompression have a separate limit of the same size.
        max_sending_bytes: The size limit of all responses that clients have not received yet. If a
            further response would exceed this limit, its connection is closed.
        max_connections: The maximum number of connections. Further clients get status 503. If the service
            listens on a Unix socket and TCP, each of them accepts at most three quarters of this number.
        max_tls_connections: The maximum number of TLS connections and handshakes. Beyond it, a new client
            replaces the oldest client that has not sent the token yet.
        idle_timeout_s: How long a connection may wait for its next request.
        read_timeout_s: The time limit for receiving a request head. Over TCP, the time for the first head
            starts when the client connects. This limit is also the interval at which the transfer rate of
            bodies and responses is checked.
        min_bytes_per_s: The minimum transfer rate. Slower clients are disconnected.
        server_timing: Whether responses to inference requests state their duration (`Server-Timing`) and the
            load of the service (`Endpoint-Load-Metrics`).
    """

    max_head_bytes: PositiveBytes = 16 << 10
    max_body_bytes: PositiveBytes = 64 << 20
    max_receiving_bytes: PositiveBytes = 256 << 20
    max_sending_bytes: PositiveBytes = 256 << 20
    max_connections: Annotated[int, Range(1, 1 << 20)] = 16_384
    max_tls_connections: Annotated[int, Range(1, 1 << 20)] = 256
    idle_timeout_s: PositiveSeconds = 75.0
    read_timeout_s: PositiveSeconds = 10.0
    min_bytes_per_s: PositiveBytes = 64 << 10
    server_timing: bool = False

    @property
    def step_bytes(self) -> float:
        """The number of bytes that must be transferred between two checks of the progress."""
        return self.read_timeout_s * self.min_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """Addresses and limits of gRPC. The limits of HTTP apply too.

    Attributes:
        unix_socket: The path of the Unix socket, or empty for none.
        host: The TCP address to listen on.
        port: The TCP port. 0 means any free port, and None disables TCP.
        max_streams: The maximum number of simultaneous calls per connection. Further calls are refused.
    """

    unix_socket: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int | None, Range(0, 65_535)] = None
    max_streams: Annotated[int, Range(1, 1 << 16)] = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """Options of the page `/live`.

    Attributes:
        enabled: Whether the page is served. By default, it is served only if no other machine can connect.
        max_viewers: The maximum number of simultaneous viewers.
        max_fps: The maximum number of pictures per second.
        max_side: The maximum width and height of the pictures in pixels.
    """

    enabled: bool | None = None
    max_viewers: Annotated[int, Range(1, 1000)] = 8
    max_fps: Annotated[float, Range(0.1, 60)] = 15.0
    max_side: Annotated[int, Range(64, 4096)] = 960
