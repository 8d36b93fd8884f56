"""The server side of one HTTP/2 connection. Like h11, it does no I/O, and converts bytes to events and back.

    http2.receive_data(received)
    while (event := http2.next_event()) is not None:
        ...  # a handler may answer: http2.respond(event.stream, ...)
    parts = http2.data_to_send(64 << 10)

`Http2.KINDS` defines the rules for each frame type. Only the heads of requests are buffered. Parts of a DATA
frame are returned as they arrive. Data to send waits for the client's flow control windows. Streams take
turns, with one frame each.

Source: RFC 9113 (HTTP/2), from which the names of frames, flags and errors are taken, and RFC 7541 (HPACK),
implemented by `hpack`.
"""

import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES: Final = 1 << 20  # of received frames. Long ones cost less, and nothing waits for their end
STREAM_WINDOW_BYTES: Final = 1 << 20
CONNECTION_WINDOW_BYTES: Final = 16 << 20

_DEFAULT_WINDOW_BYTES: Final = 65_535
_DEFAULT_FRAME_BYTES: Final = 16_384
_MAX_WINDOW_BYTES: Final = (1 << 31) - 1
_MAX_FRAGMENTS: Final = 17  # of a field block
_MAX_HEADS: Final = 64  # kept with their parsed form
# The number of frames without a request that a client may send at once, and per second.
_IDLE_BURST: Final = 1000.0
_IDLE_PER_S: Final = 250.0
_RESET_COST: Final = 5.0  # a request that is cancelled at once costs more than a PING

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS = 0x0, 0x1, 0x2, 0x3, 0x4
_PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0x5, 0x6, 0x7, 0x8, 0x9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST_SIZE = 0x3, 0x4, 0x5, 0x6
# Where a frame may come: on the connection, on streams that were opened, on those that were not.
_CONNECTION, _OPENED, _IDLE = 1, 2, 4

_SETTING: Final = struct.Struct(">HI")
_WORD: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">IBI")  # length and type, flags, stream

Buffer: TypeAlias = "bytes | memoryview"
Fields: TypeAlias = "list[tuple[bytes, bytes]]"


class ErrorCode(IntEnum):
    """The reason why a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Http2Error(Exception):
    """A connection error. `Http2.close` reports it to the client with GOAWAY."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class MalformedHeadError(Exception):
    """A request has header fields that HTTP/2 forbids. Its stream is reset."""


class Http2Stream:
    """One request and its response. Stream 0 holds the flow control windows of the whole connection.

    Attributes:
        context: An object of the caller. If it is None, no events of this stream are returned.
        send_window, receive_window: The number of bytes that may still be sent and received.
        consumed_bytes: The number of consumed bytes for which no WINDOW_UPDATE was sent yet.
        is_remote_open: Whether the client may still send.
        queue: The DATA to send, in order.
        trailers: The field block to send after `queue`, or None if it is not known yet.
    """

    __slots__ = (
        "consumed_bytes",
        "context",
        "is_remote_open",
        "queue",
        "queued_bytes",
        "receive_window",
        "send_window",
        "stream_id",
        "trailers",
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int) -> None:
        self.stream_id = stream_id
        self.context: Any = None
        self.send_window, self.receive_window = send_window, receive_window
        self.consumed_bytes = self.queued_bytes = 0
        self.is_remote_open = True
        self.queue: deque[memoryview] = deque()
        self.trailers: bytes | None = None


class HeadersReceived(NamedTuple):
    """A request has started with `head`. A body follows if `stream.is_remote_open` is True."""

    stream: Http2Stream
    head: Any


class DataReceived(NamedTuple):
    """A part of a request's body. It is the last part if `ends_stream` is True.

    The receiver must call `Http2.consume` after it has used the data.
    """

    stream: Http2Stream
    data: memoryview
    ends_stream: bool


class StreamReset(NamedTuple):
    """The client has cancelled the request."""

    stream: Http2Stream


Event: TypeAlias = HeadersReceived | DataReceived | StreamReset


class _Kind(NamedTuple):
    """What all frames of a type have in common.

    Attributes:
        handle: takes flags, stream and payload.
        states: where one may come.
        cost: what one takes of the budget for frames that ask for nothing.
        size_bytes: length of the payload, or None for any.
    """

    handle: "Callable[[Http2, int, int, memoryview], Event | None]"
    states: int
    cost: float = 0.0
    size_bytes: int | None = None


