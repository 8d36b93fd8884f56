"""A server that computes the tail of a plan: warm connections, requests, and checks of the replies.

A reply is used only if its status, names, dtypes, shapes, sizes and values are those of a correct server.
This module neither chooses plans nor runs models.
"""

import contextlib
import itertools
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from edgekit_runtime.client.link import Address, Link
from edgekit_runtime.client.requests import make_request_head, token_line
from edgekit_runtime.client.responses import ResponseHead, make_error, read_response
from edgekit_runtime.codecs.compression import compress
from edgekit_runtime.errors import EdgekitError, RequestError, TransportError
from edgekit_runtime.offload.latency_model import payload_bytes, wire_bytes
from edgekit_runtime.offload.link_estimate import Exchange
from edgekit_runtime.offload.offload_plan import Compression
from edgekit_runtime.protocol.infer_request import InferRequest, InferTensor, encode_request
from edgekit_runtime.protocol.rest import HEADER_LENGTH, model_path
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array, TensorSpec

_MAX_REPLY_BYTES: Final = 256 << 20
NO_MODEL: Final = "edgekit-link-probe"
_LIVE: Final = "/v2/health/live"
_MS: Final = 1e-3
_MOST_STATED_S: Final = 3600.0
# Offsets in struct tcp_info of linux/tcp.h.
_THRESHOLD_AT: Final = 76
_NO_THRESHOLD: Final = 0x7FFFFFFF
_MSS_AT, _RECEIVED_AT, _RTT_AT, _CWND_AT, _ACKED_AT, MIN_RTT_AT, _BUSY_AT = 16, 52, 68, 80, 120, 148, 168
_CLOCK_MS: Final = 4  # largest step of the kernel's clock for these times

# Only sixteen, because our service caches parsed requests by their JSON.
_ids = itertools.cycle(f"{number:x}" for number in range(16))

_logger = logging.getLogger(__name__)


class ReplyError(TransportError):
    """A server sent a reply that a correct server does not send."""


