"""HTTP/2 without I/O: what ends a connection or a stream, and what a client cannot make it hold."""

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.grpc_parts import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    frame,
    head_fields,
    hpack,
    read_all,
    setting,
    word,
)
from tests.toolkit.cases import cases

from edgekit_runtime.service.grpc.http2 import (
    DataReceived,
    Event,
    HeadersReceived,
    Http2,
    Http2Error,
    StreamReset,
)
from edgekit_runtime.service.grpc.rpcs import RpcHead, encode_field

START = PREFACE + frame(SETTINGS)
MAX_HEADER_BYTES = 16_384


class Peer:
    """An `Http2` with a clock that stands still, and what came out of it."""

    def __init__(self, *, max_streams: int = 10, keeps_streams: bool = True) -> None:
        self.now_s = 0.0
        self.http2 = Http2(
            RpcHead, max_streams=max_streams, max_header_bytes=MAX_HEADER_BYTES, clock=lambda: self.now_s
        )
        self.encoder = hpack.Encoder()
        self._keeps_streams = keeps_streams

    def receive(self, *data: bytes) -> list[Event]:
        self.http2.receive_data(b"".join(data))
        events: list[Event] = []
        while (event := self.http2.next_event()) is not None:
            if isinstance(event, HeadersReceived) and self._keeps_streams:
                event.stream.context = self
            events.append(event)
        return events

    def headers(self, stream: int = 1, flags: int = END_HEADERS, **fields: str) -> bytes:
        return frame(HEADERS, flags, stream, self.encoder.encode(head_fields(**fields)))

    def sent(self) -> list[tuple[int, int, int, bytes]]:
        """Return the frames to be sent: type, flags, stream, payload."""
        data, frames = read_all(self.http2.data_to_send(1 << 30)), []
        while data:
            size, stream = int.from_bytes(data[:3], "big"), int.from_bytes(data[5:9], "big")
            frames.append((data[3], data[4], stream, data[9 : 9 + size]))
            data = data[9 + size :]
        return frames


@pytest.fixture
def peer() -> Peer:
    peer = Peer()
    peer.receive(START)
    peer.sent()
    return peer


def test_request_in_single_bytes_gives_the_events_of_one_piece() -> None:
    whole, pieces = Peer(), Peer()
    data = START + whole.headers() + frame(DATA, 0, 1, b"abc") + frame(DATA, END_STREAM, 1, b"def")
    events = whole.receive(data)
    assert [type(event) for event in events] == [HeadersReceived, DataReceived, DataReceived]
    parts: list[Event] = []
    for at in range(len(data)):
        parts += pieces.receive(data[at : at + 1])
    bodies = [
        b"".join(bytes(event.data) for event in sequence if isinstance(event, DataReceived))
        for sequence in (events, parts)
    ]
    assert bodies == [b"abcdef"] * 2
    assert isinstance(parts[-1], DataReceived)
    assert parts[-1].ends_stream


def test_frame_in_drips_is_no_progress_until_it_is_whole(peer: Peer) -> None:
    frames, head = peer.http2.frames, peer.headers()
    for at in range(len(head) - 1):
        assert peer.receive(head[at : at + 1]) == []
        assert peer.http2.is_in_frame
        assert peer.http2.frames == frames
    assert len(peer.receive(head[-1:])) == 1
    assert not peer.http2.is_in_frame


def test_same_head_is_decoded_once_until_the_table_changes(peer: Peer) -> None:
    peer.receive(peer.headers(1))
    repeated = [event.head for event in peer.receive(peer.headers(3), peer.headers(5)) if _has_head(event)]
    assert repeated[0] is repeated[1]
    (other,) = peer.receive(peer.headers(7, x_other="a"))  # a new entry moves all others
    (again,) = peer.receive(peer.headers(9))
    assert _has_head(other)
    assert _has_head(again)
    assert again.head is not repeated[0]
    assert again.head.path == repeated[0].path


