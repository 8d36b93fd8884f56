"""Options of the HTTP layer, of its page `/live`, and of gRPC beside it."""

from typing import Annotated, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass

_Bytes: TypeAlias = Annotated[int, Range(1, 1 << 50)]
_Seconds: TypeAlias = Annotated[float, Range(0.001, 10**9)]
_Port: TypeAlias = Annotated[int | None, Range(0, 65_535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of the HTTP layer.

    Attributes:
        max_head_bytes: size limit of a request line with its headers.
        max_body_bytes: size limit of one request body.
        max_receiving_bytes: size limit of the received parts of all request bodies together. A second limit
            of this size is for all compressed bodies that wait to be decompressed.
        max_sending_bytes: size limit of all responses that clients have not received yet. Beyond it, the
            connection is closed.
        max_connections: a further connection gets 503 and is closed. If there are clients over the Unix
            socket and over TCP, each kind gets at most three quarters of the connections.
        max_tls_connections: limit of TLS connections and handshakes. Beyond it, a new client replaces the
            oldest client that has not sent the token yet.
        idle_timeout_s: how long a connection may wait for its next request.
        read_timeout_s: time limit for a request head; over TCP, the first head's time starts when the client
            connects. It is also the interval at which the progress of bodies and responses is checked.
        min_bytes_per_s: a client that sends or receives more slowly is disconnected.
        server_timing: whether responses to inference requests state their times (`Server-Timing`) and the
            load of the service (`Endpoint-Load-Metrics`).
    """

    max_head_bytes: _Bytes = 16 << 10
    max_body_bytes: _Bytes = 64 << 20
    max_receiving_bytes: _Bytes = 256 << 20
    max_sending_bytes: _Bytes = 256 << 20
    max_connections: Annotated[int, Range(1, 1 << 20)] = 16_384
    max_tls_connections: Annotated[int, Range(1, 1 << 20)] = 256
    idle_timeout_s: _Seconds = 75.0
    read_timeout_s: _Seconds = 10.0
    min_bytes_per_s: _Bytes = 64 << 10
    server_timing: bool = False

    @property
    def step_bytes(self) -> float:
        """How many bytes must be sent or received between two checks of the progress."""
        return self.read_timeout_s * self.min_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """Addresses and bounds of gRPC. The bounds of the HTTP layer apply too.

    Attributes:
        unix_socket: path of a Unix socket, or empty for none.
        host: address to listen on over TCP.
        port: port of TCP, 0 for any; None for no TCP.
        max_streams: calls at one time on one connection; further ones are refused.
    """

    unix_socket: str = ""
    host: str = "127.0.0.1"
    port: _Port = None
    max_streams: Annotated[int, Range(1, 1 << 16)] = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """The page `/live`.

    Attributes:
        enabled: whether the page exists; by default only if no other machine can reach the service.
        max_viewers: most clients at one time.
        max_fps: most pictures in a second.
        max_side: longer side of the pictures in pixels.
    """

    enabled: bool | None = None
    max_viewers: Annotated[int, Range(1, 1000)] = 8
    max_fps: Annotated[float, Range(0.1, 60)] = 15.0
    max_side: Annotated[int, Range(64, 4096)] = 960
