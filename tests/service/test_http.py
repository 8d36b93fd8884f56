"""The HTTP layer over real sockets: order, framing, limits, time-outs, and clients that misbehave."""

import contextlib
import email.utils
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import (
    Replies,
    Reply,
    Running,
    X,
    Y,
    ask,
    get_bytes,
    infer_bytes,
    post_bytes,
    running_linear,
)
from tests.toolkit.cases import cases
from tests.waiting import wait_for

from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import HeadCache
from edgekit_runtime.service.options.http import HttpLimits


def assert_dated(reply: Reply) -> None:
    date = email.utils.parsedate_to_datetime(reply.fields["date"])
    assert reply.fields["date"].endswith(" GMT")
    assert abs(date.timestamp() - time.time()) < 60


def assert_serves(service: Running) -> None:
    """Nothing that a test did disturbs others."""
    assert ask(service, infer_bytes(X)).binary == Y


def test_pipelined_requests_are_answered_in_order(linear: Running) -> None:
    inputs = [np.full((1, 4), number, np.float32) for number in range(200)]
    with linear.connect() as client:
        client.sendall(b"".join(infer_bytes(x) for x in inputs))
        replies = Replies(client)
        for x in inputs:
            assert replies.next().binary == (x @ WEIGHT).tobytes()


def test_request_in_single_bytes_is_answered(linear: Running) -> None:
    with linear.connect() as client:
        for byte in infer_bytes(X):
            client.sendall(bytes([byte]))
        assert Replies(client).next().binary == Y


def test_empty_line_before_a_request_is_skipped(linear: Running) -> None:
    with linear.connect() as client:
        replies = Replies(client)
        for _ in range(2):
            client.sendall(b"\r\n" + infer_bytes(X))
            assert replies.next().binary == Y


def chunk(data: bytes, *sizes: int) -> bytes:
    parts, at = [], 0
    for size in sizes:
        parts.append(f"{size:x};why=not\r\n".encode() + data[at : at + size] + b"\r\n")
        at += size
    rest = data[at:]
    return b"".join(parts) + f"{len(rest):X}\r\n".encode() + rest + b"\r\n0\r\nTrailer: x\r\n\r\n"


def chunked_request() -> bytes:
    head, _, body = infer_bytes(X).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", b""]) + chunk(body, 1, 7, 30)


def test_every_answer_has_its_date(linear: Running) -> None:
    asked = [
        *(infer_bytes(X), infer_bytes(X), get_bytes("/v2"), get_bytes("/metrics"), get_bytes("/v2", "HEAD")),
        *(get_bytes("/nothing"), post_bytes("/v2", b""), post_bytes("/v2/repository/index", b"")),
        *(infer_bytes(X[:, :3].copy()), post_bytes("/v2/models/linear/infer", b"{")),
        *(get_bytes("/v2", fields="Connection: close\r\n"), b"GET /v2 HTTP/1.0\r\n\r\n", b"GET /v2\r\n\r\n"),
    ]
    for request in asked:
        with linear.connect() as client:
            client.sendall(request)
            assert_dated(Replies(client).next(has_body=not request.startswith(b"HEAD")))


@pytest.mark.parametrize("piece", [1, 3, 10_000])
def test_chunked_body_is_put_together_and_the_next_request_found(linear: Running, piece: int) -> None:
    data = chunked_request() + infer_bytes(X)
    with linear.connect() as client:
        for at in range(0, len(data), piece):
            client.sendall(data[at : at + piece])
        replies = Replies(client)
        assert replies.next().binary == Y
        assert replies.next().binary == Y