class NonFiniteError(ReplyError):
    """An output contains NaN or infinity. Either the model computes them, or the server is broken."""


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """The times and the load that a server states in a reply.

    Attributes:
        queue_s, compute_s: time in the server's queue and time of the model, or None if not stated.
        load: load of the server as a share of its capacity, or None if not stated.
    """

    queue_s: float | None = None
    compute_s: float | None = None
    load: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TailRequest:
    """A request for a model on the server.

    Attributes:
        parts: head and body, as bytes and arrays.
        id: id that the reply repeats. A reply with another id belongs to another request.
    """

    parts: Sequence[Any]
    size_bytes: int
    expected: tuple[TensorSpec, ...]
    id: str


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The result of a request: outputs or an error.

    Attributes:
        outputs, error: one of them is None.
        exchange: sizes and times. The server's own time is not in `exchange` but in `times`.
        is_cut_off: whether this device aborted the request while its body was being sent.
    """

    outputs: dict[str, Array] | None
    error: EdgekitError | None
    exchange: Exchange
    times: ServerTimes
    is_cut_off: bool = False


def make_tail_request(
    model: str,
    tensors: Mapping[str, Array],
    expected: tuple[TensorSpec, ...],
    compression: Compression,
    fields: str,
    *,
    version: str | None = None,
) -> TailRequest:
    """Return the request that sends tensors to a model, or to one of its versions.

    Args:
        model: name of the model on the server.
        tensors: a dict from input name to array.
        expected: outputs that the reply must have.
        compression: compression of the body. If compression would make the body larger, it is sent
            uncompressed.
        fields: further header lines, each with its line end.
        version: version of the model, or None for the version that the server prefers.

    Raises:
        DataError: the protocol does not support a dtype.
        BackendError: zstd is not installed on this machine.
    """
    entries = tuple(InferTensor(name, array.dtype, array.shape) for name, array in tensors.items())
    request_id = next(_ids)
    text = encode_request(InferRequest(entries, id=request_id))
    arrays = [np.ascontiguousarray(array) for array in tensors.values() if array.size]
    lines = f"{fields}Content-Type: application/octet-stream\r\n{HEADER_LENGTH}: {len(text)}\r\n"
    body: list[Any] = [text, *arrays]
    body_bytes = len(text) + sum(array.nbytes for array in arrays)
    if compression == "zstd":
        packed = compress(b"".join([text, *(array.tobytes() for array in arrays)]))
        if len(packed) < body_bytes:
            body, body_bytes = [packed], len(packed)
            lines += "Content-Encoding: zstd\r\n"
    head = make_request_head("POST", f"{model_path(model, version)}/infer", lines, body_bytes)
    return TailRequest([head, *body], len(head) + body_bytes, expected, request_id)


def make_upload_probe(size_bytes: int, fields: str, tail: str | None) -> TailRequest:
    """Return a request with random bytes for a model that no server has. The answer is 404.

    The request names `tail` as its version, so that an edgekit server states the load of `tail`.

    `size_bytes` is the size of the body. `fields` contains further header lines, each with its line end.
    """
    body = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
    return make_tail_request(NO_MODEL, {"x": body}, (), "identity", fields, version=tail)


class WarmConnection:
    """A connection that stays open. Its own thread does the work, so the caller can stop waiting at any time.

    Attributes:
        connect_s: time to open the connection, including TLS, in seconds, or 0 before that.
    """

    def __init__(self, address: Address) -> None:
        self.link, self.connect_s = Link(address, _MAX_REPLY_BYTES), 0.0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="edgekit-offload", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None] | None) -> None:
        """Queue `work` for the thread. `work` must not raise an error. None ends the thread."""
        self._work.put(work)

    def connect(self, timeout_s: float) -> None:
        """Connect if there is no open connection.

        Raises:
            TransportError: the server cannot be reached.
        """
        if not self.check_open():
            began_s = time.monotonic()
            self.link.connect(timeout_s)
            self.connect_s = time.monotonic() - began_s

    def check_open(self) -> bool:
        """Return whether the connection is usable.

        If the server has closed it or sent unrequested data, close the connection.
        """
        self.link.drop_leftovers()
        return self.link.connection > 0

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # holds the tensors of the request
        self.link.close()


class Pending:
    """A request that is in progress.

    Attributes:
        done: event that is set once there is a `reply`, which is None until then.
        is_connected: whether the request has a connection on which it can be sent.
    """

    __slots__ = (
        "_base",
        "_connection",
        "_is_over",
        "_lock",
        "_request",
        "_sent_bytes",
        "done",
        "is_aborted",
        "is_connected",
        "reply",
    )

    def __init__(self, connection: WarmConnection, request: TailRequest) -> None:
        self._connection, self._request = connection, request
        self.done = threading.Event()
        self.reply: Reply | None = None
        self.is_aborted = self.is_connected = self._is_over = False
        self._lock = threading.Lock()
        self._base: tuple[int, int] | None = None  # the connection's bytes and microseconds before it
        self._sent_bytes: int | None = None  # at the time of the abort

    @property
    def sent_bytes(self) -> int | None:
        """Number of bytes of the request that the server's machine has acknowledged, or None if unknown."""
        if self._sent_bytes is not None:
            return self._sent_bytes
        base, link = self._base, self._connection.link
        acked = None if base is None else link.read_tcp_field(_ACKED_AT, 8)
        if base is None or acked is None:
            return None
        size_bytes = max(0, acked - base[0])
        return payload_bytes(size_bytes) if link.address.is_tls else size_bytes

    @property
    def is_sent(self) -> bool:
        sent = self.sent_bytes
        return self.is_connected and (sent is None or sent >= self._request.size_bytes)

    @property
    def acked_s(self) -> float | None:
        """Time until all sent bytes of the request were acknowledged, in seconds, or None if unknown."""
        busy_us = self._connection.link.read_tcp_field(_BUSY_AT, 8)
        if self._base is None or busy_us is None or busy_us <= self._base[1]:
            return None
        return (busy_us - self._base[1]) * 1e-6

    def abort(self) -> None:
        """Abort the request, so that its reply is an error. This has no effect after a reply."""
        with self._lock:
            if not self._is_over:
                self.is_aborted, self._sent_bytes = True, self.sent_bytes
                self._connection.link.abort()

    def publish(self, reply: Reply) -> None:
        if not self.done.is_set():
            self.reply = reply
            self.done.set()

    def run(self, timeout_s: float) -> Reply:
        """Send the request and return its reply. Call this once, on the thread of the connection."""
        reply = _exchange(self._connection.link, self._request, timeout_s, self)
        with self._lock:
            self._is_over = True
        return reply

    def connect(self, timeout_s: float) -> None:
        """Connect if necessary, so that later times do not include the connection.

        Raises:
            TransportError: the server cannot be reached, or the request was aborted meanwhile.
        """
        link = self._connection.link
        self.is_connected, self._base = False, None
        self._connection.connect(timeout_s)
        acked, busy_us = link.read_tcp_field(_ACKED_AT, 8), link.read_tcp_field(_BUSY_AT, 8)
        with self._lock:
            if self.is_aborted:
                raise TransportError(f"{link.address}: the request was ended before it was sent")
            self._base = None if acked is None or busy_us is None else (acked, busy_us)
            self.is_connected = True


