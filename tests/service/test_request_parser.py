"""The request parser: bytes to requests, without a socket."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.toolkit.cases import cases

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.http.request_head import HeadCache, RequestHead
from edgekit_runtime.service.http.request_parser import Request, RequestParser
from edgekit_runtime.service.options.http import HttpLimits

LIMITS = HttpLimits(max_head_bytes=400, max_body_bytes=5000)
HOST = b"Host: l\r\n"


def make_parser() -> RequestParser:
    return RequestParser(HeadCache(), LIMITS)


def feed(parser: RequestParser, data: bytes) -> bytes:
    """Write as much of `data` as the parser wants to where it wants it; return the rest."""
    buffer = parser.get_buffer()
    if buffer is None:
        parser.receive_data(data)
        return b""
    part = data[: len(buffer)]
    buffer[: len(part)] = part
    parser.buffer_updated(len(part))
    return data[len(part) :]


def drain(parser: RequestParser) -> Iterator[tuple[Any, ...]]:
    """Yield the events that are there, comparable."""
    while (event := parser.next_event()) is not None:
        if isinstance(event, Request):
            yield "request", event.head.path, bytes(event.body)
        else:
            yield "head", event.method, event.path, event.body_bytes


def parse(*pieces: bytes) -> list[tuple[Any, ...]]:
    """Return all events of `pieces`; a refusal is the last one."""
    parser = make_parser()
    found: list[tuple[Any, ...]] = []
    try:
        for piece in pieces:
            rest = piece
            while rest:
                rest = feed(parser, rest)
                found.extend(drain(parser))
    except RequestError as error:
        found.append(("refused", error.status))
    return found


def post(path: bytes, body: bytes, fields: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n%s" % (path, HOST, fields, len(body), body)


def post_chunked(path: bytes, *chunks: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n" % (path, HOST)
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


GET = b"GET /v2 HTTP/1.1\r\n" + HOST + b"\r\n"
STREAMS = {
    "pipelined": GET + post(b"/a", b"x" * 50) + GET,
    "chunked": post_chunked(b"/c", b"abc", b"d" * 30) + GET,
    "trailers": post_chunked(b"/c", b"abc")[:-2] + b"A: b\r\n\r\n" + GET,
    "empty line": b"\r\n" + GET + b"\r\n" + GET,
    "two empty lines": b"\r\n\r\n" + GET,
    "descriptor": post(b"/r", b"{}", b"Edgekit-Descriptor: 1\r\n") + GET,
    "too long": post(b"/a", b"") + post(b"/b", b"x" * 5001),
    "bad chunk": post_chunked(b"/c", b"abc")[:-5] + b"-1\r\n",
    "long head": GET + b"GET /v2 HTTP/1.1\r\n" + HOST + b"A: " + b"a" * 400 + b"\r\n\r\n",
    "bad head": GET + b"GET /v2\r\n\r\n" + GET,
}


@pytest.mark.parametrize("name", STREAMS)
def test_stream_split_at_any_place_gives_the_same_events(name: str) -> None:
    data = STREAMS[name]
    expected = parse(data)
    assert expected
    for at in range(1, len(data)):
        assert parse(data[:at], data[at:]) == expected, at
    assert parse(*(data[at : at + 1] for at in range(len(data)))) == expected


BODY = st.binary(max_size=60)
MESSAGE = st.one_of(
    st.just(GET),
    BODY.map(lambda body: post(b"/a", body)),
    st.lists(BODY.filter(len), max_size=3).map(lambda chunks: post_chunked(b"/c", *chunks)),
    st.sampled_from([b"\r\n", b"\n", b"0\r\n\r\n", b"GET", post(b"/r", b"{}", b"Edgekit-Descriptor: 1\r\n")]),
)


@settings(max_examples=3 * settings().max_examples)  # 300 in the long run
@given(st.lists(MESSAGE, min_size=1, max_size=5), st.lists(st.integers(1, 70), min_size=1, max_size=20))
def test_stream_in_any_pieces_gives_the_same_events(messages: list[bytes], sizes: list[int]) -> None:
    data = b"".join(messages)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    assert parse(*pieces, data[at:]) == parse(data)


def test_request_is_a_head_and_then_the_whole_request() -> None:
    parser = make_parser()
    parser.receive_data(post(b"/v2/models/m/infer", b"abc"))
    head = parser.next_event()
    assert isinstance(head, RequestHead)
    assert (head.method, head.path, head.body_bytes) == ("POST", "/v2/models/m/infer", 3)
    request = parser.next_event()
    assert isinstance(request, Request)
    assert request.head is head
    assert bytes(request.body) == b"abc"
    assert parser.next_event() is None
    assert parser.unread == b""


def test_pipelined_requests_come_in_order() -> None:
    bodies = [b"one", b"", b"three"]
    events = parse(b"".join(post(b"/p", body) for body in bodies))
    assert [event[2] for event in events if event[0] == "request"] == bodies


def test_unread_bytes_begin_with_the_head_until_its_body_is_asked_for() -> None:
    """A connection that is released at the head takes the whole request with it."""
    parser = make_parser()
    data = post(b"/p", b"abc") + GET
    parser.receive_data(GET + data)
    for _ in range(3):
        parser.next_event()
    assert parser.unread == data
    parser.next_event()
    assert parser.unread == GET


def test_large_body_is_received_into_its_aligned_place_without_a_copy() -> None:
    text = json.dumps({"inputs": []}).encode()
    tensor = np.arange(1000, dtype=np.float32)
    fields = b"Inference-Header-Content-Length: %d\r\n" % len(text)
    data = post(b"/v2/models/m/infer", text + tensor.tobytes(), fields)
    at = data.index(b"\r\n\r\n") + 20
    parser = make_parser()
    parser.receive_data(data[:at])
    assert isinstance(parser.next_event(), RequestHead)
    assert parser.next_event() is None
    buffer = parser.get_buffer()
    assert buffer is not None
    assert parser.body_bytes == 16
    assert len(buffer) == len(data) - at
    buffer[:] = data[at:]
    parser.buffer_updated(len(buffer))
    request = parser.next_event()
    assert isinstance(request, Request)
    received = np.frombuffer(request.body, np.float32, offset=len(text))
    np.testing.assert_array_equal(received, tensor)
    assert np.shares_memory(received, np.frombuffer(buffer, np.uint8))
    assert received.ctypes.data % 64 == 0


def test_buffer_never_reaches_into_the_next_request() -> None:
    parser = make_parser()
    parser.receive_data(post(b"/p", b"abcdef")[:-4])
    parser.next_event()
    parser.next_event()
    buffer = parser.get_buffer()
    assert buffer is not None
    assert len(buffer) == 4


def test_parts_of_heads_and_bodies_are_told_apart() -> None:
    parser = make_parser()
    assert (parser.is_in_head, parser.body_bytes) == (False, None)
    parser.receive_data(b"POST /p HTTP/1.1\r\n")
    assert parser.next_event() is None
    assert (parser.is_in_head, parser.body_bytes) == (True, None)
    parser.receive_data(HOST + b"Content-Length: 3\r\n\r\na")
    assert isinstance(parser.next_event(), RequestHead)
    assert parser.next_event() is None
    assert (parser.is_in_head, parser.body_bytes) == (False, 1)


def test_cleared_parser_begins_again() -> None:
    parser = make_parser()
    parser.receive_data(post(b"/p", b"abc")[:-1])
    parser.next_event()
    parser.next_event()
    parser.clear()
    assert parser.get_buffer() is None
    parser.receive_data(GET)
    assert list(drain(parser)) == [("head", "GET", "/v2", 0), ("request", "/v2", b"")]


@cases(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/2.0\r\nHost: l\r\n\r\n", 505),
        (b"GET / HTTP/1.1\nHost: l\n\n\r\n\r\n", 400),
        (post(b"/p", b"")[:-4] + b"\r\nContent-Length: 5\r\n\r\nhello", 400),
        (post(b"/p", b"")[:-4] + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: l\r\nContent-Length: +5\r\n\r\nhello", 400),
        (b"POST / HTTP/1.1\r\nHost: l\r\nContent-Length: 5,5\r\n\r\nhello", 400),
        (b"POST / HTTP/1.1\r\nHost: l\r\nContent-Length : 5\r\n\r\nhello", 400),
        (b"POST / HTTP/1.1\r\nHost: l\r\nX: y\r\n Content-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nHost: l\r\nHost: m\r\n\r\n", 400),
        (post(b"/p", b"x" * 5001), 413),
        (post_chunked(b"/c", b"x" * 3000, b"x" * 2001), 413),
        (post_chunked(b"/c", b"abc")[:-5] + b"0x3\r\nabc\r\n", 400),
        (post_chunked(b"/c", b"abc")[:-5] + b"3\r\nabcd\r\n", 400),
        (post_chunked(b"/c", b"abc")[:-5] + b"3;a=\n\r\nabc\r\n", 400),
        (post_chunked(b"/c")[:-2] + b"bad trailer\r\n\r\n", 400),
        (b"GET /" + b"a" * 400 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
        (b"GET /" + b"a" * 401, 431),  # before its end
    ],
)
def test_bad_framing_is_refused(data: bytes, status: int) -> None:
    assert parse(data)[-1] == ("refused", status)


@pytest.mark.parametrize("data", [GET[:-1], post(b"/p", b"abc")[:-1], post_chunked(b"/c", b"abc")[:-1]])
def test_part_of_a_request_is_no_request(data: bytes) -> None:
    assert not [event for event in parse(data) if event[0] in ("request", "refused")]


def test_smuggled_request_in_a_body_stays_a_body() -> None:
    events = parse(post(b"/p", GET) + GET)
    assert [event[1:] for event in events if event[0] == "request"] == [("/p", GET), ("/v2", b"")]