def _has_head(event: Event) -> bool:
    return isinstance(event, HeadersReceived)


@given(st.lists(st.sampled_from(["a", "b", "c" * 500, "d" * 3000, ""]), max_size=30))
@settings(max_examples=2 * settings().max_examples)  # 200 in the long run
def test_heads_are_those_that_a_plain_decoder_reads(values: list[str]) -> None:
    """With entries that come, go and are too large for the dynamic table."""
    peer, plain = Peer(max_streams=100), hpack.Decoder()
    peer.receive(START)
    for number, value in enumerate(values):
        block = peer.encoder.encode(head_fields(authorization=value))
        (event,) = peer.receive(frame(HEADERS, END_HEADERS, 2 * number + 1, block))
        assert isinstance(event, HeadersReceived)
        assert event.head.authorization == dict(plain.decode(block, raw=True))[b"authorization"]


BIG = word(0x7FFFFFFF)


@cases(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: l\r\n\r\n", PROTOCOL_ERROR),
        (PREFACE + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (PREFACE + frame(SETTINGS, ACK), PROTOCOL_ERROR),
        (PREFACE + frame(0x99, 0, 0), PROTOCOL_ERROR),
        (START + frame(DATA, 0, 1, b"a"), PROTOCOL_ERROR),
        (START + frame(HEADERS, END_HEADERS, 2, b"\x83"), PROTOCOL_ERROR),
        (START + frame(HEADERS, END_HEADERS, 0, b"\x83"), PROTOCOL_ERROR),
        (START + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
        (START + frame(HEADERS, END_HEADERS, 1, b"\x80"), COMPRESSION_ERROR),
        (START + frame(HEADERS, END_HEADERS, 1, b"\x3f\xff\xff\x7f"), COMPRESSION_ERROR),
        (START + frame(HEADERS, PADDED | END_HEADERS, 1, b"\x09a"), PROTOCOL_ERROR),
        (START + frame(HEADERS, 0, 1, b"\x83") + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (START + frame(HEADERS, 0, 1, b"\x83") + frame(CONTINUATION, 0, 3, b"\x83"), PROTOCOL_ERROR),
        (START + frame(CONTINUATION, 0, 1, b"\x83"), PROTOCOL_ERROR),
        (START + frame(PUSH_PROMISE, 0, 1, bytes(4)), PROTOCOL_ERROR),
        (START + frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
        (START + frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
        (START + frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (START + frame(RST_STREAM, 0, 1, word(CANCEL)), PROTOCOL_ERROR),
        (START + frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
        (START + frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 1 << 31)), FLOW_CONTROL_ERROR),
        (START + frame(SETTINGS, 0, 0, setting(0x5, 100)), PROTOCOL_ERROR),
        (START + frame(SETTINGS, 0, 3), PROTOCOL_ERROR),
        (START + frame(WINDOW_UPDATE, 0, 0, word(0)), PROTOCOL_ERROR),
        (START + frame(WINDOW_UPDATE, 0, 1, word(1)), PROTOCOL_ERROR),
        (START + frame(WINDOW_UPDATE, 0, 0, BIG), FLOW_CONTROL_ERROR),
        (START + struct.pack(">IBI", (1 << 23) << 8, 0, 1), FRAME_SIZE_ERROR),
    ],
)
def test_connection_that_breaks_the_rules_ends_with_the_reason(data: bytes, code: int) -> None:
    peer = Peer()
    with pytest.raises(Http2Error) as caught:
        peer.receive(data)
    assert caught.value.code == code
    peer.http2.close(caught.value.code, str(caught.value))
    (kind, _, _, payload) = peer.sent()[-1]
    assert (kind, int.from_bytes(payload[4:8], "big")) == (GOAWAY, code)


def open_stream(peer: Peer, stream: int = 1, *, flags: int = END_HEADERS) -> Any:
    (event,) = peer.receive(peer.headers(stream, flags))
    return event.stream


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([frame(DATA, END_STREAM, 1), frame(DATA, 0, 1, b"a")], STREAM_CLOSED),
        ([frame(DATA, PADDED, 1, b"\x05abc")], PROTOCOL_ERROR),
        ([struct.pack(">IBI", 20_000 << 8 | DATA, PADDED, 1)], ENHANCE_YOUR_CALM),
        ([frame(WINDOW_UPDATE, 0, 1, BIG)], FLOW_CONTROL_ERROR),
        ([frame(DATA, 0, 1, bytes(1 << 20)), frame(DATA, 0, 1, b"a")], FLOW_CONTROL_ERROR),
    ],
)
def test_stream_that_breaks_the_rules_ends_the_connection(peer: Peer, frames: list[bytes], code: int) -> None:
    open_stream(peer)
    with pytest.raises(Http2Error) as caught:
        peer.receive(*frames)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [(":method", "POST"), (":scheme", "http")],
        [*head_fields(), (":path", "/again")],
        [("te", "trailers"), *head_fields()],
        [*head_fields(), ("Upper", "a")],
        [*head_fields(), ("connection", "close")],
        [*head_fields(), (":strange", "a")],
        [*head_fields(), ("grpc-timeout", "1x")],
        [*head_fields(), ("authorization", "a"), ("authorization", "b")],
        [*head_fields(), ("authorization", "a\r\nX: b")],
        [*head_fields(), ("authorization", "a\0")],
    ],
)
def test_malformed_request_is_reset_alone(peer: Peer, fields: list[tuple[str, str]]) -> None:
    block = peer.encoder.encode(fields)
    assert peer.receive(frame(HEADERS, END_HEADERS, 1, block)) == []
    assert peer.sent() == [(RST_STREAM, 0, 1, word(PROTOCOL_ERROR))]
    assert len(peer.receive(peer.headers(3))) == 1


