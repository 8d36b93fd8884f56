"""gRPC on streams of HTTP/2: heads of RPCs, messages with their lengths, deadlines and statuses.

A `Rpc` is one stream. Each message of its client has a `MessageResponder`, which the handlers of HTTP
take for their connection. An RPC of one message is answered once the client has ended its side; in a
bidirectional RPC the responses have the order of the requests.

Source: gRPC over HTTP/2 (github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).
"""

import asyncio
import functools
import logging
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

from edgekit_runtime.errors import DeadlineError, EdgekitError, RequestError
from edgekit_runtime.protocol.rest import encode_error, status_of
from edgekit_runtime.service.grpc.http2 import (
    STREAM_WINDOW_BYTES,
    Buffer,
    Fields,
    Http2,
    Http2Stream,
    MalformedHeadError,
    encode_field,
)
from edgekit_runtime.service.grpc.messages import write_message
from edgekit_runtime.service.http.request_head import is_foreign_host, is_from_page
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.tensors import allocate_aligned

CODINGS: Final = ("gzip", "deflate")
_MAX_AHEAD: Final = 16  # messages of one RPC that are not answered
_PREFIX: Final = struct.Struct(">BI")  # whether the message is compressed, its length
_NANOSECONDS: Final = {b"H": 3600e9, b"M": 60e9, b"S": 1e9, b"m": 1e6, b"u": 1e3, b"n": 1.0}
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_FORBIDDEN: Final = (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
_ONCE: Final = (b":method", b":scheme", b":path", b":authority")
_UNPRINTABLE: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")
# HTTP status -> status of gRPC.
_CODES: Final[Mapping[int, int]] = {
    **dict.fromkeys((405, 415, 501), 12),
    **dict.fromkeys((408, 504), 4),
    **dict.fromkeys((413, 429), 8),
    **dict(zip((400, 401, 403, 404, 500, 503), (3, 16, 7, 5, 13, 14), strict=True)),
}
_CONTENT_TYPE: Final = encode_field(b"content-type", b"application/grpc")
_HEADERS: Final = b"\x88" + _CONTENT_TYPE  # :status 200
_OK: Final = encode_field(b"grpc-status", b"0")
_NOT_GRPC: Final = encode_field(b":status", b"415")

_logger = logging.getLogger(__name__)


class Method:
    """A method of the service.

    Attributes:
        is_stream: whether both sides send any number of messages.
    """

    is_stream = False

    def handle(self, responder: "MessageResponder", message: memoryview) -> None:
        """Answer a message, now or later.

        Raises:
            EdgekitError: the response is this error.
        """
        raise NotImplementedError

    def encode_response(self, head: bytes, *body: Buffer) -> tuple[Buffer, ...]:
        """Return the message that a response over HTTP means, in parts."""
        raise NotImplementedError

    def encode_error(self, _error: EdgekitError) -> bytes | None:
        """Return the response that states an error, or None if the RPC ends with its status."""
        return None


class RpcOwner(Protocol):
    """What an RPC needs of its connection."""

    http2: Http2
    server: HttpServer
    is_local: bool
    is_open: bool
    ahead: "set[Rpc]"

    @property
    def client(self) -> str:
        """Who is at the other end."""

    @property
    def peer_pid(self) -> int:
        """The process at the other end of a Unix socket, or 0."""

    def decompress(
        self,
        act: Callable[["MessageResponder", memoryview], None],
        responder: "MessageResponder",
        body: memoryview,
    ) -> None:
        """Call `act` with what `body` holds, now or later."""

    def rpc_ended(self, rpc: "Rpc") -> None:
        """Forget an RPC that was answered or cancelled."""

    def flush(self) -> None:
        """Send what may be sent."""


class RpcHead:
    """The head of an RPC.

    Attributes:
        path: `/package.Service/Method`.
        content_coding: coding of messages that are compressed.
        timeout_s: how long the client waits, or None.
        is_grpc: whether the content type is that of gRPC.
        authorization, is_from_page, has_foreign_host, method: see `RequestHead`.
        is_cleared: whether the client may use the service.
    """

    __slots__ = (
        *("authorization", "content_coding", "has_foreign_host", "is_cleared", "is_from_page", "is_grpc"),
        *("method", "path", "timeout_s"),
    )

    def __init__(self, fields: Fields) -> None:
        """Read the fields of a request.

        Raises:
            MalformedHeadError: HTTP/2 forbids them (RFC 9113, section 8.2 and 8.3).
        """
        values: dict[bytes, bytes] = {}
        is_regular = False
        for name, value in fields:
            is_pseudo = name.startswith(b":")
            if (is_pseudo and (is_regular or name not in _ONCE or name in values)) or name in _FORBIDDEN:
                raise MalformedHeadError(name)
            if name != name.lower() or (name == b"authorization" and name in values):
                raise MalformedHeadError(name)
            is_regular = not is_pseudo
            values[name] = value
        if b":path" not in values or b":scheme" not in values or b":method" not in values:
            raise MalformedHeadError("a pseudo-header field is missing")
        timeout = _TIMEOUT.fullmatch(values.get(b"grpc-timeout", b""))
        if b"grpc-timeout" in values and timeout is None:
            raise MalformedHeadError("grpc-timeout")
        self.path = values[b":path"].decode("latin-1")
        self.content_coding = values.get(b"grpc-encoding", b"identity").decode("latin-1")
        self.timeout_s = None if timeout is None else int(timeout[1]) * _NANOSECONDS[timeout[2]] * 1e-9
        self.method = values[b":method"].decode("latin-1")
        self.is_grpc = self.method == "POST" and values.get(b"content-type", b"").startswith(
            b"application/grpc"
        )
        self.authorization = values.get(b"authorization")
        self.is_from_page = is_from_page(values)
        self.has_foreign_host = is_foreign_host(values.get(b":authority", values.get(b"host")))
        self.is_cleared = False


class MessageResponder:
    """Takes the response to one message of a client; what handlers of HTTP take for a connection.

    Attributes:
        rpc: the RPC that it is part of.
        response: its message in parts, or None as long as there is none.
    """

    __slots__ = ("response", "rpc")

    descriptors: Final[list[int]] = []  # none can come over gRPC
    on_close = None

    def __init__(self, rpc: "Rpc") -> None:
        self.rpc = rpc
        self.response: Sequence[Buffer] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the client still waits."""
        return self.rpc.is_open

    @property
    def has_left(self) -> bool:
        """Whether the client waits no more."""
        return not self.rpc.is_open

    @property
    def is_local(self) -> bool:
        return self.rpc.owner.is_local

    @property
    def client(self) -> str:
        return self.rpc.owner.client

    @property
    def peer_pid(self) -> int:
        return self.rpc.owner.peer_pid

    @property
    def deadline_s(self) -> float | None:
        return self.rpc.deadline_s

    def respond(self, head: Buffer, *body: Buffer) -> None:
        """Send the message for a response over HTTP, whose parts must not change until they are sent."""
        try:
            parts = self.rpc.method.encode_response(bytes(head), *body)
        except Exception as error:  # else the client would wait for ever
            self.respond_error(error)
        else:
            self.rpc.answer(self, parts)

    def respond_error(self, error: BaseException, _fields: Mapping[str, str] | None = None) -> None:
        """Respond with `error`, which is counted; one that is not ours is logged."""
        rpc = self.rpc
        if not isinstance(error, EdgekitError):
            _logger.error("an RPC of %s failed inside the service", rpc.head.path, exc_info=error)
            error = RequestError(500, "the service failed; its log says why")
        if not rpc.is_open or self.response is not None:
            return
        message = rpc.method.encode_error(error)
        if message is None:
            rpc.fail(error)
        else:
            rpc.owner.server.error_counts[status_of(error)] += 1
            rpc.answer(self, (message,))


class Rpc:
    """One RPC: a stream that carries messages.

    Attributes:
        owner: the connection.
        deadline_s: when the client gives up, on `time.monotonic`, or None.
        is_open: whether it is neither answered nor cancelled.
        is_busy: whether an answer is under way.
        received_bytes: of messages that are not complete, or wait for those before them.
    """

    __slots__ = (
        *("_body", "_responders", "_has_ended", "_has_headers", "_held", "_is_compressed", "_message"),
        *("_prefix", "deadline_s", "head", "is_open", "method", "owner", "received_bytes", "stream"),
        *("_filled", "_is_resuming", "_tasks"),
    )

    def __init__(self, owner: RpcOwner, stream: Http2Stream, head: RpcHead, method: Method) -> None:
        self.owner, self.stream, self.head, self.method = owner, stream, head, method
        self.deadline_s = None if head.timeout_s is None else time.monotonic() + head.timeout_s
        self.is_open = True
        self.received_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefix = b""
        self._is_compressed = False
        self._body: memoryview | None = None  # of the message that is not complete
        self._filled = 0
        self._message: memoryview | None = None  # of an RPC that takes one only, until its stream ends
        self._held: deque[tuple[memoryview, bool]] = deque()  # received beyond `_MAX_AHEAD`
        self._responders: deque[MessageResponder] = deque()  # of a bidirectional RPC, in order
        self._has_headers = self._has_ended = self._is_resuming = False

    @property
    def is_busy(self) -> bool:
        return self._has_ended or len(self._responders) > 0

    @property
    def is_idle_stream(self) -> bool:
        """Whether its client may send messages, and none is under way."""
        return self.method.is_stream and not (self.is_busy or self.is_in_message)

    @property
    def is_in_message(self) -> bool:
        """Whether a part of a message, or all of it but the end of its stream, has arrived."""
        return bool(self._prefix) or self._body is not None or self._message is not None

    @property
    def is_full(self) -> bool:
        """Whether the client is ahead: it must wait for, or read, the responses."""
        return len(self._responders) >= _MAX_AHEAD or self.stream.queued_bytes > STREAM_WINDOW_BYTES

    def receive_data(self, data: memoryview, *, ends_stream: bool) -> None:
        """Take a piece of the client's messages."""
        try:
            if self._held or (self.method.is_stream and self.is_full):
                self._hold(data, ends_stream=ends_stream)
                return
            size, data = len(data), self._read_messages(data)
            self.owner.http2.consume(self.stream, size - len(data))
            if len(data):
                self._hold(data, ends_stream=ends_stream)
                self.resume_later()
            elif ends_stream and self.is_open:
                self._receive_end()
        except EdgekitError as error:
            self.fail(error)
        except MemoryError:
            self.fail(RequestError(503, "not enough memory for the message; try again", retry_after_s=1))

    def resume_later(self) -> None:
        """Go on with what is held back once other connections had their turn, if the client is not ahead."""
        if self._held and not (self._is_resuming or self.is_full):
            self._is_resuming = True
            self.owner.server.loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._is_resuming = False
        if self._held and not self.is_full:
            data, ends_stream = self._held.popleft()
            self._count(-len(data))
            later, self._held = self._held, deque()
            self.receive_data(data, ends_stream=ends_stream)
            if self.is_open:
                self._held += later
                self.resume_later()
                if not self._held:
                    self.owner.ahead.discard(self)
            self.owner.flush()

    def answer(self, responder: MessageResponder, parts: Sequence[Buffer]) -> None:
        """Send the response to a message, once those before it were sent."""
        if not self.is_open or responder.response is not None:
            return
        responder.response = parts
        if not self.method.is_stream:
            size = sum(map(len, parts))
            self._end()
            self.owner.http2.respond(self.stream, _HEADERS, (_PREFIX.pack(0, size), *parts), _OK)
        else:
            self._send_responses()
            self.resume_later()
        self.owner.flush()

    def fail(self, error: EdgekitError) -> None:
        """End the RPC with the status of `error`, which is counted."""
        if self.is_open:
            self.owner.server.error_counts[status_of(error)] += 1
            self._finish(_encode_status(error))

    def start(self, responder: MessageResponder, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, which answers `responder`, until the client gives the RPC up."""
        task = self.owner.server.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._end_work, responder))

    def _end_work(self, responder: MessageResponder, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            responder.respond_error(error)

    def cancel(self) -> None:
        """Forget an RPC that the client gave up."""
        if self.is_open:
            self._end()

    def refuse_content(self) -> None:
        """Answer a request that is not gRPC."""
        self._has_headers = True
        self._finish(_NOT_GRPC)

    def _read_messages(self, data: memoryview) -> memoryview:
        """Handle each message that is complete; return what must wait for another turn.

        Raises:
            EdgekitError: a message is refused.
        """
        taken = 0
        while len(data):
            body = self._body
            if body is None:
                if self._prefix or len(data) < _PREFIX.size:
                    missing = _PREFIX.size - len(self._prefix)
                    self._prefix += data[:missing]
                    data = data[missing:]
                    if len(self._prefix) < _PREFIX.size:
                        break
                    flag, size = _PREFIX.unpack(self._prefix)
                    self._prefix = b""
                else:
                    flag, size = _PREFIX.unpack_from(data)
                    data = data[_PREFIX.size :]
                self._check_prefix(flag, size)
                if size > len(data):
                    self._body, self._filled = allocate_aligned(size, 0), 0
                    continue
                message, data = data[:size], data[size:]
            else:
                size = min(len(body) - self._filled, len(data))
                body[self._filled : self._filled + size] = data[:size]
                self._filled += size
                self._count(size)
                data = data[size:]
                if self._filled < len(body):
                    break
                message, self._body = body, None
                self._count(-len(body))
            if self.method.is_stream:
                self._begin(message, is_compressed=self._is_compressed)
            else:
                self._message = message
                self._count(len(message))
            taken += 1
            if not self.is_open or self.is_full or taken >= _MAX_AHEAD:
                break
        return data if self.is_open else data[:0]

    def _check_prefix(self, flag: int, size: int) -> None:
        max_bytes = self.owner.server.limits.max_body_bytes
        if flag > 1 or (flag and self.head.content_coding == "identity"):
            raise RequestError(400, "the message is compressed, and grpc-encoding does not say how")
        if size > max_bytes:
            raise RequestError(413, f"the message has {size} bytes, the limit here is {max_bytes}")
        if self._message is not None:
            raise RequestError(400, "a second message in an RPC that takes one")
        self._is_compressed = flag == 1

    def _receive_end(self) -> None:
        self._has_ended = True
        if self._prefix or self._body is not None:
            self.fail(RequestError(400, "the stream ended in the middle of a message"))
        elif self.method.is_stream:
            self._send_responses()
        elif self._message is None:
            self.fail(RequestError(400, "the stream ended without a message"))
        else:
            message, self._message = self._message, None
            self._count(-self.received_bytes)
            self._begin(message, is_compressed=self._is_compressed)

    def _begin(self, message: memoryview, *, is_compressed: bool) -> None:
        responder = MessageResponder(self)
        if self.method.is_stream:
            self._responders.append(responder)
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            responder.respond_error(DeadlineError("the deadline of the RPC has passed; give it more time"))
            return
        try:
            if is_compressed:
                self.owner.decompress(self.method.handle, responder, message)
            else:
                self.method.handle(responder, message)
        except Exception as error:
            responder.respond_error(error)

    def _send_responses(self) -> None:
        """Send what is due of a bidirectional RPC."""
        http2, responders = self.owner.http2, self._responders
        while responders and (parts := responders[0].response) is not None:
            responders.popleft()
            if not self._has_headers:
                self._has_headers = True
                http2.send_headers(self.stream, _HEADERS)
            http2.send_data(self.stream, (_PREFIX.pack(0, sum(map(len, parts))), *parts))
        if self._has_ended and not responders:
            self._finish(_OK)

    def _finish(self, status: bytes) -> None:
        self._end()
        block = status if self._has_headers else _HEADERS + status
        self.owner.http2.send_trailers(self.stream, block)
        self.owner.flush()

    def _end(self) -> None:
        self.is_open = False
        self.stream.context = None
        self._count(-self.received_bytes)
        self._held.clear()
        self._body = self._message = None
        for task in self._tasks:
            task.cancel()
        self.owner.rpc_ended(self)

    def _hold(self, data: memoryview, *, ends_stream: bool) -> None:
        self._held.append((data, ends_stream))
        self.owner.ahead.add(self)
        self._count(len(data))

    def _count(self, size_bytes: int) -> None:
        """Count bytes that wait here.

        Raises:
            RequestError: all clients together have sent too much that waits.
        """
        server = self.owner.server
        self.received_bytes += size_bytes
        server.receiving_bytes += size_bytes
        if size_bytes > 0 and server.receiving_bytes > server.limits.max_receiving_bytes:
            raise RequestError(503, "too many large messages at one time; try again", retry_after_s=1)


def encode_stream_error(error: EdgekitError) -> bytes:
    """Return the message of a bidirectional RPC that states an error."""
    return write_message("ModelStreamInferResponse", {"error_message": encode_error(error)["error"]})


def _encode_status(error: EdgekitError) -> bytes:
    """Return the trailers that state `error`."""
    status = status_of(error)
    text = _UNPRINTABLE.sub(lambda match: b"%%%02X" % match[0][0], encode_error(error)["error"].encode())
    block = encode_field(b"grpc-status", b"%d" % _CODES.get(status, 2)) + encode_field(b"grpc-message", text)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        block += encode_field(b"grpc-retry-pushback-ms", b"%d" % max(1, round(retry_after_s * 1e3)))
    if status == 415:
        block += encode_field(b"grpc-accept-encoding", ",".join(("identity", *CODINGS)).encode())
    return block
