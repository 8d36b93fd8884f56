"""Requests that are made to be misread, and models that answer what nobody expects."""

import collections
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import (
    Array,
    Replies,
    Running,
    X,
    Y,
    ask,
    get_bytes,
    infer_bytes,
    post_bytes,
    running_linear,
)

from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.options.http import HttpLimits
from edgekit_runtime.service.serving import loader


@pytest.mark.parametrize("shape", ["[1, 4.0]", "[1.0, 4]", "[true, 4]", "[1, 4e0]", "[1, 4, []]", '["1", 4]'])
@pytest.mark.parametrize("how", ["binary", "json"])
def test_size_that_is_no_integer_is_refused(linear: Running, shape: str, how: str) -> None:
    values = '"data": [1, 2, 3, 4]' if how == "json" else '"parameters": {"binary_data_size": 16}'
    text = f'{{"inputs": [{{"name": "x", "datatype": "FP32", "shape": {shape}, {values}}}]}}'.encode()
    data = b"" if how == "json" else X.tobytes()
    reply = ask(
        linear,
        post_bytes(
            "/v2/models/linear/infer", text + data, f"Inference-Header-Content-Length: {len(text)}\r\n"
        ),
    )
    assert (reply.status, "shape" in reply.json["error"]) == (400, True)


@pytest.mark.parametrize("value", ["1e400", "-1e400", "1e39", "1" + "0" * 400, "1" + "0" * 5000, "NaN"])
def test_number_out_of_range_is_refused(linear: Running, value: str) -> None:
    entry = f'{{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, {value}]}}'
    reply = ask(linear, post_bytes("/v2/models/linear/infer", f'{{"inputs": [{entry}]}}'.encode()))
    assert reply.status == 400, reply.body


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/linear/load",
        "/v2/repository/models/linear/unload",
        "/v2/systemsharedmemory/region/r/register",
    ],
)
def test_long_json_of_other_requests_is_refused_unread(linear: Running, path: str) -> None:
    bomb = b'{"ready": [' + b"{}," * 4_000_000 + b"1]}"
    began_s = time.process_time()
    assert ask(linear, post_bytes(path, bomb)).status == 413
    assert time.process_time() - began_s < 1.0  # reading it takes seconds
    assert ask(linear, infer_bytes(X)).binary == Y


def test_long_json_of_an_inference_is_refused_with_the_way_out(linear: Running) -> None:
    text = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [70_000, 4], "data": []}]})
    reply = ask(linear, post_bytes("/v2/models/linear/infer", text.ljust((2 << 20) + 1).encode()))
    assert reply.status == 413
    assert "binary_data_size" in reply.json["error"]