def test_client_that_expects_100_gets_it_before_the_body(linear: Running) -> None:
    head, _, body = infer_bytes(X, fields="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with linear.connect() as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert Replies(client).next().binary == Y


def test_head_request_gets_no_body(linear: Running) -> None:
    with linear.connect() as client:
        client.sendall(get_bytes("/v2", "HEAD") + get_bytes("/v2"))
        replies = Replies(client)
        announced = replies.next(has_body=False).fields["content-length"]
        assert int(announced) == len(replies.next().body)


@pytest.mark.parametrize(
    ("version", "fields", "stays"),
    [
        ("1.0", "", False),
        ("1.0", "Connection: keep-alive\r\n", True),
        ("1.1", "Connection: close\r\n", False),
    ],
)
def test_connection_stays_open_only_as_the_client_asked(
    linear: Running, version: str, fields: str, stays: bool
) -> None:
    with linear.connect() as client:
        client.sendall(f"GET /v2 HTTP/{version}\r\nHost: l\r\n{fields}\r\n".encode())
        replies = Replies(client)
        reply = replies.next()
        assert reply.fields["connection"] == ("keep-alive" if stays else "close")
        if stays:
            client.sendall(get_bytes("/v2"))
            assert replies.next().status == 200
        else:
            assert replies.is_closed()


def test_client_that_closed_its_half_still_gets_the_answer(linear: Running) -> None:
    with linear.connect() as client:
        client.sendall(infer_bytes(X))
        client.shutdown(socket.SHUT_WR)
        replies = Replies(client)
        assert replies.next().binary == Y
        assert replies.is_closed()


UPGRADE = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
)
SMUGGLED = [
    ("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
    ("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
    ("Content-Length: 3\r\nContent-Length: 3\r\n", 400),
    ("Content-Length: 3\r\nContent-Length: 4\r\n", 400),
    ("Content-Length: 3, 3\r\n", 400),
    ("Content-Length: +3\r\n", 400),
    ("Content-Length: -3\r\n", 400),
    ("Content-Length: 0x3\r\n", 400),
    ("Content-Length: 3 \x0b\r\n", 400),
    ("Content-Length: 99999999999999999999999\r\n", 400),
    ("Content-Length : 3\r\n", 400),
    (" Content-Length: 3\r\n", 400),
    ("X: y\n Content-Length: 3\r\n", 400),
    ("Transfer-Encoding: gzip\r\n", 501),
    ("Transfer-Encoding: chunked, chunked\r\n", 501),
    ("Transfer-Encoding: xchunked\r\n", 501),
    ("Transfer-Encoding: gzip, chunked\r\n", 501),
    ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
    ("Transfer-Encoding:\x0bchunked\r\n", 400),
    ("Inference-Header-Content-Length: 1\r\nInference-Header-Content-Length: 2\r\n", 400),
    ("Host: other\r\n", 400),
    (f"{UPGRADE}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
    (f"{UPGRADE}Content-Length: 3\r\nContent-Length: 4\r\n", 400),
    (f"{UPGRADE}Transfer-Encoding: xchunked\r\n", 501),
    ("Content-Encoding: br\r\n", 415),
    ("Expect: a-miracle\r\n", 417),
    ("A\x00: b\r\n", 400),
    ("A: b\x00c\r\n", 400),
    ("A: b\rC: d\r\n", 400),
]


@cases(("fields", "status"), SMUGGLED)
def test_head_that_leaves_the_length_in_doubt_is_refused_and_the_connection_closed(
    linear: Running, fields: str, status: int
) -> None:
    with linear.connect() as client:
        client.sendall(post_like(fields) + b"0\r\n\r\n" + infer_bytes(X))
        replies = Replies(client)
        reply = replies.next()
        # llhttp and we may find different faults first, but it is refused and nothing behind it is read.
        assert reply.status in (status, 400)
        assert isinstance(reply.json["error"], str)
        assert replies.is_closed()
    assert_serves(linear)


def post_like(fields: str) -> bytes:
    return f"POST /v2/repository/index HTTP/1.1\r\nHost: l\r\n{fields}\r\n".encode("latin-1")


def test_upgrade_that_is_not_granted_leaves_requests_and_their_bodies_as_they_are(linear: Running) -> None:
    """As curl --http2 and Java's client ask for it."""
    chunked = chunked_request().replace(b"Host: l\r\n", b"Host: l\r\n" + UPGRADE.encode())
    websocket = "Upgrade: websocket\r\nConnection: Upgrade\r\n"
    with linear.connect() as client:
        client.sendall(get_bytes("/v2", fields=UPGRADE) + infer_bytes(X, fields=UPGRADE) + chunked)
        client.sendall(infer_bytes(X, fields=websocket) + infer_bytes(X))
        replies = Replies(client)
        assert replies.next().status == 200
        for _ in range(4):
            reply = replies.next()
            assert (reply.status, reply.binary, reply.fields.get("connection")) == (200, Y, None)


@pytest.mark.parametrize(
    "target", ["http://localhost/v2", "HTTP://l:80/v2?a=http://b/c", "https://[::1]:1/v2"]
)
def test_target_that_names_the_host_is_answered(linear: Running, target: str) -> None:
    with linear.connect() as client:
        client.sendall(get_bytes(target) + get_bytes("/v2"))
        replies = Replies(client)
        assert [replies.next().json["name"] for _ in range(2)] == ["edgekit", "edgekit"]
        client.sendall(infer_bytes(X, path="http://localhost/v2/models/linear/infer"))
        assert replies.next().binary == Y
        client.sendall(get_bytes("http://localhost") + get_bytes("http://localhost?/v2"))
        assert [replies.next().status for _ in range(2)] == [404, 404]


@pytest.mark.parametrize("target", ["ftp://l/v2", "http:///v2", "http://user@l/v2", "http://evil@/v2"])
def test_target_of_another_scheme_or_without_a_host_is_refused(linear: Running, target: str) -> None:
    assert ask(linear, get_bytes(target)).status == 400


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /v2 HTTP/1.1\n\n\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: l\n\nGET /v2 HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\nHost: l\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\n\r\n",
        b"CONNECT l:1 HTTP/1.1\r\nHost: l\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_malformed_request_gets_an_error_of_the_protocol(linear: Running, data: bytes) -> None:
    with linear.connect() as client:
        client.sendall(data)
        replies = Replies(client)
        reply = replies.next()
        assert reply.status in (400, 505)
        assert reply.json["error"]
        assert replies.is_closed()
    assert_serves(linear)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"z\r\n", 400),
        (b"-1\r\n", 400),
        (b"1\r\nab\r\n", 400),
        (b"1\nab\r\n", 400),
        (b"ffffffffffffffff\r\n", 400),
        (b"fffffffffff\r\n", 413),
        (b"1;" + b"x" * 300 + b"\r\n", 400),
        (b"0\r\nbad trailer\r\n\r\n", 400),
        (b"0\r\n" + b"a: b\r\n" * 17 + b"\r\n", 400),
    ],
)
def test_malformed_chunks_are_refused(linear: Running, body: bytes, status: int) -> None:
    with linear.connect() as client:
        client.sendall(post_like("Transfer-Encoding: chunked\r\n") + body)
        assert Replies(client).next().status == status
    assert_serves(linear)


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/", 404, None),
        ("GET", "/v2/models/linear/nothing", 404, None),
        ("GET", "/v2/models/linear/versions/1.0.0/infer/more", 404, None),
        ("GET", "/v2/models/linear/infer", 405, "POST"),
        ("POST", "/v2/health/live", 405, "GET, HEAD"),
        ("DELETE", "/v2", 405, "GET, HEAD"),
        ("GET", "/v2/models/other", 404, None),
        ("GET", "/v2/models/linear/versions/9", 404, None),
        ("GET", "/v2/models/%ff%00", 404, None),
    ],
)
def test_wrong_address_or_method_is_said_and_the_connection_stays(
    linear: Running, method: str, path: str, status: int, allowed: str | None
) -> None:
    with linear.connect() as client:
        client.sendall(get_bytes(path, method) + get_bytes("/v2"))
        replies = Replies(client)
        reply = replies.next()
        assert (reply.status, reply.fields.get("allow")) == (status, allowed)
        assert reply.json["error"]
        assert replies.next().status == 200


