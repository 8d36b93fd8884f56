"""One HTTP/2 connection of a server, without I/O: bytes go in, events and bytes come out, as in h11.

    http2.receive_data(received)
    while (event := http2.next_event()) is not None:
        ...  # a handler may answer: http2.respond(event.stream, ...)
    parts = http2.data_to_send(64 << 10)

DATA is passed on as it arrives, before its frame is complete, so nothing but heads is collected here. What a
stream sends waits for the windows of the client, and streams take turns frame by frame. Of responses no field
enters the client's dynamic table, so a response has the same bytes in every connection.

Source: RFC 9113 (HTTP/2), whose names of frames, flags and errors these are; RFC 7541 (HPACK), by `hpack`.
"""

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES: Final = 1 << 20  # of what we receive: long frames cost less; nothing waits for their end
STREAM_WINDOW_BYTES: Final = 1 << 20
CONNECTION_WINDOW_BYTES: Final = 16 << 20

_DEFAULT_WINDOW_BYTES: Final = 65_535
_DEFAULT_FRAME_BYTES: Final = 16_384
_MAX_WINDOW_BYTES: Final = (1 << 31) - 1
_FRAME_HEAD_BYTES: Final = 9
_MAX_CONTINUATIONS: Final = 16
_MAX_HEADS: Final = 64  # that are kept with their meaning
# Frames that ask for nothing: a client may send so many at once, and so many a second.
_IDLE_BURST: Final = 1000.0
_IDLE_PER_S: Final = 250.0
_RESET_COST: Final = 5.0  # a request that is cancelled at once costs more than a PING

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS = 0x0, 0x1, 0x2, 0x3, 0x4
_PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0x5, 0x6, 0x7, 0x8, 0x9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST_SIZE = 0x3, 0x4, 0x5, 0x6

_FIXED_BYTES: Final = {_PRIORITY: 5, _RST_STREAM: 4, _PING: 8, _WINDOW_UPDATE: 4}
_SETTING: Final = struct.Struct(">HI")
_WORD: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">IBI")  # length and type, flags, stream

Buffer: TypeAlias = "bytes | memoryview"
Fields: TypeAlias = "list[tuple[bytes, bytes]]"


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Http2Error(Exception):
    """The connection cannot go on: `Http2.close` tells the client with GOAWAY."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class MalformedHeadError(Exception):
    """A request whose fields HTTP/2 forbids; its stream is reset."""


class Http2Stream:
    """One request with its response.

    Attributes:
        stream_id: its number, which the client chose.
        context: what the owner keeps with it; None once nobody wants its events.
        send_window, receive_window: bytes that may still be sent and received.
        is_remote_open: whether the client may still send.
        queue: what is to be sent, DATA in order.
        queued_bytes: size of `queue`.
        trailers: the field block behind `queue`, or None as long as it is not known.
    """

    __slots__ = (
        *("context", "consumed_bytes", "is_remote_open", "queue", "queued_bytes", "receive_window"),
        *("send_window", "stream_id", "trailers"),
    )

    def __init__(self, stream_id: int, send_window: int, *, is_remote_open: bool) -> None:
        self.stream_id = stream_id
        self.context: Any = None
        self.send_window = send_window
        self.receive_window = STREAM_WINDOW_BYTES
        self.consumed_bytes = 0  # for which the client has no credit yet
        self.is_remote_open = is_remote_open
        self.queue: deque[memoryview] = deque()
        self.queued_bytes = 0
        self.trailers: bytes | None = None


class HeadersReceived(NamedTuple):
    """A request has begun; `stream.is_remote_open` says whether a body follows."""

    stream: Http2Stream
    head: Any


class DataReceived(NamedTuple):
    """A piece of a request's body; the owner calls `consume` once it has taken it."""

    stream: Http2Stream
    data: memoryview
    ends_stream: bool


class StreamReset(NamedTuple):
    """The client wants no response."""

    stream: Http2Stream


Event: TypeAlias = HeadersReceived | DataReceived | StreamReset