def test_pipelining_client_leaves_turns_to_others(linear: Running) -> None:
    """One connection's requests are not answered all in one turn of the loop."""
    http, answered, now = linear.service.http, collections.Counter[int](), [0]

    def turn() -> None:
        now[0] += 1
        if http.handle_request is count:
            http.loop.call_soon(turn)

    def count(connection: Connection, _head: Any, _body: Any) -> None:
        answered[now[0]] += 1
        connection.respond(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    handle = http.handle_request
    try:
        linear.call(lambda: setattr(http, "handle_request", count))
        linear.call(lambda: http.loop.call_soon(turn))
        with linear.connect() as greedy:
            greedy.sendall(get_bytes("/any") * 1000)
            replies = Replies(greedy)
            for _ in range(1000):
                assert replies.next().status == 200
        assert answered.total() == 1000
        assert max(answered.values()) <= 64
    finally:
        linear.call(lambda: setattr(http, "handle_request", handle))


def test_lack_of_memory_for_a_body_is_answered_and_ends_the_connection(
    linear: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what comes next, the body, would be read as requests."""
    from edgekit_runtime.service.http import request_body

    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(request_body, "allocate_aligned", fail)
    body = get_bytes("/v2/health/live") * 1000
    with linear.connect() as client:
        head = f"POST /v2/models/linear/infer HTTP/1.1\r\nHost: l\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode())
        replies = Replies(client)
        reply = replies.next()
        assert (reply.status, reply.fields["retry-after"]) == (503, "1")
        with contextlib.suppress(OSError):
            client.sendall(body)
        assert replies.is_closed()
    monkeypatch.undo()
    assert linear.call(lambda: linear.service.http.receiving_bytes) == 0
    assert ask(linear, infer_bytes(np.ones((9000, 4), np.float32))).status == 200


# Models


class Odd:
    """A session of `linear` whose answers come from `answer`."""

    is_concurrent = True

    def __init__(self, session: Any, odd: "Oddity") -> None:
        self._session, self._odd = session, odd
        self.inputs, self.outputs = session.inputs, session.outputs

    def run(self, inputs: Mapping[str, Array]) -> Any:
        if self._odd.answer is None:
            return self._session.run(inputs)
        return self._odd.answer()

    def close(self) -> None:
        self._session.close()


class Oddity:
    answer: Callable[[], Any] | None = None


@pytest.fixture(scope="module")
def odd(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Oddity]]:
    oddity, opened = Oddity(), loader.open_preferred

    def open_odd(*args: Any, **options: Any) -> Any:
        variant, session = opened(*args, **options)
        return variant, Odd(session, oddity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "open_preferred", open_odd)
        limits = HttpLimits(idle_timeout_s=1.0)
        with running_linear(maker, tmp_path_factory.mktemp("odd"), http=limits) as service:
            yield service, oddity


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("asks_binary", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        dict,
        lambda: None,
        lambda: {"y": [1, 2]},
        lambda: {"y": np.array(["a"], object)},
        lambda: {"y": np.array([1j])},
        lambda: {"y": np.array(["a"])},
        lambda: {"z": X @ WEIGHT},
        lambda: fail(ValueError("odd")),
        lambda: fail(MemoryError()),
        lambda: fail(RecursionError()),
    ],
    ids=["empty", "none", "list", "objects", "complex", "strings", "other", "value", "memory", "recursion"],
)
def test_odd_answer_of_a_session_is_an_error_and_not_a_silence(
    odd: tuple[Running, Oddity], answer: Callable[[], Any], asks_binary: bool
) -> None:
    service, oddity = odd
    try:
        oddity.answer = answer
        with service.connect() as client:
            client.sendall(infer_bytes(X, parameters={"binary_data_output": asks_binary}))
            replies = Replies(client)
            assert replies.next().status == 500
            oddity.answer = None
            client.sendall(infer_bytes(X))
            assert replies.next().binary == Y
    finally:
        oddity.answer = None


@pytest.mark.parametrize("count", [3, 100])
def test_requests_sent_ahead_of_a_half_close_are_all_answered(
    odd: tuple[Running, Oddity], count: int
) -> None:
    service, _ = odd
    with service.connect() as client:
        client.sendall(infer_bytes(X) * count + b"POST /cut")
        client.shutdown(socket.SHUT_WR)
        replies = Replies(client)
        for _ in range(count):
            assert replies.next().binary == Y
        assert replies.is_closed()


def test_empty_output_behind_a_large_one_does_not_keep_the_loop_busy(odd: tuple[Running, Oddity]) -> None:
    service, _ = odd
    large = np.ones((500_000, 2), np.float32)
    empty = np.zeros((0, 2), np.float32)

    def answer(connection: Connection) -> None:
        connection.respond(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n", large, empty)

    handle = service.service.http.handle_request
    try:
        service.call(lambda: setattr(service.service.http, "handle_request", lambda c, _h, _b: answer(c)))
        with service.connect() as client:
            client.sendall(get_bytes("/any") * 2)
            replies = Replies(client)
            time.sleep(0.2)
            assert len(replies.next().body) == 4_000_000
            assert len(replies.next().body) == 4_000_000
    finally:
        service.call(lambda: setattr(service.service.http, "handle_request", handle))


def test_answer_of_very_many_parts_arrives(odd: tuple[Running, Oddity]) -> None:
    service, _ = odd
    parts = [np.full(3, number % 256, np.uint8) for number in range(3000)]
    handle = service.service.http.handle_request
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n"
    try:
        service.call(
            lambda: setattr(service.service.http, "handle_request", lambda c, _h, _b: c.respond(head, *parts))
        )
        reply = ask(service, get_bytes("/any"))
        assert reply.body == b"".join(part.tobytes() for part in parts)
    finally:
        service.call(lambda: setattr(service.service.http, "handle_request", handle))


def test_connection_whose_request_took_long_still_times_out_when_idle(
    odd: tuple[Running, Oddity],
) -> None:
    service, oddity = odd
    try:
        with service.connect() as client:
            replies = Replies(client)
            held: list[Any] = []
            kind = type(service.service.registry.models.find("linear", None).lane)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kind, "attempt", lambda _lane, _inputs: None)
                patch.setattr(kind, "submit", lambda _lane, one: held.append(one))
                client.sendall(infer_bytes(X))
                time.sleep(4)  # longer than the wheel needs to look at it while it is busy
                service.call(lambda: held[0].reply({"y": X @ WEIGHT}))
                assert replies.next().status == 200
            client.settimeout(8)
            assert client.recv(1) == b""
    finally:
        oddity.answer = None


def test_page_of_a_rebound_name_reads_nothing(linear: Running) -> None:
    """A GET to the page's own origin has no Origin header; only the name in Host tells."""

    def status(host: str) -> int:
        with linear.connect_tcp() as client:
            client.sendall(f"GET /v2 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            return Replies(client).next().status

    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        assert status(host) == 403, host
    for host in ("localhost", "LocalHost:8000", "127.0.0.1:80", "[::1]:8000", "10.1.2.3", "api.localhost:1"):
        assert status(host) == 200, host
    assert ask(linear, b"GET /v2 HTTP/1.1\r\nHost: anything.example\r\n\r\n").status == 200


def test_host_of_the_target_counts_whatever_the_header_says(linear: Running) -> None:
    for named, stated, status in (("evil.example", "localhost", 403), ("localhost", "evil.example", 200)):
        with linear.connect_tcp() as client:
            client.sendall(f"GET http://{named}:1/v2 HTTP/1.1\r\nHost: {stated}\r\n\r\n".encode())
            assert Replies(client).next().status == status


def test_body_with_lies_about_its_json_is_refused(linear: Running) -> None:
    data = json.dumps({"inputs": []}).encode()
    for count in ("0", "1", "13", "14", "15", str(2**62), "999999999999999999"):
        fields = f"Inference-Header-Content-Length: {count}\r\n"
        assert ask(linear, post_bytes("/v2/models/linear/infer", data, fields)).status in (400, 413)