class OffloadServer:
    """A server, and the warm connections to it. It is thread-safe."""

    def __init__(self, address: Address, token: str | None = None) -> None:
        self._address = address
        self.fields = f"Host: {address.authority}\r\n{token_line(token)}"
        self._idle: list[WarmConnection] = []
        self._pending: set[Pending] = set()
        self._lent: set[WarmConnection] = set()
        self._lock = threading.Lock()
        self._is_open = True
        self._connect_s = 0.0

    def __str__(self) -> str:
        return str(self._address)

    def send(
        self, request: TailRequest, timeout_s: float, finish: Callable[[Pending, Reply], None]
    ) -> Pending:
        """Begin a request. Another thread calls `finish` with the reply, and then sets `Pending.done`.

        `finish` may call `Pending.publish` to set `done` earlier.
        """
        connection = self._take()
        pending = Pending(connection, request)
        with self._lock:
            self._pending.add(pending)

        def work() -> None:
            reply = pending.run(timeout_s)
            try:
                finish(pending, reply)
            except Exception:  # without its thread the next request would wait for ever
                _logger.exception("offload: a reply of %s could not be noted", self._address)
            with self._lock:
                self._pending.discard(pending)
            pending.publish(reply)
            self._put(connection)

        connection.do(work)
        return pending

    def find_connect_s(self) -> float:
        """Return the seconds that the last connection took to open, or 0 if an open connection is idle."""
        with self._lock:
            return 0.0 if self._idle and self._idle[-1].check_open() else self._connect_s

    def forget_slow_link(self) -> bool:
        """Close idle connections whose TCP window a slow link has reduced, and return whether there were any.

        When the link is fast again, a new connection is faster than such a connection.
        """
        with self._lock:
            slow = [connection for connection in self._idle if _has_left_slow_start(connection.link)]
            self._idle = [connection for connection in self._idle if connection not in slow]
        for connection in slow:
            connection.do(None)
        return bool(slow)

    def measure_round_trip(self, timeout_s: float) -> tuple[float, float]:
        """Return the round trip time of the network, and the time of a small request, in seconds.

        Three requests are sent over an open connection. `timeout_s` limits the wait for each reply.

        Raises:
            TransportError: the server cannot be reached, or does not speak the protocol.
            RequestError: the server refused.
        """
        connection = self._take()
        try:
            head = make_request_head("GET", _LIVE, self.fields)
            link, seconds = connection.link, []
            for _ in range(3):
                connection.connect(timeout_s)
                began_s = time.monotonic()
                reply = link.ask((head,), len(head), timeout_s)
                seconds.append(time.monotonic() - began_s - _read_delay(link))
                if reply is not None and reply[0].status >= 300:
                    raise make_error(*reply)
            return _read_round_trip(link, min(seconds)), min(seconds)
        finally:
            self._put(connection)

    def interrupt(self) -> None:
        with self._lock:
            pending = list(self._pending)
        for connection in pending:
            connection.abort()

    def close(self) -> None:
        self._is_open = False
        self.interrupt()
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._lent:
                connection.link.abort()
        for connection in idle:
            connection.do(None)

    def _take(self) -> WarmConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else WarmConnection(self._address)
            self._lent.add(connection)
            return connection

    def _put(self, connection: WarmConnection) -> None:
        with self._lock:
            self._lent.discard(connection)
            self._connect_s = connection.connect_s or self._connect_s
            if self._is_open:
                self._idle.append(connection)
                return
        connection.do(None)


