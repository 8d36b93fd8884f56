"""Measures the link to an Open Inference Protocol server: round trip time, and bandwidth in both directions.

It sends only ordinary requests over one connection, so it works with any such server:

- Round trip: the minimum that TCP has measured, which is the time of the network alone. If the system does
  not provide this minimum, the median time of `GET /v2/health/live` is used.
- Upload: inference requests with a large body for a model that no server has. The server must read the body
  before it answers 404. Two body sizes are sent in turn. The bandwidth is the difference of their bytes
  divided by the difference of their times, which cancels the round trip and the work of the server.
- Download: the protocol has no large reply without a model. Therefore several requests for the server's
  longest page are sent at once, and two numbers of requests are compared in the same way. The result includes
  the work of the server, so it is a lower bound.

To estimate the link from the traffic of an application, see `link_estimate`.
"""

import contextlib
import fcntl
import statistics
import struct
import termios
import time
from typing import IO, Annotated, Any, Final

from edgekit_runtime.client.link import Address, open_connection, read_tcp_field
from edgekit_runtime.client.requests import make_request_head, token_line
from edgekit_runtime.client.responses import ResponseHead, parse_head
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import TransportError
from edgekit_runtime.offload.latency_model import LinkState
from edgekit_runtime.offload.offload_server import MIN_RTT_AT, NO_MODEL
from edgekit_runtime.protocol.rest import model_path
from edgekit_runtime.records import dataclass

_BITS: Final = 8
_LIVE: Final = "/v2/health/live"
_PAGES: Final = ("/metrics", "/v2")
_PINGS: Final = 20
_LEAST_BYTES: Final = 4 << 10
_MOST_BYTES: Final = 8 << 20
_MOST_PAGES: Final = 1024
_GROWTH: Final = 4  # factor between two sizes
_ENOUGH_S: Final = 0.25  # a transfer of this length is long against the jitter of a round trip
_ROUNDS: Final = 3
_MAX_REPLY_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 16 << 10
_MAX_LINES: Final = 100
_REFUSED: Final = (401, 403)
_TOO_LARGE: Final = 413