class _HeadDecoder:
    """Decodes field blocks, and keeps what the last few of a client mean.

    A block of indexed fields alone (each a byte with the highest bit set) leaves the dynamic table as it is,
    and means the same until another block may have changed the table.
    """

    def __init__(self, max_bytes: int, read_head: Callable[[Fields], Any]) -> None:
        import hpack  # an extra: a device without it has this module, too

        self._hpack = hpack
        self._decoder = hpack.Decoder(max_header_list_size=max_bytes)
        self._heads: dict[bytes, Any] = {}
        self._read_head = read_head

    def decode(self, block: bytes) -> Any:
        head = self._heads.get(block)
        if head is not None:
            return head
        is_indexed = len(block) > 0 and min(block) >= 0x80
        if not is_indexed or len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        try:
            fields = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except self._hpack.OversizedHeaderListError as cause:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"the header list is too large: {cause}") from cause
        except (self._hpack.HPACKError, IndexError, ValueError) as cause:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"the field block is malformed: {cause}") from cause
        head = self._read_head(fields)
        if is_indexed:
            self._heads[block] = head
        return head


class Http2:
    """The state of one connection.

    Attributes:
        streams: A dict from stream numbers to open streams.
        queued_bytes: The number of DATA bytes of all streams that wait to be sent.
        received_bytes, sent_bytes: The number of DATA bytes so far.
        frames: The number of complete frames that were received.
        is_closing: Whether GOAWAY was sent, after which no stream is opened.
    """

    def __init__(
        self,
        read_head: Callable[[Fields], Any],
        *,
        max_streams: int,
        max_header_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a connection, which first sends SETTINGS.

        Args:
            read_head: A function that converts the header fields of a request to the `head` of
                `HeadersReceived`. It may raise MalformedHeadError.
            max_streams: The maximum number of open streams. Further streams are refused.
            max_header_bytes: The size limit of a request's header fields, both compressed and decompressed.
            clock: A function that returns the time in seconds.
        """
        self._decoder = _HeadDecoder(max_header_bytes, read_head)
        self._max_streams, self._max_header_bytes, self._clock = max_streams, max_header_bytes, clock
        self._max_collected_bytes = max(max_header_bytes, _DEFAULT_FRAME_BYTES)
        self.streams: dict[int, Http2Stream] = {}
        self.queued_bytes = self.received_bytes = self.sent_bytes = self.frames = 0
        self.is_closing = False
        self._unread = b""
        self._at = 0  # in `_unread`
        self._has_preface = self._has_settings = False
        self._unread_data: tuple[int, int, int] | None = None  # flags, stream and length of the rest of DATA
        self._block_id: int | None = None  # stream of a field block whose end is missing
        self._block, self._fragments, self._ends_stream = bytearray(), 0, False
        self._last_stream_id = 0
        self._whole = Http2Stream(0, _DEFAULT_WINDOW_BYTES, CONNECTION_WINDOW_BYTES)
        self._first_window = _DEFAULT_WINDOW_BYTES  # of each stream
        self._max_frame_bytes = _DEFAULT_FRAME_BYTES
        self._budget, self._budget_s = _IDLE_BURST, clock()
        self._ready: dict[int, Http2Stream] = {}  # with something to send, the next one first
        settings = ((_MAX_CONCURRENT_STREAMS, max_streams), (_INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES))
        sizes = ((_MAX_FRAME_SIZE, MAX_FRAME_BYTES), (_MAX_HEADER_LIST_SIZE, max_header_bytes))
        payload = b"".join(_SETTING.pack(*setting) for setting in (*settings, *sizes))
        credit = _WORD.pack(CONNECTION_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)
        self._control: list[Buffer] = [_frame(_SETTINGS, 0, 0, payload), _frame(_WINDOW_UPDATE, 0, 0, credit)]

    # Receiving

    @property
    def is_in_frame(self) -> bool:
        """Whether a frame or the connection preface is incomplete."""
        is_partial = len(self._unread) > self._at or self._unread_data is not None
        return is_partial or self._block_id is not None or not self._has_settings

    def receive_data(self, data: bytes) -> None:
        self._unread = self._unread[self._at :] + data if len(self._unread) > self._at else data
        self._at = 0

    def next_event(self) -> Event | None:
        """Return the next event, or None if more bytes are needed.

        Raises:
            Http2Error: The connection must be closed.
        """
        if not self._has_preface and not self._read_preface():
            return None
        while True:
            data, start = self._unread, self._at
            if self._unread_data is not None:
                kind, rules, (flags, stream_id, length) = _DATA, self.KINDS[_DATA], self._unread_data
            elif len(data) - start >= _HEAD.size:
                length_and_kind, flags, stream_id = _HEAD.unpack_from(data, start)
                length, kind, stream_id = length_and_kind >> 8, length_and_kind & 0xFF, stream_id & 0x7FFFFFFF
                rules = self._check_head(kind, flags, stream_id, length)
                start += _HEAD.size
            else:
                return None
            size = min(length, len(data) - start)
            if size == length:
                self._unread_data = None
                self.frames += 1
            elif size and kind == _DATA and not flags & _PADDED:
                self._unread_data = flags, stream_id, length - size
                flags &= ~_END_STREAM
            else:
                return None
            self._at = start + size
            if rules.cost:
                self._spend(rules.cost)
            event = rules.handle(self, flags, stream_id, memoryview(data)[start : self._at])
            if event is not None:
                return event

    def consume(self, stream: Http2Stream, size_bytes: int) -> None:
        """Allow the client to send `size_bytes` more on a stream."""
        stream.consumed_bytes += size_bytes
        if stream.is_remote_open and stream.consumed_bytes > STREAM_WINDOW_BYTES // 2:
            credit = _WORD.pack(stream.consumed_bytes)
            self._control.append(_frame(_WINDOW_UPDATE, 0, stream.stream_id, credit))
            stream.receive_window += stream.consumed_bytes
            stream.consumed_bytes = 0

    def _read_preface(self) -> bool:
        begun = self._unread[: len(PREFACE)]
        if not PREFACE.startswith(begun):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "not HTTP/2: the preface is missing")
        if len(begun) < len(PREFACE):
            return False
        self._at = len(PREFACE)
        self._has_preface = True
        return True

    def _check_head(self, kind: int, flags: int, stream_id: int, length: int) -> _Kind:
        """Refuse a frame before its payload is collected; return the rules of its type."""
        rules = self.KINDS.get(kind, _EXTENSION)
        if length > MAX_FRAME_BYTES or rules.size_bytes not in (None, length):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes")
        if not self._has_settings and (kind != _SETTINGS or flags & _ACK):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._block_id != (stream_id if kind == _CONTINUATION else None):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a field block in pieces, and other frames between")
        state = _CONNECTION if not stream_id else _OPENED if stream_id <= self._last_stream_id else _IDLE
        if not rules.states & state:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream_id}")
        is_collected = kind != _DATA or flags & _PADDED
        if length > self._max_collected_bytes and is_collected:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a frame of type {kind} has {length} bytes")
        return rules

    def _receive_data(self, flags: int, stream_id: int, payload: memoryview) -> Event | None:
        stream, size, data = self.streams.get(stream_id), len(payload), _strip_padding(flags, payload)
        self.received_bytes += len(data)
        if not (len(data) or flags & _END_STREAM):
            self._spend()
        self._narrow(self._whole, size)
        self.consume(self._whole, size)
        if stream is None:
            return None
        self._narrow(stream, size)
        if size > len(data):
            self.consume(stream, size - len(data))
        return self._pass_data(stream, data, ends_stream=bool(flags & _END_STREAM))

    def _narrow(self, stream: Http2Stream, size_bytes: int) -> None:
        stream.receive_window -= size_bytes
        if stream.receive_window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the window")

    def _pass_data(self, stream: Http2Stream, data: memoryview, *, ends_stream: bool) -> Event | None:
        if not stream.is_remote_open:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"stream {stream.stream_id} goes on after its end")
        stream.is_remote_open = not ends_stream
        return DataReceived(stream, data, ends_stream) if stream.context is not None else None

    def _receive_headers(self, flags: int, stream_id: int, payload: memoryview) -> Event | None:
        payload = _strip_padding(flags, payload)
        if flags & _PRIORITY_FLAG:
            payload = payload[5:]
        self._ends_stream = bool(flags & _END_STREAM)
        if flags & _END_HEADERS:
            return self._receive_block(stream_id, bytes(payload))
        self._block_id, self._block, self._fragments = stream_id, bytearray(payload), 1
        return None

    def _receive_fragment(self, flags: int, stream_id: int, payload: memoryview) -> Event | None:
        self._block += payload
        self._fragments += 1
        if len(self._block) > self._max_header_bytes or self._fragments > _MAX_FRAGMENTS:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "the field block is too long, or does not end")
        if not flags & _END_HEADERS:
            return None
        self._block_id = None
        return self._receive_block(stream_id, bytes(self._block))

    def _receive_block(self, stream_id: int, block: bytes) -> Event | None:
        if not stream_id % 2:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        try:
            head = self._decoder.decode(block)
        except MalformedHeadError:
            head = None
        stream = self.streams.get(stream_id)
        if stream is not None:
            if not self._ends_stream:
                raise Http2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id} in its middle")
            return self._pass_data(stream, memoryview(b""), ends_stream=True)
        if stream_id <= self._last_stream_id:
            self._spend()  # trailers of a stream that ended here meanwhile
            return None
        self._last_stream_id = stream_id
        if head is None or self.is_closing or len(self.streams) >= self._max_streams:
            code = ErrorCode.PROTOCOL_ERROR if head is None else ErrorCode.REFUSED_STREAM
            self._spend(_RESET_COST)
            self._control.append(_frame(_RST_STREAM, 0, stream_id, _WORD.pack(code)))
            return None
        stream = self.streams[stream_id] = Http2Stream(stream_id, self._first_window, STREAM_WINDOW_BYTES)
        stream.is_remote_open = not self._ends_stream
        return HeadersReceived(stream, head)

    def _receive_reset(self, _flags: int, stream_id: int, _payload: memoryview) -> Event | None:
        stream = self.streams.get(stream_id)
        if stream is None:
            return None
        self._end_stream(stream)
        return StreamReset(stream) if stream.context is not None else None

    def _receive_settings(self, flags: int, _stream_id: int, payload: memoryview) -> None:
        if len(payload) % _SETTING.size or (flags & _ACK and payload):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        if flags & _ACK:
            return
        self._has_settings = True
        for name, setting in _SETTING.iter_unpack(payload):
            self._spend()
            if name == _INITIAL_WINDOW_SIZE:
                if setting > _MAX_WINDOW_BYTES:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {setting} bytes")
                difference, self._first_window = setting - self._first_window, setting
                for stream in self.streams.values():
                    self._widen(stream, difference)
            elif name == _MAX_FRAME_SIZE:
                if not _DEFAULT_FRAME_BYTES <= setting < 1 << 24:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {setting}")
                self._max_frame_bytes = setting
        self._control.append(_frame(_SETTINGS, _ACK, 0))

    def _receive_ping(self, flags: int, _stream_id: int, payload: memoryview) -> None:
        if not flags & _ACK:
            self._control.append(_frame(_PING, _ACK, 0, bytes(payload)))

    def _receive_credit(self, _flags: int, stream_id: int, payload: memoryview) -> None:
        increment = _WORD.unpack(payload)[0] & _MAX_WINDOW_BYTES
        if not increment:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        stream = self.streams.get(stream_id) if stream_id else self._whole
        if stream is not None:
            self._widen(stream, increment)

    def _widen(self, stream: Http2Stream, difference: int) -> None:
        stream.send_window += difference
        if stream.send_window > _MAX_WINDOW_BYTES:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
        if stream.queued_bytes and stream.send_window > 0:
            self._ready[stream.stream_id] = stream

    def _ignore(self, _flags: int, _stream_id: int, _payload: memoryview) -> None:
        pass

    def _spend(self, cost: float = 1.0) -> None:
        """Count a frame that asks for nothing.

        Raises:
            Http2Error: there were too many of them lately.
        """
        now_s = self._clock()
        self._budget = min(_IDLE_BURST, self._budget + (now_s - self._budget_s) * _IDLE_PER_S) - cost
        self._budget_s = now_s
        if self._budget < 0:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many resets, settings, pings or empty frames")

    KINDS: ClassVar[Mapping[int, _Kind]] = {
        _DATA: _Kind(_receive_data, _OPENED),
        _HEADERS: _Kind(_receive_headers, _OPENED | _IDLE),
        _PRIORITY: _Kind(_ignore, _OPENED | _IDLE, cost=1.0, size_bytes=5),
        _RST_STREAM: _Kind(_receive_reset, _OPENED, cost=_RESET_COST, size_bytes=4),
        _SETTINGS: _Kind(_receive_settings, _CONNECTION, cost=1.0),
        _PUSH_PROMISE: _Kind(_ignore, 0),  # no client may send one
        _PING: _Kind(_receive_ping, _CONNECTION, cost=1.0, size_bytes=8),
        _GOAWAY: _Kind(_ignore, _CONNECTION, cost=1.0),
        _WINDOW_UPDATE: _Kind(_receive_credit, _CONNECTION | _OPENED, size_bytes=4),
        _CONTINUATION: _Kind(_receive_fragment, _OPENED | _IDLE),
    }

    # Sending

    def respond(
        self, stream: Http2Stream, head: bytes, parts: Sequence[Buffer], trailers: bytes | None
    ) -> None:
        """Queue a response or the next part of a response.

        Args:
            stream: The stream of the request.
            head: The field block that starts the response. Empty for further parts, and for a response that
                has only trailers.
            parts: The body. It must not change until it has been sent.
            trailers: The field block that ends the response, or None if more parts follow.
        """
        if head:
            self._control.append(_frame(_HEADERS, _END_HEADERS, stream.stream_id, head))
        size = sum(map(len, parts))
        is_next = not (self._ready or stream.queued_bytes)
        if trailers is not None and is_next and size <= self._find_room(stream):
            if size:
                self._control += (self._begin_data(stream, size), *parts)
            self._finish(stream, trailers, self._control)
            return
        for part in parts:
            if len(part):
                stream.queue.append(memoryview(part))
                stream.queued_bytes += len(part)
                self.queued_bytes += len(part)
        stream.trailers = trailers
        self._ready[stream.stream_id] = stream

    def ping(self) -> None:
        """Send a PING, which the client must acknowledge."""
        self._control.append(_frame(_PING, 0, 0, bytes(8)))

    def close(self, code: ErrorCode, message: str = "") -> None:
        """Send GOAWAY, after which no stream is opened. An error code also ends all streams."""
        payload = _WORD.pack(self._last_stream_id) + _WORD.pack(code) + message.encode()[:256]
        self._control.append(_frame(_GOAWAY, 0, 0, payload))
        self.is_closing = True
        if code != ErrorCode.NO_ERROR:
            for stream in list(self.streams.values()):
                self._end_stream(stream)

    def data_to_send(self, max_bytes: int) -> list[Buffer]:
        """Return the parts to send now, with a total size of about `max_bytes`. The list may be empty."""
        output, self._control = self._control, []
        while self._ready and max_bytes > 0:
            stream = self._ready.pop(next(iter(self._ready)))
            size = min(stream.queued_bytes, self._find_room(stream))
            if size > 0:
                max_bytes -= size
                self._take_queued(stream, size, output)
            elif stream.queued_bytes and stream.send_window > 0:
                self._ready[stream.stream_id] = stream
                break  # the window of the connection is used up
            if not stream.queued_bytes:
                if stream.trailers is not None:
                    self._finish(stream, stream.trailers, output)
            elif stream.send_window > 0:
                self._ready[stream.stream_id] = stream  # behind the others
        return output

    def _finish(self, stream: Http2Stream, trailers: bytes, output: list[Buffer]) -> None:
        """End a response; a client that still sends is told that nobody listens."""
        output.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream.stream_id, trailers))
        if stream.is_remote_open:
            output.append(_frame(_RST_STREAM, 0, stream.stream_id, _WORD.pack(ErrorCode.NO_ERROR)))
        self._end_stream(stream)

    def _find_room(self, stream: Http2Stream) -> int:
        """Return how many bytes of DATA one frame may have now."""
        return min(stream.send_window, self._whole.send_window, self._max_frame_bytes)

    def _begin_data(self, stream: Http2Stream, size: int) -> bytes:
        """Return the head of a DATA frame, and take it off the windows."""
        stream.send_window -= size
        self._whole.send_window -= size
        self.sent_bytes += size
        return _frame(_DATA, 0, stream.stream_id, size=size)

    def _take_queued(self, stream: Http2Stream, size: int, output: list[Buffer]) -> None:
        """Move one DATA frame of `size` bytes from a stream's queue to `output`."""
        output.append(self._begin_data(stream, size))
        stream.queued_bytes -= size
        self.queued_bytes -= size
        while size:
            part = stream.queue.popleft()
            if len(part) > size:
                stream.queue.appendleft(part[size:])
                part = part[:size]
            output.append(part)
            size -= len(part)

    def _end_stream(self, stream: Http2Stream) -> None:
        self.streams.pop(stream.stream_id, None)
        self._ready.pop(stream.stream_id, None)
        self.queued_bytes -= stream.queued_bytes
        stream.queue.clear()
        stream.queued_bytes = 0


_EXTENSION: Final = _Kind(Http2._ignore, _CONNECTION | _OPENED | _IDLE, cost=1.0)  # RFC 9113, section 5.5


def _strip_padding(flags: int, payload: memoryview) -> memoryview:
    if not flags & _PADDED:
        return payload
    end = len(payload) - payload[0] if len(payload) else 0
    if end < 1:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than the frame has bytes")
    return payload[1:end]


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"", *, size: int = 0) -> bytes:
    """Return a frame, or the head of one whose `size` bytes follow."""
    return _HEAD.pack((size or len(payload)) << 8 | kind, flags, stream_id) + payload
