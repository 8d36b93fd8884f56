"""Clients over gRPC that say nothing, go on too slowly, read nothing or send garbage."""

import contextlib
import random
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.grpc_parts import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    STREAM,
    WINDOW_UPDATE,
    connecting,
    frame,
    grpc_path,
    grpc_port,
    head_fields,
    hpack,
    infer_message,
    running_grpc,
    setting,
    word,
    wrap,
)
from tests.service.service_parts import Running, Y
from tests.waiting import wait_for

from edgekit_runtime.service.options.http import HttpLimits

LONG = np.ones((40_000, 4), np.float32)


@pytest.fixture(scope="module")
def service(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_grpc(maker, tmp_path_factory.mktemp("h")) as service:
        yield service


@pytest.fixture(scope="module")
def hasty(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that waits for nobody: a tick is half a second."""
    limits = HttpLimits(read_timeout_s=0.1, idle_timeout_s=0.1)
    with running_grpc(maker, tmp_path_factory.mktemp("q"), http=limits, grpc={"port": 0}) as service:
        yield service


def assert_sound(service: Running) -> None:
    """Check that the service answers, and holds nothing for clients that have gone."""
    with connecting(grpc_path(service)) as client:
        assert client.ask(infer_message()).array().tobytes() == Y
    http = service.service.http
    for _ in range(1000):
        if not service.call(lambda: http.connection_count):
            break
    assert service.call(lambda: (http.connection_count, http.receiving_bytes, http.sending_bytes)) == (
        0,
        0,
        0,
    )


# Too slow


def test_tcp_client_that_says_nothing_is_closed(hasty: Running) -> None:
    with socket.create_connection(("127.0.0.1", grpc_port(hasty)), 60) as connected:
        while connected.recv(1000):
            pass
    assert_sound(hasty)


@pytest.mark.parametrize(
    "data",
    [
        PREFACE[:10],
        PREFACE + frame(SETTINGS)[:5],
        PREFACE + frame(SETTINGS) + frame(HEADERS, 0, 1, b"\x83"),
        PREFACE
        + frame(SETTINGS)
        + frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode(head_fields()))
        + frame(DATA, 0, 1, b"\0\0\0\1\0abc"),
    ],
)
def test_client_that_stops_in_the_middle_is_closed_with_the_reason(hasty: Running, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(60)
        connected.connect(grpc_path(hasty))
        connected.sendall(data)
        received = b""
        while piece := connected.recv(1000):
            received += piece
        assert b"too slow" in received
    assert_sound(hasty)


def test_client_that_opens_no_window_is_closed(hasty: Running) -> None:
    with connecting(grpc_path(hasty), setting(INITIAL_WINDOW_SIZE, 0)) as client:
        client.post(infer_message(LONG))
        assert client.wait_for_goaway() == (ENHANCE_YOUR_CALM, "too slow: what has begun does not go on")
        assert client.is_closed()
    assert_sound(hasty)


def test_client_that_does_not_read_is_closed(hasty: Running) -> None:
    http = hasty.service.http
    with connecting(grpc_path(hasty)) as client:
        client.send(frame(WINDOW_UPDATE, 0, 0, word(1 << 30)))
        for _ in range(8):
            client.post(infer_message(LONG))
        wait_for(lambda: not hasty.call(lambda: http.connection_count), "the connection to end")
        assert client.is_closed()
    assert_sound(hasty)


def test_idle_connection_is_told_that_it_ends(hasty: Running) -> None:
    with connecting(grpc_path(hasty)) as client:
        assert client.ask(infer_message()).status == 0
        assert client.wait_for_goaway()[0] == 0
        assert client.is_closed()
    assert_sound(hasty)


def test_idle_stream_stays_open_as_long_as_its_client_lives(hasty: Running) -> None:
    with connecting(grpc_path(hasty)) as client:
        stream = client.begin(STREAM)
        for _ in range(2):
            pings = len(client.pongs)
            while len(client.pongs) == pings:  # here: the PING of the service
                assert client.read()
            client.send(frame(PING, 1, 0, client.pongs[-1]))
        client.send(frame(DATA, END_STREAM, stream, wrap(infer_message())))
        assert client.wait(stream).status == 0
        silent = client.begin(STREAM)
        assert client.is_closed()
        assert client.reply(silent).status == 14
    assert_sound(hasty)


# Too much


@pytest.mark.parametrize(
    "frames",
    [
        [frame(PING, 0, 0, bytes(8))] * 5000,
        [frame(SETTINGS)] * 5000,
        [frame(HEADERS, 0, 1, b"\x83"), *[frame(CONTINUATION, 0, 1, b"")] * 1000],
        [frame(HEADERS, 0, 1, b"\x83"), *[frame(CONTINUATION, 0, 1, b"\x83" * 16_000)] * 100],
        [frame(HEADERS, END_HEADERS, 1, b"\x40\x01x\x7f\xd9\x1d" + bytes(3900) + b"\xbe" * 4000)],
        [frame(HEADERS, END_HEADERS, 1, b"\x00\x01a\x00" * 4000)],
    ],
)
def test_flood_ends_with_the_reason(service: Running, frames: list[bytes]) -> None:
    with connecting(grpc_path(service)) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.send(*frames)
        assert client.wait_for_goaway()[0] == ENHANCE_YOUR_CALM
        assert client.is_closed()
    assert_sound(service)


def test_rapid_resets_end_with_the_reason(service: Running) -> None:
    with connecting(grpc_path(service)) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(2000):
                stream = client.begin()
                client.send(frame(RST_STREAM, 0, stream, word(8)))
        assert client.wait_for_goaway()[0] == ENHANCE_YOUR_CALM
    assert_sound(service)


def test_messages_and_streams_that_never_end_take_no_more_than_the_limit(
    maker: PackageMaker, tmp_path: Path
) -> None:
    limits = HttpLimits(max_receiving_bytes=1 << 20)
    with running_grpc(maker, tmp_path, http=limits) as service:
        with connecting(grpc_path(service)) as client:
            streams = [client.begin() for _ in range(20)]
            for stream in streams:
                client.send(*(frame(DATA, 0, stream, p) for p in (b"\0" + word(1 << 20), bytes(100_000))))
            client.send(frame(PING, 0, 0, bytes(8)))
            while not client.pongs:
                client.read()
            refused = [stream for stream in streams if client.reply(stream).fields.get("grpc-status") == "14"]
            assert 5 <= len(refused) <= 15
        with connecting(grpc_path(service)) as client:
            for _ in range(20):  # whole messages, of streams that do not end
                client.send(frame(DATA, 0, client.begin(), wrap(bytes(100_000))))
            client.send(frame(PING, 0, 0, bytes(8)))
            while not client.pongs:
                client.read()
            assert sum("grpc-status" in reply.fields for reply in client.replies.values()) >= 5
        assert_sound(service)


# Garbage


def record_conversation() -> bytes:
    """Return what a client sends that infers, streams and cancels."""
    encoder = hpack.Encoder()
    parts = [PREFACE, frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 1 << 20))]
    for stream in (1, 3, 5):
        parts.append(frame(HEADERS, END_HEADERS, stream, encoder.encode(head_fields())))
        parts.append(frame(DATA, END_STREAM, stream, wrap(infer_message(np.ones((stream, 4), np.float32)))))
    parts.append(frame(HEADERS, END_HEADERS, 7, encoder.encode(head_fields(STREAM, grpc_timeout="5S"))))
    parts += [frame(DATA, 0, 7, wrap(infer_message())), frame(DATA, END_STREAM, 7, wrap(infer_message()))]
    parts += [frame(HEADERS, END_HEADERS, 9, encoder.encode(head_fields())), frame(RST_STREAM, 0, 9, word(8))]
    return b"".join(parts)


def mutate(data: bytes, draws: random.Random) -> bytes:
    """Return `data` with some bytes changed, cut out or repeated."""
    mutated = bytearray(data)
    for _ in range(draws.randint(1, 6)):
        at = draws.randrange(len(mutated))
        length = draws.choice((1, 1, 1, 4, 9, 30))
        change = draws.randrange(4)
        if change == 0:
            mutated[at] = draws.randrange(256)
        elif change == 1:
            del mutated[at : at + length]
        elif change == 2:
            mutated[at:at] = mutated[at : at + length]
        else:
            mutated[at : at + length] = draws.randbytes(length)
    return bytes(mutated)


def test_mutated_conversations_leave_the_service_as_it_was(service: Running) -> None:
    draws, whole = random.Random(0), record_conversation()
    before_kb = 0
    for round_ in range(600):
        data = mutate(whole, draws)
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(60)
            connected.connect(grpc_path(service))
            at = draws.randrange(len(data))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connected.sendall(data[:at])
                connected.sendall(data[at:])
                connected.shutdown(socket.SHUT_WR)
                while connected.recv(65_536):
                    pass
        if round_ == 200:
            before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_sound(service)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < 20_000


def test_connections_that_come_and_go_leave_nothing(service: Running) -> None:
    clients: list[Any] = []
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            client = stack.enter_context(connecting(grpc_path(service)))
            client.post(infer_message(LONG))
            clients.append(client)
    assert_sound(service)