FLOODS: dict[str, list[bytes]] = {
    "ping": [frame(PING, 0, 0, bytes(8))],
    "settings": [frame(SETTINGS, 0, 0, setting(0x99, 1))],
    "priority": [frame(PRIORITY, 0, 1, bytes(5))],
    "unknown frames": [frame(0x55, 0, 0, b"a")],
    "empty data": [frame(DATA, 0, 1)],
    "resets": [frame(RST_STREAM, 0, 1, word(CANCEL))],
    "trailers of closed streams": [
        frame(RST_STREAM, 0, 1, word(CANCEL)),
        frame(HEADERS, END_HEADERS, 1, b"\x83"),
    ],
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_frames_that_ask_for_nothing_ends_the_connection(peer: Peer, name: str) -> None:
    open_stream(peer)
    with pytest.raises(Http2Error, match="too many") as caught:
        for _ in range(2000):
            peer.receive(*FLOODS[name])
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_requests_that_are_reset_at_once_end_the_connection(peer: Peer) -> None:
    count = 0
    with pytest.raises(Http2Error, match="too many") as caught:
        for stream in range(1, 2001, 2):
            peer.receive(peer.headers(stream), frame(RST_STREAM, 0, stream, word(CANCEL)))
            count += 1
    assert caught.value.code == ENHANCE_YOUR_CALM
    assert count <= 200


def test_refusals_that_a_client_provokes_end_the_connection() -> None:
    peer = Peer(max_streams=1)
    peer.receive(START)
    with pytest.raises(Http2Error, match="too many") as caught:
        for stream in range(1, 2001, 2):
            peer.receive(peer.headers(stream))
    assert caught.value.code == ENHANCE_YOUR_CALM
    assert (RST_STREAM, 0, 3, word(REFUSED_STREAM)) in peer.sent()


def test_slow_pings_and_resets_go_on_for_ever(peer: Peer) -> None:
    for stream in range(1, 10_001, 2):
        peer.now_s += 0.1
        peer.receive(peer.headers(stream), frame(RST_STREAM, 0, stream, word(CANCEL)))
        peer.receive(frame(PING, 0, 0, bytes(8)))
        peer.sent()
    assert peer.http2.streams == {}


@pytest.mark.parametrize("fragment", [b"", b"\x83", bytes(1000)])
def test_continuation_without_end_ends_the_connection(peer: Peer, fragment: bytes) -> None:
    peer.receive(frame(HEADERS, 0, 1, b"\x83"))
    with pytest.raises(Http2Error, match="does not end") as caught:
        for _ in range(20):
            peer.receive(frame(CONTINUATION, 0, 1, fragment))
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_head_over_the_limit_is_refused_before_it_is_collected(peer: Peer) -> None:
    with pytest.raises(Http2Error) as caught:
        peer.receive(struct.pack(">IBI", 20_000 << 8 | HEADERS, 0, 1))
    assert caught.value.code == ENHANCE_YOUR_CALM


def test_small_block_that_expands_is_refused(peer: Peer) -> None:
    """One entry of 4 kB, then a reference of one byte a time."""
    bomb = encode_indexed(b"x", bytes(3800)) + b"\xbe" * 1000
    with pytest.raises(Http2Error, match="header list") as caught:
        peer.receive(frame(HEADERS, END_HEADERS, 1, bomb))
    assert caught.value.code == ENHANCE_YOUR_CALM


def encode_indexed(name: bytes, value: bytes) -> bytes:
    """Return a literal field that enters the dynamic table."""
    return b"\x40" + encode_field(name, value)[1:]


def test_length_of_a_long_field_is_written_as_hpack_reads_it() -> None:
    for size in (0, 126, 127, 128, 254, 255, 300, 20_000):
        (field,) = hpack.Decoder().decode(encode_field(b"a", bytes(size)), raw=True)
        assert field == (b"a", bytes(size))


def data_of(frames: Sequence[tuple[int, int, int, bytes]], stream: int) -> bytes:
    return b"".join(payload for kind, _, number, payload in frames if kind == DATA and number == stream)


def test_streams_share_the_window_of_the_connection_in_turns(peer: Peer) -> None:
    first, second = open_stream(peer, 1), open_stream(peer, 3)
    for stream in (first, second):
        peer.http2.respond(stream, b"\x88", [bytes(200_000)], b"\x88")
    frames = peer.sent()
    sizes = [len(data_of(frames, stream)) for stream in (1, 3)]
    assert sum(sizes) == 65_535
    assert abs(sizes[0] - sizes[1]) <= 16_384
    peer.receive(frame(WINDOW_UPDATE, 0, 0, word(1 << 20)))
    frames = peer.sent()
    assert [len(data_of(frames, stream)) for stream in (1, 3)] == [65_535 - size for size in sizes]
    peer.receive(*(frame(WINDOW_UPDATE, 0, stream, word(1 << 20)) for stream in (1, 3)))
    frames = peer.sent()
    assert sum(len(data_of(frames, stream)) for stream in (1, 3)) == 400_000 - 2 * 65_535
    ends = [(kind, stream) for kind, flags, stream, _ in frames if flags & END_STREAM and kind == HEADERS]
    assert sorted(ends) == [(HEADERS, 1), (HEADERS, 3)]
    assert peer.http2.queued_bytes == 0


def test_window_that_settings_shrink_below_zero_recovers(peer: Peer) -> None:
    stream = open_stream(peer, flags=END_HEADERS | END_STREAM)
    peer.http2.respond(stream, b"\x88", [bytes(65_535 + 10)], b"\x88")
    peer.sent()
    peer.receive(frame(WINDOW_UPDATE, 0, 0, word(1000)))
    peer.receive(frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 0)))
    assert data_of(peer.sent(), 1) == b""
    peer.receive(frame(WINDOW_UPDATE, 0, 1, word(65_535)))
    assert data_of(peer.sent(), 1) == b""
    peer.receive(frame(WINDOW_UPDATE, 0, 1, word(10)))
    assert data_of(peer.sent(), 1) == bytes(10)