_Rate = Annotated[float, Range(0, 1e12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """Measurements of a link.

    Attributes:
        rtt_s: round trip time of the network.
        rtt_spread: distance between the quartiles of the times of small requests, as a share of the median.
        up_bits_per_s: bandwidth to the server.
        down_bits_per_s: lower bound of the bandwidth from the server, or None if the server does not accept
            several requests at once.
        sent_bytes: size of the larger of the two uploads that were compared.
    """

    server: str
    rtt_s: Annotated[float, Range(0, 3600)]
    rtt_spread: Annotated[float, Range(0, 1e9)]
    up_bits_per_s: _Rate
    down_bits_per_s: _Rate | None
    sent_bytes: int

    @property
    def state(self) -> LinkState:
        """The link for predictions. If the download was not measured, the upload bandwidth is used."""
        down_bits_per_s = self.up_bits_per_s if self.down_bits_per_s is None else self.down_bits_per_s
        return LinkState(self.up_bits_per_s, down_bits_per_s, self.rtt_s)


def probe_link(
    server: str,
    *,
    token: str | None = None,
    ca_file: str | None = None,
    insecure: bool = False,
    seconds: float = 5.0,
) -> LinkProbe:
    """Measure the link to a server.

    The measurement sends at most 100 MB, and far less on slow links.

    Args:
        server: `host:port`, `http://host:port` or `https://host:port`.
        token: token for servers that require one.
        ca_file: PEM file of the authority that signed the server's certificate.
        insecure: whether plain HTTP to another machine is allowed. A token always requires HTTPS.
        seconds: time limit of the measurement and of each reply. The last transfer may exceed it.

    Raises:
        TransportError: the server cannot be reached, does not answer in time, refuses the token, or answers
            before it has read a request.
        DataError: the token contains a character that no header may have.
        ConfigError: `server` is plain HTTP to another machine, which is not allowed.
    """
    address = Address.parse(server, ca_file, has_token=bool(token), insecure=insecure)
    begin_s = time.monotonic()
    try:
        with _Exchange(address, token, seconds) as exchange:
            pings = [exchange.time_pages(_LIVE, 1) for _ in range(_PINGS)]
            lower, ping_s, upper = statistics.quantiles(pings, n=4)
            rtt_s = exchange.read_round_trip() or ping_s
            sent_bytes, up_bits_per_s = _probe_upload(exchange, begin_s + seconds / 2)
            down_bits_per_s = None
            with contextlib.suppress(OSError, ValueError):  # no pipelining, or pages without a length
                down_bits_per_s = _probe_download(exchange, begin_s + seconds)
    except (OSError, ValueError) as cause:
        raise TransportError(f"{address}: {cause}; is this an inference server?") from cause
    return LinkProbe(
        server=str(address),
        rtt_s=rtt_s,
        rtt_spread=(upper - lower) / ping_s,
        up_bits_per_s=up_bits_per_s,
        down_bits_per_s=down_bits_per_s,
        sent_bytes=sent_bytes,
    )


class _Exchange:
    """A connection that times requests from their first byte to the last byte of their replies."""

    def __init__(self, address: Address, token: str | None, timeout_s: float) -> None:
        self._fields = f"Host: {address.authority}\r\n{token_line(token)}"
        self._address = address
        self._socket = open_connection(address, timeout_s)
        self._socket.settimeout(timeout_s)
        self._file: IO[bytes] = self._socket.makefile("rb")

    def __enter__(self) -> "_Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def time_pages(self, path: str, count: int) -> float:
        """Return how long `count` requests for a page, sent at once, take in seconds."""
        request = make_request_head("GET", path, self._fields) * count
        begin = time.perf_counter()
        self._socket.sendall(request)
        for _ in range(count):
            self._read_reply()
        return time.perf_counter() - begin

    def read_round_trip(self) -> float | None:
        """Return the least round trip that TCP saw on this connection; None if the system does not tell."""
        least_us = read_tcp_field(self._socket, MIN_RTT_AT)
        return None if least_us is None else least_us * 1e-6

    def count_page(self, path: str) -> int:
        """Return the size of a page with its head in bytes."""
        self._socket.sendall(make_request_head("GET", path, self._fields))
        head = self._read_reply()
        return len(head.data) + head.body_bytes

    def time_upload(self, size_bytes: int) -> float | None:
        """Return the seconds until a body is answered; None if the server refuses this size.

        Raises:
            TransportError: the server answers before it has read the body.
        """
        path = f"{model_path(NO_MODEL)}/infer"
        fields = f"{self._fields}Content-Type: application/octet-stream\r\n"
        request = make_request_head("POST", path, fields, size_bytes) + bytes(size_bytes)
        begin = time.perf_counter()
        try:
            self._socket.sendall(request)
        except (BrokenPipeError, ConnectionResetError):
            is_cut = True  # the server refused and closed: its reply says why
        else:
            is_cut = False
        head = self._read_reply()
        elapsed_s = time.perf_counter() - begin
        if head.status == _TOO_LARGE:
            return None
        if is_cut or head.closes or _count_unacknowledged(self._socket):
            raise TransportError(
                f"{self._address}: answered {head.status} before it had read the request, so the upload"
                " cannot be measured; state --bandwidth instead"
            )
        return elapsed_s

    def reconnect(self) -> None:
        """Begin again on a new connection, after a reply that ended the old one."""
        timeout_s = self._socket.gettimeout() or 1.0
        self.__exit__()
        self._socket = open_connection(self._address, timeout_s)
        self._socket.settimeout(timeout_s)
        self._file = self._socket.makefile("rb")

    def _read_reply(self) -> ResponseHead:
        """Return the head of the next reply, and drop its body.

        Raises:
            TransportError: the server refuses the token.
            OSError: the connection ended, or nothing came in time.
            ValueError: the reply is no HTTP.
        """
        lines = [self._file.readline(_MAX_LINE_BYTES)]
        while lines[-1] not in (b"\r\n", b"") and len(lines) < _MAX_LINES:
            lines.append(self._file.readline(_MAX_LINE_BYTES))
        if lines[-1] != b"\r\n":
            raise ConnectionResetError("the connection ended before a reply")
        head = parse_head(b"".join(lines), _MAX_REPLY_BYTES)
        if head.status in _REFUSED:
            raise TransportError(f"{self._address}: answered {head.status}; give the server's token")
        if len(self._file.read(head.body_bytes)) < head.body_bytes:
            raise ConnectionResetError("the connection ended within a reply")
        return head


def _probe_upload(exchange: _Exchange, until_s: float) -> tuple[int, float]:
    size_bytes = _LEAST_BYTES
    while size_bytes < _MOST_BYTES and time.monotonic() < until_s:
        # Each one also widens TCP's window, so that only the link limits the last ones.
        elapsed_s = exchange.time_upload(size_bytes * _GROWTH)
        if elapsed_s is None:
            exchange.reconnect()
            break
        size_bytes *= _GROWTH
        if elapsed_s > _ENOUGH_S:
            break
    times: dict[int, list[float]] = {size_bytes // _GROWTH: [], size_bytes: []}
    for number in range(_ROUNDS):
        if number and time.monotonic() > until_s:
            break
        for request_bytes, durations in times.items():
            durations.append(exchange.time_upload(request_bytes) or 0.0)
    small_s, large_s = (statistics.median(durations) for durations in times.values())
    if large_s <= small_s:
        raise TransportError("a larger request took no longer than a small one; state --bandwidth instead")
    return size_bytes, (size_bytes - size_bytes // _GROWTH) * _BITS / (large_s - small_s)


def _probe_download(exchange: _Exchange, until_s: float) -> float | None:
    """Return bits per second, or None if more pages took no longer."""
    sizes = {exchange.count_page(path): path for path in _PAGES}
    page_bytes = max(sizes)
    path, count = sizes[page_bytes], 1
    while count < _MOST_PAGES and time.monotonic() < until_s:
        count *= _GROWTH
        if exchange.time_pages(path, count) > _ENOUGH_S:
            break
    times: dict[int, list[float]] = {max(1, count // _GROWTH): [], count: []}
    for number in range(_ROUNDS):
        if number and time.monotonic() > until_s:
            break
        for pages, durations in times.items():
            durations.append(exchange.time_pages(path, pages))
    small_s, large_s = (statistics.median(durations) for durations in times.values())
    if len(times) < len({1, count}) or large_s <= small_s:
        return None
    return (count - count // _GROWTH) * page_bytes * _BITS / (large_s - small_s)


def _count_unacknowledged(connected: Any) -> int:
    """Return how many sent bytes the other side has not received, 0 if the system does not tell.

    A reply acknowledges all that was received before it.
    """
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        return int(struct.unpack("i", answer)[0])
    return 0
