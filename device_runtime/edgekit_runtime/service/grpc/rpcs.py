"""gRPC on HTTP/2 streams: RPC heads, length-prefixed messages, deadlines and statuses.

An `Rpc` is one stream. Each message of the client has a `MessageResponder`, which HTTP handlers use in place
of their connection. Responses are sent in the order of the requests. A method that takes a single message
starts when the client has finished sending.

Source: gRPC over HTTP/2 (github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md).
"""

import logging
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from edgekit_runtime.errors import DeadlineError, EdgekitError, RequestError
from edgekit_runtime.protocol.rest import encode_error, status_of
from edgekit_runtime.service.api.compressed_bodies import CompressedBodies
from edgekit_runtime.service.grpc.http2 import (
    STREAM_WINDOW_BYTES,
    Buffer,
    Fields,
    Http2,
    Http2Stream,
    MalformedHeadError,
)
from edgekit_runtime.service.grpc.messages import encode_varint
from edgekit_runtime.service.http.request_head import is_foreign_host, is_from_page
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.tensors import allocate_aligned

CODINGS: Final = ("gzip", "deflate")
_MAX_AHEAD: Final = 16  # messages of one RPC that are not answered
_SMALL_BYTES: Final = 4096  # pieces of a message that are joined while they wait
_PREFIX: Final = struct.Struct(">BI")  # whether the message is compressed, its length
_NANOSECONDS: Final = {b"H": 3600e9, b"M": 60e9, b"S": 1e9, b"m": 1e6, b"u": 1e3, b"n": 1.0}
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_FORBIDDEN: Final = (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
_NEEDED: Final = {b":method", b":scheme", b":path"}
_PSEUDO: Final = {*_NEEDED, b":authority"}
_ONCE: Final = {*_PSEUDO, b"authorization"}
_LINE_ENDS: Final = re.compile(rb"[\0\r\n]")  # in a value they would begin a field of HTTP/1.1
_UNPRINTABLE: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")
# Statuses of gRPC by HTTP status.
_CODES: Final[Mapping[int, int]] = {
    **dict.fromkeys((405, 415, 501), 12),
    **dict.fromkeys((408, 504), 4),
    **dict.fromkeys((413, 429), 8),
    **dict(zip((400, 401, 403, 404, 500, 503), (3, 16, 7, 5, 13, 14), strict=True)),
}

_logger = logging.getLogger(__name__)


def encode_field(name: bytes, value: bytes) -> bytes:
    """Encode a header field in HPACK, without the dynamic table or Huffman coding.

    Source: RFC 7541, section 6.2.2.
    """
    block = b"\x00"
    for text in (name, value):
        size = len(text)
        block += (bytes((size,)) if size < 127 else b"\x7f" + encode_varint(size - 127)) + text
    return block


_HEADERS: Final = b"\x88" + encode_field(b"content-type", b"application/grpc")  # :status 200
_OK: Final = encode_field(b"grpc-status", b"0")
_NOT_GRPC: Final = encode_field(b":status", b"415")


class Method:
    """A method of the service.

    Attributes:
        is_stream: Whether client and server send any number of messages.
    """

    is_stream = False

    def handle(self, responder: "MessageResponder", head: "RpcHead", message: memoryview) -> None:
        """Handle a message. As with HTTP handlers, the response may be sent later.

        Raises:
            EdgekitError: The error to respond with.
        """
        raise NotImplementedError

    def encode_response(self, head: bytes, *body: Buffer) -> Sequence[Buffer]:
        """Convert an HTTP response to the parts of a gRPC message.

        `head` is the HTTP/1.1 head. For inference, it includes the JSON of the response.
        """
        raise NotImplementedError

    def encode_error(self, _error: EdgekitError) -> bytes | None:
        """Return a message that contains the error, or None to end the RPC with the error's status."""
        return None


_UNKNOWN: Final = Method()  # of an RPC whose method is not found yet


class RpcOwner(Protocol):
    """The interface that RPCs need from their connection, see `GrpcConnection`."""

    http2: Http2
    server: HttpServer
    bodies: CompressedBodies
    is_local: bool
    client: str
    peer_pid: int
    rpcs: "set[Rpc]"
    ahead: "set[Rpc]"

    def flush(self) -> None:
        """Send as much as flow control allows."""


class RpcHead:
    """The head of an RPC.

    Attributes:
        path: The path, `/package.Service/Method`.
        content_coding: The name of the compression, such as `gzip`.
        timeout_s: The time that the client waits, in seconds, or None.
        authorization, is_from_page, has_foreign_host, method: As in `RequestHead`.
        is_cleared: Whether the client has passed the access check.
    """

    def __init__(self, fields: Fields) -> None:
        """Read the header fields of a request.

        Raises:
            MalformedHeadError: HTTP/2 forbids these fields (RFC 9113, section 8.2 and 8.3).
        """
        values: dict[bytes, bytes] = {}
        is_regular = False
        for name, value in fields:
            is_pseudo = name.startswith(b":")
            if is_pseudo and (is_regular or name not in _PSEUDO):
                raise MalformedHeadError(name)
            if name in _FORBIDDEN or name != name.lower() or (name in _ONCE and name in values):
                raise MalformedHeadError(name)
            if _LINE_ENDS.search(value):
                raise MalformedHeadError(name)
            is_regular = not is_pseudo
            values[name] = value
        timeout = _TIMEOUT.fullmatch(values.get(b"grpc-timeout", b"0S"))
        if timeout is None or not values.keys() >= _NEEDED:
            raise MalformedHeadError("a pseudo-header field is missing, or the timeout malformed")
        self.path = values[b":path"].decode("latin-1")
        self.content_coding = values.get(b"grpc-encoding", b"identity").decode("latin-1")
        has_timeout = b"grpc-timeout" in values
        self.timeout_s = int(timeout[1]) * _NANOSECONDS[timeout[2]] * 1e-9 if has_timeout else None
        self.method = values[b":method"].decode("latin-1")
        is_grpc_type = values.get(b"content-type", b"").startswith(b"application/grpc")
        self.is_grpc = self.method == "POST" and is_grpc_type
        self.authorization = values.get(b"authorization")
        self.is_from_page = is_from_page(values)
        self.has_foreign_host = is_foreign_host(values.get(b":authority", values.get(b"host")))
        self.is_cleared = False


class MessageResponder:
    """Receives the response to one message. Takes the place of the connection in HTTP handlers.

    Attributes:
        response: The response message in parts, or None before the response.
        on_close: A function that is called once if the client cancels, or None.
        is_local, deadline_s, client, peer_pid: As in `Connection`.
    """

    __slots__ = ("client", "deadline_s", "is_local", "on_close", "peer_pid", "response", "rpc")

    descriptors: Final[list[int]] = []  # none can come over gRPC

    def __init__(self, rpc: "Rpc") -> None:
        self.rpc = rpc
        self.response: Sequence[Buffer] | None = None
        self.on_close: Callable[[], object] | None = None
        self.deadline_s = rpc.deadline_s
        owner = rpc.owner
        self.is_local, self.client, self.peer_pid = owner.is_local, owner.client, owner.peer_pid

    @property
    def is_open(self) -> bool:
        return self.rpc.is_open

    @property
    def has_left(self) -> bool:
        """Whether the client has cancelled the RPC."""
        return not self.rpc.is_open

    def respond(self, head: Buffer, *body: Buffer) -> None:
        """Send an HTTP response as a message. The buffers must not change until they are sent."""
        try:
            parts = self.rpc.method.encode_response(bytes(head), *body)
        except Exception as error:  # else the client would wait for ever
            self.respond_error(error)
        else:
            self.rpc.answer(self, parts)

    def respond_error(self, error: BaseException, _fields: Mapping[str, str] | None = None) -> None:
        """Respond with `error` and count it. Errors other than EdgekitError are logged and become 500."""
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
        deadline_s: The time of `time.monotonic` at which the client stops waiting, or None.
        is_open: Whether the RPC is neither finished nor cancelled.
        received_bytes: The size of the received messages that are not handled yet.
    """

    __slots__ = (
        "_body",
        "_filled",
        "_has_all",
        "_has_ended",
        "_has_headers",
        "_held_bytes",
        "_pieces",
        "_prefix",
        "_responders",
        "_taken_bytes",
        "deadline_s",
        "head",
        "is_held",
        "is_open",
        "method",
        "owner",
        "received_bytes",
        "stream",
    )

    def __init__(self, owner: RpcOwner, stream: Http2Stream, head: RpcHead) -> None:
        self.owner, self.stream, self.head = owner, stream, head
        self.method = _UNKNOWN
        self.deadline_s = None if head.timeout_s is None else time.monotonic() + head.timeout_s
        self.is_open = True
        self.received_bytes = 0
        self._pieces: deque[memoryview] = deque()  # received, in order
        self._held_bytes = self._taken_bytes = 0  # in `_pieces`; taken from there, without credit yet
        self._prefix = b""  # of the next message
        self._body: memoryview | None = None  # of the next message, once the prefix is there
        self._filled = 0
        self._responders: deque[MessageResponder] = deque()  # of messages that have begun, in order
        self._has_headers = False
        self._has_ended = self._has_all = False  # the client has; it has, and all its messages have begun
        self.is_held = False

    @property
    def is_busy(self) -> bool:
        return self._has_all or len(self._responders) > 0

    @property
    def is_idle_stream(self) -> bool:
        """Whether the client may send more messages and none is in progress."""
        return self.method.is_stream and not (self.is_busy or self.is_in_message)

    @property
    def is_in_message(self) -> bool:
        """Whether a message is being received, or is complete but not handled yet."""
        return len(self._prefix) > 0

    @property
    def is_full(self) -> bool:
        """Whether too many responses or bytes are pending, so that no more messages are accepted now."""
        return len(self._responders) >= _MAX_AHEAD or self.stream.queued_bytes > STREAM_WINDOW_BYTES

    def receive_data(self, data: memoryview, *, ends_stream: bool) -> None:
        """Add received data, and handle the messages that are complete."""
        last = self._pieces[-1] if self._pieces else data
        if last is not data and len(last) < _SMALL_BYTES > len(data):  # else many would take much memory
            self._pieces[-1] = memoryview(bytes(last) + data)
        elif len(data):
            self._pieces.append(data)
        self._held_bytes += len(data)
        self._has_ended = ends_stream
        self.resume()

    def resume(self) -> None:
        """Handle received messages up to a limit, unless the RPC is paused."""
        try:
            if self.is_open and not self.is_held:
                self._advance()
            if self.is_open:
                self.owner.http2.consume(self.stream, self._taken_bytes)
                self._taken_bytes = 0
                self._count(self._filled + self._held_bytes)
        except EdgekitError as error:
            self.fail(error)
        except MemoryError:
            self.fail(RequestError(503, "not enough memory for the message; try again", retry_after_s=1))

    def _advance(self) -> None:
        """Begin the messages that are complete, some of them in this turn of the loop.

        Raises:
            EdgekitError: what arrived is refused.
        """
        for _ in range(_MAX_AHEAD):
            if self.is_full or (message := self._collect()) is None:
                break
            if not self.method.is_stream:
                if self._pieces:
                    raise RequestError(400, "a second message in an RPC that takes one")
                if not self._has_ended:
                    return
            self._begin(message)
            if not self.is_open:
                return
        if self.is_full or self._pieces:
            self.is_held = True
            self.owner.ahead.add(self)
        elif self._has_ended:
            self._receive_end()

    def _receive_end(self) -> None:
        if self._prefix:
            raise RequestError(400, "the stream ended in the middle of a message")
        if not (self.method.is_stream or self._responders):
            raise RequestError(400, "the stream ended without a message")
        self._has_all = True
        self._send_responses()

    def _collect(self) -> memoryview | None:
        """Take the received bytes of the next message; return the message once it is complete.

        Raises:
            RequestError: the message is refused.
        """
        body = self._body
        while body is None or self._filled < len(body):
            if not self._pieces:
                return None
            if body is None:
                self._prefix += self._take(_PREFIX.size - len(self._prefix))
                if len(self._prefix) == _PREFIX.size:
                    body = self._body = self._begin_body(*_PREFIX.unpack(self._prefix))
            else:
                piece = self._take(len(body) - self._filled)
                body[self._filled : self._filled + len(piece)] = piece
                self._filled += len(piece)
        return body

    def _take(self, size_bytes: int) -> memoryview:
        """Return the first bytes, up to `size_bytes` of them, of what was received."""
        piece = self._pieces.popleft()
        if len(piece) > size_bytes:
            self._pieces.appendleft(piece[size_bytes:])
            piece = piece[:size_bytes]
        self._held_bytes -= len(piece)
        self._taken_bytes += len(piece)
        return piece

    def _begin_body(self, flag: int, size: int) -> memoryview:
        max_bytes = self.owner.server.limits.max_body_bytes
        if flag > 1 or (flag and self.head.content_coding == "identity"):
            raise RequestError(400, "the message is compressed, and grpc-encoding does not say how")
        if size > max_bytes:
            raise RequestError(413, f"the message has {size} bytes, the limit here is {max_bytes}")
        if self._pieces and size <= len(self._pieces[0]):
            self._filled = size
            return self._take(size)  # uncopied
        return allocate_aligned(size, 0)

    def _begin(self, message: memoryview) -> None:
        is_compressed = self._prefix[0] == 1
        self._body, self._prefix, self._filled = None, b"", 0
        self._has_all = not self.method.is_stream
        responder = MessageResponder(self)
        self._responders.append(responder)
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            responder.respond_error(DeadlineError("the deadline of the RPC has passed; give it more time"))
            return
        try:
            handle: Any = self.method.handle  # what decompresses takes the responder for a connection, too
            if is_compressed:
                handle = self.owner.bodies.decode(handle)
            handle(responder, self.head, message)
        except Exception as error:
            responder.respond_error(error)

    def answer(self, responder: MessageResponder, parts: Sequence[Buffer]) -> None:
        """Send the response to a message after all earlier responses."""
        if self.is_open and responder.response is None:
            responder.response = parts
            self._send_responses()
            self.owner.flush()

    def _send_responses(self) -> None:
        """Send the responses that are due; end the RPC after its last."""
        responders = self._responders
        parts: list[Buffer] = []
        while responders and (response := responders[0].response) is not None:
            responders.popleft()
            parts += (_PREFIX.pack(0, sum(map(len, response))), *response)
        if self._has_all and not responders:
            self._finish(_OK, parts)
        elif parts:
            self._send(parts)

    def fail(self, error: EdgekitError) -> None:
        """End the RPC with the status of `error`, and count the error."""
        if self.is_open:
            self.owner.server.error_counts[status_of(error)] += 1
            self._finish(_encode_status(error))

    def refuse_content(self) -> None:
        """Respond with 415, since the request is not gRPC."""
        self._has_headers = True
        self._finish(_NOT_GRPC)

    def _finish(self, status: bytes, parts: Sequence[Buffer] = ()) -> None:
        self.cancel()
        self._send(parts, status if self._has_headers or parts else _HEADERS + status)
        self.owner.flush()

    def _send(self, parts: Sequence[Buffer], trailers: bytes | None = None) -> None:
        head = _HEADERS if parts and not self._has_headers else b""
        self._has_headers = True
        self.owner.http2.respond(self.stream, head, parts, trailers)

    def cancel(self) -> None:
        """Discard the RPC after the client has cancelled it, or after it has ended."""
        if self.is_open:
            self.is_open = False
            self.stream.context = None
            self._count(0)
            self._pieces.clear()
            self._body = None
            for responder in self._responders:
                if responder.on_close is not None:
                    responder.on_close()
            self.owner.rpcs.discard(self)
            self.owner.ahead.discard(self)

    def _count(self, waiting_bytes: int) -> None:
        """Count bytes that wait here.

        Raises:
            RequestError: all clients together have sent too much that waits.
        """
        server, more = self.owner.server, waiting_bytes - self.received_bytes
        self.received_bytes = waiting_bytes
        server.receiving_bytes += more
        if more > 0 and server.receiving_bytes > server.limits.max_receiving_bytes:
            raise RequestError(503, "too many large messages at one time; try again", retry_after_s=1)


def _encode_status(error: EdgekitError) -> bytes:
    status = status_of(error)
    text = _UNPRINTABLE.sub(lambda match: b"%%%02X" % match[0][0], encode_error(error)["error"].encode())
    block = encode_field(b"grpc-status", b"%d" % _CODES.get(status, 2)) + encode_field(b"grpc-message", text)
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        block += encode_field(b"grpc-retry-pushback-ms", b"%d" % max(1, round(retry_after_s * 1e3)))
    if status == 415:
        block += encode_field(b"grpc-accept-encoding", ",".join(("identity", *CODINGS)).encode())
    return block