class _HeadDecoder:
    """Decodes field blocks, and keeps what the last few of a client mean.

    A block of indexed fields alone (each a byte with the highest bit set) leaves the dynamic table as it is,
    and means the same until another block may have changed the table.
    """

    __slots__ = ("_decoder", "_heads", "_hpack", "_read_head")

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
        streams: the open ones by number.
        queued_bytes: DATA of all streams that is still to be sent.
        received_bytes, sent_bytes: DATA so far.
        frames: how many frames have arrived whole, without DATA.
        is_closing: whether GOAWAY was sent; no further stream is opened.
    """

    def __init__(
        self,
        read_head: Callable[[Fields], Any],
        *,
        max_streams: int,
        max_header_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a connection whose first bytes are SETTINGS.

        Args:
            read_head: makes of the fields of a request what `HeadersReceived` carries; raises
                MalformedHeadError.
            max_streams: open streams at one time; a further one is refused.
            max_header_bytes: size limit of a request's fields, compressed and not.
            clock: in seconds.
        """
        self._decoder = _HeadDecoder(max_header_bytes, read_head)
        self._max_streams, self._max_header_bytes, self._clock = max_streams, max_header_bytes, clock
        self.streams: dict[int, Http2Stream] = {}
        self.queued_bytes = self.received_bytes = self.sent_bytes = self.frames = 0
        self.is_closing = False
        self._unread = b""
        self._at = 0  # in `_unread`
        self._has_preface = self._has_settings = False
        self._data_stream: Http2Stream | None = None  # whose DATA frame is being received
        self._data_left = self._padding_left = 0  # of the present frame
        self._ends_stream = False
        self._block: tuple[int, bool, bytearray] | None = None  # stream, END_STREAM and fragments of a head
        self._continuations = 0
        self._last_stream_id = 0
        self._send_window = self._first_window = _DEFAULT_WINDOW_BYTES
        self._max_frame_bytes = _DEFAULT_FRAME_BYTES
        self._receive_window = CONNECTION_WINDOW_BYTES
        self._consumed_bytes = 0
        self._budget, self._budget_s = _IDLE_BURST, clock()
        self._ready: dict[int, Http2Stream] = {}  # with something to send, the next one first
        settings = ((_MAX_CONCURRENT_STREAMS, max_streams), (_INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES))
        sizes = ((_MAX_FRAME_SIZE, MAX_FRAME_BYTES), (_MAX_HEADER_LIST_SIZE, max_header_bytes))
        payload = b"".join(_SETTING.pack(*setting) for setting in (*settings, *sizes))
        self._control: list[Buffer] = [_frame(_SETTINGS, 0, 0, payload)]
        self._send_credit(0, CONNECTION_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)

    # Receiving

    @property
    def is_in_frame(self) -> bool:
        """Whether a part of something was received whose rest is missing, or no preface was."""
        is_partial = len(self._unread) > self._at or self._data_left or self._padding_left
        return bool(is_partial) or self._block is not None or not self._has_settings

    def receive_data(self, data: bytes) -> None:
        self._unread = self._unread[self._at :] + data if len(self._unread) > self._at else data
        self._at = 0

    def next_event(self) -> Event | None:
        """Return the next event, or None if more bytes are needed.

        Raises:
            Http2Error: the connection cannot go on.
        """
        if not self._has_preface and not self._read_preface():
            return None
        while True:
            if self._data_left or self._padding_left:
                piece = self._take_data()
                if piece is not None:
                    return piece
                if self._data_left or self._padding_left:
                    return None
            data, at = self._unread, self._at
            if len(data) - at < _FRAME_HEAD_BYTES:
                return None
            length_and_kind, flags, stream_id = _HEAD.unpack_from(data, at)
            length, kind, stream_id = length_and_kind >> 8, length_and_kind & 0xFF, stream_id & 0x7FFFFFFF
            if length > MAX_FRAME_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            if not self._has_settings and (kind != _SETTINGS or flags & _ACK):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            if self._block is not None and (kind != _CONTINUATION or stream_id != self._block[0]):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame between those of one field block")
            if kind == _DATA:
                empty = self._begin_data(length, flags, stream_id)
                if empty is not None:
                    return empty
                if self._at == at:  # the length of the padding is missing
                    return None
                continue
            if kind > _CONTINUATION:  # of an extension (RFC 9113, section 5.5)
                self._spend()
                self._at, self._padding_left = at + _FRAME_HEAD_BYTES, length
                continue
            self._check_length(kind, length)
            end = at + _FRAME_HEAD_BYTES + length
            if len(data) < end:
                return None
            self._at = end
            self.frames += 1
            payload = data[at + _FRAME_HEAD_BYTES : end]
            event = self._handle_frame(kind, flags, stream_id, payload)
            if event is not None:
                return event

    def consume(self, stream: Http2Stream, size_bytes: int) -> None:
        """Let the client send as many further bytes on a stream."""
        stream.consumed_bytes += size_bytes
        if stream.is_remote_open and stream.consumed_bytes > STREAM_WINDOW_BYTES // 2:
            self._send_credit(stream.stream_id, stream.consumed_bytes)
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

    def _check_length(self, kind: int, length: int) -> None:
        """Refuse a frame before its payload is collected."""
        if length != _FIXED_BYTES.get(kind, length):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes")
        if length > max(self._max_header_bytes, _DEFAULT_FRAME_BYTES):
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a frame of type {kind} has {length} bytes")

    def _begin_data(self, length: int, flags: int, stream_id: int) -> DataReceived | None:
        data, start = self._unread, self._at + _FRAME_HEAD_BYTES
        overhead = padding = 0
        if flags & _PADDED:
            if len(data) <= start:
                return None
            padding, overhead = data[start], data[start] + 1
            start += 1
            if overhead > length:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than the frame has bytes")
        if not stream_id or stream_id > self._last_stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is not open")
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.is_remote_open:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"DATA on stream {stream_id} after its end")
        self._at = start
        self._count_data(stream, length, overhead)
        self._data_stream, self._ends_stream = stream, bool(flags & _END_STREAM)
        self._data_left, self._padding_left = length - overhead, padding
        if self._data_left:
            return None
        self._spend(0.0 if self._ends_stream else 1.0)
        return self._pass_data(memoryview(b""))

    def _count_data(self, stream: Http2Stream | None, length: int, overhead: int) -> None:
        """Take a DATA frame off the windows; that of the connection is always widened again."""
        self._receive_window -= length
        if stream is not None:
            stream.receive_window -= length
        if self._receive_window < 0 or (stream is not None and stream.receive_window < 0):
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the window")
        self._consumed_bytes += length
        if self._consumed_bytes > CONNECTION_WINDOW_BYTES // 2:
            self._send_credit(0, self._consumed_bytes)
            self._receive_window += self._consumed_bytes
            self._consumed_bytes = 0
        if stream is not None and overhead:
            self.consume(stream, overhead)

    def _take_data(self) -> DataReceived | None:
        """Pass on what has arrived of the present frame; skip its padding, and what no stream wants."""
        data, at = self._unread, self._at
        size = min(self._data_left, len(data) - at)
        if size:
            self._at = at + size
            self._data_left -= size
            self.received_bytes += size
            event = self._pass_data(memoryview(data)[at : at + size])
            if event is not None:
                return event
        if not self._data_left:
            skipped = min(self._padding_left, len(data) - self._at)
            self._at += skipped
            self._padding_left -= skipped
        return None

    def _pass_data(self, data: memoryview) -> DataReceived | None:
        stream = self._data_stream
        if stream is None:
            return None
        ends_stream = self._ends_stream and not self._data_left
        if ends_stream:
            stream.is_remote_open = False
        return DataReceived(stream, data, ends_stream) if stream.context is not None else None

    def _handle_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> Event | None:
        if kind == _HEADERS:
            return self._begin_block(flags, stream_id, payload)
        if kind == _CONTINUATION:
            return self._continue_block(flags, payload)
        if kind == _WINDOW_UPDATE:
            self._update_window(stream_id, _WORD.unpack(payload)[0] & 0x7FFFFFFF)
        elif kind == _RST_STREAM:
            return self._receive_reset(stream_id)
        elif kind == _SETTINGS:
            self._receive_settings(flags, stream_id, payload)
        elif kind == _PING:
            self._expect_connection(stream_id)
            self._spend()
            if not flags & _ACK:
                self._control.append(_frame(_PING, _ACK, 0, payload))
        elif kind == _PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:  # PRIORITY, GOAWAY
            self._spend()
        return None

    def _begin_block(self, flags: int, stream_id: int, payload: bytes) -> Event | None:
        start, padding = 0, 0
        if flags & _PADDED:
            start, padding = 1, payload[0] if payload else 0
        if flags & _PRIORITY_FLAG:
            start += 5
        if start + padding > len(payload):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "HEADERS with more padding than bytes")
        fragment = payload[start : len(payload) - padding] if start or padding else payload
        ends_stream = bool(flags & _END_STREAM)
        if flags & _END_HEADERS:
            return self._receive_block(stream_id, fragment, ends_stream=ends_stream)
        self._block = (stream_id, ends_stream, bytearray(fragment))
        self._continuations = 0
        return None

    def _continue_block(self, flags: int, payload: bytes) -> Event | None:
        if self._block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        stream_id, ends_stream, fragments = self._block
        self._continuations += 1
        if self._continuations > _MAX_CONTINUATIONS or len(fragments) + len(payload) > self._max_header_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "the field block does not end")
        fragments += payload
        if not flags & _END_HEADERS:
            return None
        self._block = None
        return self._receive_block(stream_id, bytes(fragments), ends_stream=ends_stream)

    def _receive_block(self, stream_id: int, block: bytes, *, ends_stream: bool) -> Event | None:
        if len(block) > self._max_header_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a field block of {len(block)} bytes")
        is_new = stream_id > self._last_stream_id
        if not stream_id % 2:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        if is_new:
            self._last_stream_id = stream_id
        try:
            head = self._decoder.decode(block)
        except MalformedHeadError:
            head = None
        if not is_new:
            return self._receive_trailers(stream_id, ends_stream=ends_stream)
        if head is None or self.is_closing or len(self.streams) >= self._max_streams:
            code = ErrorCode.PROTOCOL_ERROR if head is None else ErrorCode.REFUSED_STREAM
            self._spend(_RESET_COST)
            self._control.append(_frame(_RST_STREAM, 0, stream_id, _WORD.pack(code)))
            return None
        stream = Http2Stream(stream_id, self._first_window, is_remote_open=not ends_stream)
        self.streams[stream_id] = stream
        return HeadersReceived(stream, head)

    def _receive_trailers(self, stream_id: int, *, ends_stream: bool) -> Event | None:
        stream = self.streams.get(stream_id)
        if stream is None:
            self._spend()  # of a stream that ended here meanwhile
            return None
        if not stream.is_remote_open or not ends_stream:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id} in its middle")
        stream.is_remote_open = False
        return DataReceived(stream, memoryview(b""), ends_stream=True) if stream.context is not None else None

    def _receive_reset(self, stream_id: int) -> StreamReset | None:
        if not stream_id or stream_id > self._last_stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}, which is not open")
        self._spend(_RESET_COST)
        stream = self.streams.get(stream_id)
        if stream is None:
            return None
        self._end_stream(stream)
        return StreamReset(stream) if stream.context is not None else None

    def _receive_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._expect_connection(stream_id)
        if len(payload) % _SETTING.size or (flags & _ACK and payload):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        self._spend(1.0 + len(payload) / _SETTING.size)
        if flags & _ACK:
            return
        self._has_settings = True
        for name, setting in _SETTING.iter_unpack(payload):
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

    def _update_window(self, stream_id: int, increment: int) -> None:
        if not increment:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        if stream_id > self._last_stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {stream_id}, not open")
        if stream_id:
            stream = self.streams.get(stream_id)
            if stream is not None:
                self._widen(stream, increment)
            return
        self._send_window += increment
        if self._send_window > _MAX_WINDOW_BYTES:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is too large")

    def _widen(self, stream: Http2Stream, difference: int) -> None:
        stream.send_window += difference
        if stream.send_window > _MAX_WINDOW_BYTES:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream is too large")
        if stream.queued_bytes and stream.send_window > 0:
            self._ready[stream.stream_id] = stream

    def _expect_connection(self, stream_id: int) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of the connection on stream {stream_id}")

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

    # Sending

    def respond(self, stream: Http2Stream, head: bytes, parts: Sequence[Buffer], trailers: bytes) -> None:
        """Send a whole response: field block, body and trailers."""
        size = sum(map(len, parts))
        fits = size <= min(stream.send_window, self._send_window, self._max_frame_bytes)
        if fits and not self._ready:  # else those that wait for the window of the connection would starve
            stream.send_window -= size
            self._send_window -= size
            self.sent_bytes += size
            stream_id = stream.stream_id
            headers = _frame(_HEADERS, _END_HEADERS, stream_id, head)
            self._control += (headers, _frame(_DATA, 0, stream_id, size=size), *parts)
            self._finish(stream, trailers, self._control)
            return
        self.send_headers(stream, head)
        self.send_data(stream, parts)
        self.send_trailers(stream, trailers)

    def send_headers(self, stream: Http2Stream, block: bytes) -> None:
        """Begin a response."""
        self._control.append(_frame(_HEADERS, _END_HEADERS, stream.stream_id, block))

    def send_data(self, stream: Http2Stream, parts: Sequence[Buffer]) -> None:
        """Send a part of a body, behind what waits already; the parts must not change until they are sent."""
        for part in parts:
            if len(part):
                stream.queue.append(memoryview(part))
                stream.queued_bytes += len(part)
                self.queued_bytes += len(part)
        self._ready[stream.stream_id] = stream

    def send_trailers(self, stream: Http2Stream, block: bytes) -> None:
        """End a response, behind what waits already; without a response, `block` is all of it."""
        stream.trailers = block
        self._ready[stream.stream_id] = stream

    def reset(self, stream: Http2Stream, code: ErrorCode) -> None:
        """End a stream at once, if it is open."""
        if stream.stream_id in self.streams:
            self._control.append(_frame(_RST_STREAM, 0, stream.stream_id, _WORD.pack(code)))
            self._end_stream(stream)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._control.append(_frame(_PING, 0, 0, bytes(8)))

    def close(self, code: ErrorCode, message: str = "") -> None:
        """Accept no further stream (GOAWAY); with an error, end all streams too."""
        payload = _WORD.pack(self._last_stream_id) + _WORD.pack(code) + message.encode()[:256]
        self._control.append(_frame(_GOAWAY, 0, 0, payload))
        self.is_closing = True
        if code != ErrorCode.NO_ERROR:
            for stream in list(self.streams.values()):
                self._end_stream(stream)

    def data_to_send(self, max_bytes: int) -> list[Buffer]:
        """Return what may be sent now, about `max_bytes` at most, in parts; empty if there is nothing."""
        output: list[Buffer] = self._control
        self._control = []
        while self._ready and max_bytes > 0:
            stream_id, stream = next(iter(self._ready.items()))
            del self._ready[stream_id]
            size = min(stream.queued_bytes, stream.send_window, self._send_window, self._max_frame_bytes)
            if stream.queued_bytes and size <= 0:
                if stream.send_window > 0:  # it is the window of the connection that is used up
                    self._ready[stream_id] = stream
                    break
                continue
            max_bytes -= size
            if size:
                self._take_queued(stream, size, output)
            if stream.queued_bytes:
                self._ready[stream_id] = stream  # behind the others
            elif stream.trailers is not None:
                self._finish(stream, stream.trailers, output)
        return output

    def _finish(self, stream: Http2Stream, trailers: bytes, output: list[Buffer]) -> None:
        """End a response; a client that still sends is told that nobody listens."""
        output.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream.stream_id, trailers))
        if stream.is_remote_open:
            output.append(_frame(_RST_STREAM, 0, stream.stream_id, _WORD.pack(ErrorCode.NO_ERROR)))
        self._end_stream(stream)

    def _take_queued(self, stream: Http2Stream, size: int, output: list[Buffer]) -> None:
        """Move one DATA frame of `size` bytes from a stream's queue to `output`."""
        output.append(_frame(_DATA, 0, stream.stream_id, size=size))
        stream.send_window -= size
        self._send_window -= size
        stream.queued_bytes -= size
        self.queued_bytes -= size
        self.sent_bytes += size
        while size:
            part = stream.queue[0]
            if len(part) <= size:
                output.append(stream.queue.popleft())
                size -= len(part)
            else:
                output.append(part[:size])
                stream.queue[0] = part[size:]
                size = 0

    def _end_stream(self, stream: Http2Stream) -> None:
        self.streams.pop(stream.stream_id, None)
        self._ready.pop(stream.stream_id, None)
        self.queued_bytes -= stream.queued_bytes
        stream.queue.clear()
        stream.queued_bytes = 0
        if self._data_stream is stream:
            self._data_stream = None

    def _send_credit(self, stream_id: int, size_bytes: int) -> None:
        self._control.append(_frame(_WINDOW_UPDATE, 0, stream_id, _WORD.pack(size_bytes)))


def encode_field(name: bytes, value: bytes) -> bytes:
    """Return a field that enters no dynamic table (RFC 7541, section 6.2.2), without Huffman coding."""
    return b"\x00" + _encode_string(name) + _encode_string(value)


def _encode_string(text: bytes) -> bytes:
    rest = len(text) - 127
    if rest < 0:
        return bytes((len(text),)) + text
    length = bytearray(b"\x7f")
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    length.append(rest)
    return bytes(length) + text


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"", *, size: int = 0) -> bytes:
    """Return a frame, or the head of one whose `size` bytes follow."""
    return _HEAD.pack((size or len(payload)) << 8 | kind, flags, stream_id) + payload