@pytest.fixture(scope="module")
def strict(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = HttpLimits(
        max_head_bytes=2048,
        max_body_bytes=100_000,
        max_receiving_bytes=150_000,
        max_connections=20,
        idle_timeout_s=1.0,
        read_timeout_s=1.0,
        min_bytes_per_s=1_000_000,
    )
    with running_linear(maker, tmp_path_factory.mktemp("strict"), http=limits) as service:
        yield service


def test_long_head_is_refused(strict: Running) -> None:
    with strict.connect() as client:
        client.sendall(get_bytes("/v2", fields="A: " + "b" * 3000 + "\r\n"))
        assert Replies(client).next().status == 431
    assert_serves(strict)


def test_endless_head_is_refused_before_it_ends(strict: Running) -> None:
    with strict.connect() as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\n" + b"A: b\r\n" * 1000)
        assert Replies(client).next().status == 431


def test_too_many_headers_are_refused(linear: Running) -> None:
    reply = ask(linear, get_bytes("/v2", fields="A: b\r\n" * 150))
    assert reply.status == 431


@pytest.mark.parametrize("fields", ["Content-Length: 100001\r\n", "Content-Length: 999999999999999\r\n"])
def test_large_body_is_refused_before_it_is_sent(strict: Running, fields: str) -> None:
    with strict.connect() as client:
        client.sendall(post_like(fields))
        replies = Replies(client)
        assert replies.next().status == 413
        assert replies.is_closed()


def test_large_body_in_chunks_is_refused(strict: Running) -> None:
    with strict.connect() as client:
        client.sendall(
            post_like("Transfer-Encoding: chunked\r\n") + (b"1000\r\n" + b"a" * 4096 + b"\r\n") * 30
        )
        assert Replies(client).next().status == 413


def test_bodies_that_are_too_large_together_are_turned_away_for_a_while(strict: Running) -> None:
    with strict.connect() as first, strict.connect() as second:
        first.sendall(post_like("Content-Length: 90000\r\n") + b"a" * 80_000)
        wait_for(lambda: strict.call(lambda: strict.service.http.receiving_bytes) >= 80_000, "the first body")
        second.sendall(post_like("Content-Length: 90000\r\n") + b"a" * 80_000)
        reply = Replies(second).next()
        assert (reply.status, reply.fields["retry-after"]) == (503, "1")
    assert_serves(strict)


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /v2 HTT",
        b"GET /v2 HTTP/1.1\r\nHost: l\r\n",
        post_like("Content-Length: 90000\r\n") + b"a",
        post_like("Transfer-Encoding: chunked\r\n") + b"5\r\nab",
    ],
)
def test_request_that_does_not_arrive_in_time_is_given_up(strict: Running, begun: bytes) -> None:
    with strict.connect() as client:
        client.sendall(begun)
        replies = Replies(client)
        assert replies.next().status == 408
        assert replies.is_closed()


