"""Time limits of requests and connections hold for the whole, not for each of its steps."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.offload.session.hostile_server import http

from edgekit_runtime.client import Client
from edgekit_runtime.client.link import Address, open_connection
from edgekit_runtime.errors import TransportError
from edgekit_runtime.offload.offload_server import OffloadServer, make_tail_request


@contextlib.contextmanager
def answering(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listen, and let `behave` do with all connections what it does; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # so that little waits there

        def serve() -> None:
            with contextlib.suppress(OSError):
                behave(listener)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(30)


@contextlib.contextmanager
def silent_place() -> Iterator[tuple[str, int]]:
    """An address that drops each further request for a connection."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()


def name_places(monkeypatch: pytest.MonkeyPatch, *places: tuple[str, int]) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place) for place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_name_server_that_does_not_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def wait(*_: object, **__: object) -> list[object]:
        over.wait(10)
        raise OSError("answered in the end")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    with pytest.raises(TransportError, match="no name server answers"):
        open_connection(Address.parse("https://edge-box:8443"), 0.2)
    over.set()


def test_all_addresses_of_a_name_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_place() as place:
        name_places(monkeypatch, *[place] * 200)
        begin_s = time.monotonic()
        with pytest.raises(TransportError, match="timed out"):
            open_connection(Address.parse("https://edge-box:8443"), 0.5)
        assert time.monotonic() - begin_s < 60  # 100 s, if each had all of it


def test_address_behind_one_that_is_silent_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_place() as place, socket.create_server(("127.0.0.1", 0)) as listener:
        name_places(monkeypatch, place, listener.getsockname())
        open_connection(Address.parse("edge-box:8443", insecure=True), 1.0).close()


def test_server_that_reads_slowly_ends_a_request_in_time() -> None:
    received = []

    def read_slowly(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1 << 15):
                received.append(len(data))
                time.sleep(0.01)

    size_bytes = 16 << 20
    with answering(read_slowly) as port, Client(f"127.0.0.1:{port}", timeout_s=0.5) as client:
        with pytest.raises(TransportError, match="no answer within"):
            client.infer("m", {"x": np.zeros(size_bytes, np.uint8)})
        client.close()
    assert sum(received) < size_bytes / 2


@pytest.mark.parametrize("way", ["client", "device"])
def test_second_try_has_the_time_that_is_left(way: str) -> None:
    """The server closes a connection that was idle late, and keeps silent on the next."""
    is_over = threading.Event()

    def behave(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            for _ in range(3):
                connection.recv(1 << 16)
                connection.sendall(http(b"{}"))
            connection.recv(1 << 16)
            time.sleep(0.5)
        connection, _ = listener.accept()
        with connection:
            is_over.wait(30)

    with answering(behave) as port:
        if way == "client":
            with Client(f"127.0.0.1:{port}", timeout_s=1.0) as client:
                for _ in range(3):
                    client.metadata()
                with pytest.raises(TransportError) as caught:
                    client.metadata()
                message = str(caught.value)
        else:
            server = OffloadServer(Address.parse(f"127.0.0.1:{port}"))
            request = make_tail_request("m", {"x": np.zeros(4, np.uint8)}, (), "identity", server.fields)
            server.measure_round_trip(1.0)
            pending = server.send(request, 1.0, lambda *_: None)
            assert pending.done.wait(20)
            assert pending.reply is not None
            message = str(pending.reply.error)
            server.close()
        is_over.set()
    assert "no answer within 0." in message
