"""Fuzzing of what takes HTTP apart: heads, chunks, and requests in pieces."""

from typing import Any

import httptools
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.conftest import WEIGHT
from tests.service.service_parts import Replies, Running, get_bytes, infer_bytes

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.http.request_body import ChunkedBody
from edgekit_runtime.service.http.request_head import HeadCache

NASTY = st.sampled_from(
    [b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b"Content-Length: 5", b"Transfer-Encoding: chunked",
     b"GET / HTTP/1.1", b"Host: l", b"chunked", b"0", b";", b"\xff", b"Connection: close"]
)  # fmt: skip


@settings(max_examples=5 * settings().max_examples)  # 500 in the long run
@given(st.lists(NASTY | st.binary(max_size=4), max_size=20))
def test_any_head_is_understood_or_refused(parts: list[bytes]) -> None:
    data = b"GET /v2 HTTP/1.1\r\nHost: l\r\n" + b"".join(parts) + b"\r\n\r\n"
    data = data[: data.index(b"\r\n\r\n") + 4]
    try:
        head = HeadCache().parse(data)
    except RequestError as error:
        assert 400 <= error.status < 600
    else:
        assert head.body_bytes is None or head.body_bytes >= 0


class Llhttp:
    """What llhttp makes of a chunked body: the other reader, with which ours must agree."""

    def __init__(self) -> None:
        self.body = b""
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


def read_with_llhttp(data: bytes) -> Llhttp | None:
    found = Llhttp()
    parser = httptools.HttpRequestParser(found)
    parser.feed_data(b"POST / HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: chunked\r\n\r\n")
    try:
        parser.feed_data(data)
    except httptools.HttpParserError:
        return None
    return found


CHUNK = st.binary(min_size=1, max_size=40).map(lambda data: b"%x\r\n%s\r\n" % (len(data), data))
PIECE = st.sampled_from(
    [b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"5;a=b\r\nabcde\r\n", b"\r\n", b"\n", b"3\r\nab", b"-", b" "]
)


@settings(max_examples=5 * settings().max_examples)  # 500 in the long run
@given(st.lists(CHUNK | PIECE, max_size=6), st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_chunks_are_read_as_llhttp_reads_them_or_refused(parts: list[bytes], sizes: list[int]) -> None:
    data = b"".join(parts)
    body = ChunkedBody(10_000)
    rest = b""
    at = 0
    try:
        for size in sizes * (len(data) + 1):
            if at >= len(data) or body.is_whole:
                break
            rest = body.receive_data(rest + data[at : at + size])
            at += size
    except RequestError:
        return
    if not body.is_whole:
        return
    consumed = data[: min(at, len(data)) - len(rest)]
    other = read_with_llhttp(consumed)
    assert other is not None
    assert other.is_complete
    assert other.body == bytes(body.data)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.lists(st.integers(1, 50), min_size=1, max_size=4),
)
def test_requests_in_any_pieces_get_the_same_answers(
    linear: Running, sizes: list[int], rows: list[int]
) -> None:
    batches: list[Any] = [np.full((count, 4), count, np.float32) for count in rows]
    data = b"".join(infer_bytes(x) + get_bytes("/v2/health/live") for x in batches)
    with linear.connect() as client:
        at = 0
        for size in sizes:
            client.sendall(data[at : at + size])
            at += size
        client.sendall(data[at:])
        replies = Replies(client)
        for x in batches:
            assert replies.next().binary == (x @ WEIGHT).tobytes()
            assert replies.next().json == {"live": True}