def test_trickling_client_is_given_up_too(strict: Running) -> None:
    with strict.connect() as client:
        began_s = time.monotonic()
        with pytest.raises(OSError, match=r"."):  # closed in the middle
            while time.monotonic() - began_s < 15:
                client.sendall(b"G")
                time.sleep(0.05)
            raise AssertionError("still open")


def test_idle_connection_is_closed_without_a_word(strict: Running) -> None:
    with strict.connect() as client:
        client.sendall(get_bytes("/v2"))
        replies = Replies(client)
        assert replies.next().status == 200
        assert replies.is_closed()


def test_connection_beyond_the_limit_gets_503(strict: Running) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(strict.connect()) for _ in range(21)]
        replies = Replies(clients[-1])
        reply = replies.next()
        assert (reply.status, reply.fields["retry-after"]) == (503, "1")
        assert_dated(reply)
        assert replies.is_closed()
        clients[0].sendall(infer_bytes(X))
        assert Replies(clients[0]).next().binary == Y


def test_client_that_does_not_read_is_given_up_and_holds_nobody_up(strict: Running) -> None:
    x = np.ones((6000, 4), np.float32)
    with strict.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        data = infer_bytes(x)
        client.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            for _ in range(100):
                client.sendall(data)
        assert_serves(strict)
        client.settimeout(20)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(1 << 20):
                received += len(data)
        assert received < 100 * len(x) * 8
    assert_serves(strict)


def test_large_answers_to_a_slow_reader_arrive_whole_and_in_order(linear: Running) -> None:
    batches = [np.full((50_000, 4), number, np.float32) for number in range(6)]
    with linear.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        sender = Sender(client, b"".join(map(infer_bytes, batches)))
        replies = Replies(client)
        for x in batches:
            time.sleep(0.05)
            assert replies.next().binary == (x @ WEIGHT).tobytes()
        sender.join()


class Sender:
    def __init__(self, client: socket.socket, data: bytes) -> None:
        import threading

        self._thread = threading.Thread(target=client.sendall, args=(data,))
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)