def _exchange(link: Link, request: TailRequest, timeout_s: float, pending: Pending) -> Reply:
    began_s, elapsed_s, download_bytes, times = time.monotonic(), 0.0, 0.0, ServerTimes()
    outputs: dict[str, Array] | None = None
    error: EdgekitError | None = None
    window: float | None = None
    rest_bytes, rest_s = 0, 0.0
    is_tls = link.address.is_tls
    sent: float | None = wire_bytes(request.size_bytes, is_tls=is_tls)
    try:
        reply, until_s = None, began_s + timeout_s
        for _ in range(2):  # the server may have closed an idle connection
            pending.connect(max(until_s - time.monotonic(), _MS))
            began_s = time.monotonic()
            reply = link.ask(request.parts, request.size_bytes, max(until_s - began_s, _MS))
            if reply is not None or pending.is_aborted:
                break
        elapsed_s = time.monotonic() - began_s - _read_delay(link)
        if reply is None:
            error = TransportError(f"{link.address}: closes every connection before it answers")
            sent = pending.sent_bytes
        else:
            reply_bytes, times = len(reply[0].data) + len(reply[1]), read_times(reply[0])
            download_bytes = wire_bytes(reply_bytes, is_tls=is_tls)
            first_s, first_bytes = link.first_read
            rest_bytes = max(0, reply_bytes - first_bytes)
            rest_s = began_s + elapsed_s - first_s if rest_bytes else 0.0
            window = _read_window(link)
            outputs = check_reply(reply[0], reply[1], request)
    except EdgekitError as cause:
        elapsed_s, error = elapsed_s or (time.monotonic() - began_s) * pending.is_connected, cause
        sent = pending.sent_bytes
    except Exception as cause:  # a hostile server may cause any error of a parser
        elapsed_s = elapsed_s or time.monotonic() - began_s
        error = ReplyError(f"{link.address}: the answer cannot be read: {cause!r}")
    acked_s = pending.acked_s if error is None or download_bytes else None
    exchange = Exchange(
        upload_bytes=sent or 0,
        download_bytes=download_bytes,
        elapsed_s=elapsed_s,
        server_s=0.0,
        window_bytes=window,
        rest_bytes=rest_bytes,
        rest_s=rest_s,
        acked_s=acked_s,
    )
    return Reply(outputs, error, exchange, times, pending.is_aborted)