def test_response_in_parts_ends_behind_what_waits_for_the_window(peer: Peer) -> None:
    stream = open_stream(peer, flags=END_HEADERS | END_STREAM)
    peer.http2.respond(stream, b"\x88", [bytes(65_535 + 10)], None)
    assert len(data_of(peer.sent(), 1)) == 65_535
    peer.http2.respond(stream, b"", (), b"\x88")
    assert peer.sent() == []
    peer.receive(*(frame(WINDOW_UPDATE, 0, number, word(10)) for number in (0, 1)))
    frames = peer.sent()
    assert data_of(frames, 1) == bytes(10)
    assert frames[-1][:2] == (HEADERS, END_HEADERS | END_STREAM)


def test_reset_stream_frees_what_it_had_to_send(peer: Peer) -> None:
    stream = open_stream(peer)
    peer.http2.respond(stream, b"\x88", [bytes(200_000)], b"\x88")
    peer.sent()
    assert peer.http2.queued_bytes == 200_000 - 65_535
    peer.receive(frame(RST_STREAM, 0, 1, word(CANCEL)))
    assert peer.http2.queued_bytes == 0
    assert peer.sent() == []


def test_reset_is_an_event_for_who_wants_it(peer: Peer) -> None:
    open_stream(peer)
    (event,) = peer.receive(frame(RST_STREAM, 0, 1, word(CANCEL)))
    assert isinstance(event, StreamReset)