def test_client_that_vanishes_in_the_middle_leaves_nothing_behind(linear: Running) -> None:
    before = linear.call(lambda: linear.service.http.connection_count)
    for data in (b"GET", post_like("Content-Length: 1000000\r\n") + b"a" * 70_000, infer_bytes(X)):
        for _ in range(20):
            with linear.connect() as client:
                client.sendall(data)
    deadline_s = time.monotonic() + 10
    while linear.call(lambda: linear.service.http.connection_count) > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert linear.call(lambda: linear.service.http.receiving_bytes) == 0
    assert_serves(linear)


def test_request_of_a_web_page_is_refused_over_tcp(linear: Running) -> None:
    with linear.connect_tcp() as client:
        client.sendall(infer_bytes(X, fields="Origin: http://evil.example\r\n"))
        assert Replies(client).next().status == 403


def test_release_and_adopt_lose_no_byte(linear: Running) -> None:
    """A connection that is handed over with requests in its buffer goes on as if nothing had happened."""
    http = linear.service.http
    state: dict[str, Any] = {}

    def screen(connection: Any, head: Any) -> bool:
        if head.path != "/v2/models/linear/infer" or "unread" in state:
            return False
        taken, state["unread"] = connection.release()
        http.loop.call_later(0.1, lambda: Connection(http, taken, is_local=True).resume(state["unread"]))
        return True

    before = http.screen
    linear.call(lambda: setattr(http, "screen", screen))
    linear.call(lambda: setattr(http, "heads", (HeadCache(), HeadCache())))  # none that was cleared before
    try:
        with linear.connect() as client:
            data = get_bytes("/v2") + infer_bytes(X) + get_bytes("/v2/health/live")
            client.sendall(data[:-10])
            time.sleep(0.05)
            client.sendall(data[-10:])
            replies = Replies(client)
            assert replies.next().json["name"] == "edgekit"
            assert replies.next().binary == Y
            assert replies.next().json == {"live": True}
    finally:
        linear.call(lambda: setattr(http, "screen", before))
    assert state["unread"].startswith(b"POST /v2/models/linear/infer")


def test_json_tensors_go_in_and_out(linear: Running) -> None:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X.tolist()}
    reply = ask(
        linear, post_bytes("/v2/models/linear/infer", json.dumps({"id": "7", "inputs": [entry]}).encode())
    )
    assert reply.json == {
        "model_name": "linear",
        "model_version": "1.0.0",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": (X @ WEIGHT)[0].tolist()}],
        "id": "7",
    }


def test_socket_can_be_used_by_its_group_only(linear: Running) -> None:
    assert Path(linear.socket_path).stat().st_mode & 0o777 == 0o660


def test_clients_over_tcp_do_not_lock_out_the_unix_socket_nor_the_other_way_round(
    maker: PackageMaker, tmp_path: Path
) -> None:
    with running_linear(maker, tmp_path, http=HttpLimits(max_connections=8)) as service:
        for crowd, other in (
            (service.connect_tcp, service.connect),
            (service.connect, service.connect_tcp),
        ):
            with contextlib.ExitStack() as stack:
                clients = [stack.enter_context(crowd()) for _ in range(10)]
                for client in clients[:6]:
                    client.sendall(get_bytes("/v2"))
                    assert Replies(client).next().status == 200
                assert [Replies(client).next().status for client in clients[6:]] == [503] * 4
                for _ in range(2):
                    late = stack.enter_context(other())
                    late.sendall(get_bytes("/v2"))
                    assert Replies(late).next().status == 200
                with other() as one_more:
                    assert Replies(one_more).next().status == 503
            wait_for(lambda: service.call(lambda: service.service.http.connection_count) == 0)


def test_all_places_are_for_the_unix_socket_where_nothing_listens_on_tcp(
    maker: PackageMaker, tmp_path: Path
) -> None:
    limits = HttpLimits(max_connections=8)
    with (
        running_linear(maker, tmp_path, http=limits, listen={"host": ""}) as service,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(8):
            client = stack.enter_context(service.connect())
            client.sendall(get_bytes("/v2"))
            assert Replies(client).next().status == 200
        assert Replies(stack.enter_context(service.connect())).next().status == 503