def check_reply(head: ResponseHead, body: memoryview, request: TailRequest) -> dict[str, Array]:
    """Return a dict from output name to array, after checking that the reply is as `request` expects.

    Raises:
        RequestError: the server refuses.
        ReplyError: names, dtypes, shapes or sizes are not those of a correct server.
        NonFiniteError: an output contains NaN or infinity.
        TransportError: the reply does not follow the protocol.
    """
    if head.status != 200:
        raise make_error(head, body)
    outputs, _ = read_response(head, body, None, bytearray())
    stated_id = json.loads(bytes(body[: head.json_bytes])).get("id", request.id)  # some servers repeat no id
    if stated_id != request.id:
        raise ReplyError("the server answered another request; its reply is not used")
    expected = request.expected
    if outputs.keys() != {spec.name for spec in expected}:
        names = [spec.name for spec in expected]
        raise ReplyError(f"the server answered with outputs {sorted(outputs)}, expected {sorted(names)}")
    if head.json_bytes is not None:
        stated = head.json_bytes + sum(array.nbytes for array in outputs.values())
        if stated != len(body):
            raise ReplyError(f"the server answered with {len(body)} bytes, its tensors have {stated}")
    for spec in expected:
        array = outputs[spec.name]
        try:
            spec.check(array)
        except EdgekitError as cause:
            raise ReplyError(f"the server answered wrongly: {cause}") from cause
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NonFiniteError(
                f"the server's reply holds NaN or infinity in '{spec.name}', so it is not used"
            )
    return outputs


def read_times(head: ResponseHead) -> ServerTimes:
    """Return the times in the headers of a reply. Unreadable values count as missing.

    Source: W3C Server Timing; ORCA, the `TEXT` form of `endpoint-load-metrics`.
    """
    queue_s = compute_s = load = None
    for line in head.data.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        match name.strip().lower():
            case "server-timing":
                for metric in value.split(",")[:16]:
                    metric_name, seconds = _read_metric(metric)
                    if metric_name == "queue":
                        queue_s = seconds
                    elif metric_name == "compute":
                        compute_s = seconds
            case "endpoint-load-metrics":
                load = _read_load(value.strip())
    return ServerTimes(queue_s, compute_s, load)


def _read_metric(metric: str) -> tuple[str, float | None]:
    name, *parameters = (part.strip() for part in metric.split(";"))
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "dur":
            number = _read_number(value)
            return name, None if number is None else min(number * _MS, _MOST_STATED_S)
    return name, None


def _read_load(value: str) -> float | None:
    form, _, metrics = value.partition(" ")
    if form.upper() != "TEXT":
        return None
    for pair in metrics.split(",")[:16]:
        key, _, number = pair.partition("=")
        if key.strip() == "application_utilization":
            return _read_number(number)
    return None


def _read_number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        number = float(text.strip().strip('"'))
        if math.isfinite(number) and number >= 0:
            return number
    return None


def _read_delay(link: Link) -> float:
    """Return how long ago the last bytes came: a busy device notices late, which is not the link's delay."""
    received_ms = link.read_tcp_field(_RECEIVED_AT) or 0
    return max(0, received_ms - _CLOCK_MS) * _MS


def _read_round_trip(link: Link, small_s: float) -> float:
    """Return TCP's round trip, without the work of both machines; `small_s` if the system does not tell.

    Large bodies delay themselves, which raises TCP's average; its minimum may be minutes old.
    """
    average_us, least_us = link.read_tcp_field(_RTT_AT), link.read_tcp_field(MIN_RTT_AT)
    if average_us is None or least_us is None:
        return small_s
    return min(max(least_us * 1e-6, min(average_us * 1e-6, small_s), 1e-6), small_s)


def _has_left_slow_start(link: Link) -> bool:
    threshold = link.read_tcp_field(_THRESHOLD_AT)
    return threshold is not None and threshold < _NO_THRESHOLD


def _read_window(link: Link) -> float | None:
    mss, cwnd = link.read_tcp_field(_MSS_AT), link.read_tcp_field(_CWND_AT)
    return None if mss is None or cwnd is None else float(mss * cwnd)


def is_overload(error: EdgekitError) -> bool:
    """Return whether a server refused for lack of capacity, which is not a failure of the server."""
    return isinstance(error, RequestError) and error.status in (429, 503, 504)