# Fuzzing

PIECE = st.sampled_from(
    [
        START,
        PREFACE,
        frame(SETTINGS),
        frame(SETTINGS, ACK),
        frame(PING, 0, 0, bytes(8)),
        frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode(head_fields())),
        frame(HEADERS, END_HEADERS | END_STREAM, 3, hpack.Encoder().encode(head_fields())),
        frame(HEADERS, 0, 5, b"\x83"),
        frame(CONTINUATION, END_HEADERS, 5, b"\x86"),
        frame(DATA, 0, 1, b"\0\0\0\0\1a"),
        frame(DATA, END_STREAM, 1),
        frame(DATA, PADDED, 1, b"\x02abc"),
        frame(WINDOW_UPDATE, 0, 0, word(1000)),
        frame(WINDOW_UPDATE, 0, 1, BIG),
        frame(RST_STREAM, 0, 1, word(8)),
        frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 0)),
        frame(GOAWAY, 0, 0, bytes(8)),
        b"\x00",
        b"\xff" * 9,
    ]
)
RANDOM = st.builds(frame, st.integers(0, 10), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=40))


@settings(max_examples=5 * settings().max_examples)  # 500 in the long run
@given(
    st.lists(PIECE | RANDOM | st.binary(max_size=12), max_size=20), st.lists(st.integers(1, 60), max_size=30)
)
def test_any_frames_in_any_pieces_are_events_or_an_error(parts: list[bytes], sizes: list[int]) -> None:
    """And all streams may answer at any time."""
    peer, data, at = Peer(), START + b"".join(parts), 0
    try:
        for size in [*sizes, len(data)]:
            for event in peer.receive(data[at : at + size]):
                if isinstance(event, DataReceived) and event.ends_stream:
                    peer.http2.respond(event.stream, b"\x88", [bytes(70_000)], b"\x88")
            at += size
            peer.sent()
    except Http2Error as error:
        peer.http2.close(error.code, str(error))
        assert peer.sent()[-1][0] == GOAWAY
        assert peer.http2.streams == {}
    assert peer.http2.queued_bytes == sum(stream.queued_bytes for stream in peer.http2.streams.values())
    assert len(peer.http2.streams) <= 10
