"""What has become of a request that may lose against the local run, and how it is ended."""

import socket
import threading

import numpy as np
import pytest
from tests.offload.session.hostile_server import http
from tests.offload.session.offload_parts import wait_until

from edgekit_runtime.client.link import Address, Link
from edgekit_runtime.offload.offload_server import OffloadServer, make_tail_request


def test_aborted_request_drops_what_is_not_sent_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        server = OffloadServer(Address(host="127.0.0.1", port=listener.getsockname()[1]))
        body = np.zeros(16 << 20, np.uint8)  # more than the buffers of both sockets hold
        request = make_tail_request("m", {"x": body}, (), "identity", server.fields)
        replies = []
        pending = server.send(request, 20.0, lambda _, reply: replies.append(reply))
        client, _ = listener.accept()
        with client:
            client.settimeout(20)
            received = len(client.recv(1 << 16))  # the request is under way
            assert not pending.is_sent
            pending.abort()
            assert pending.done.wait(20)
            try:
                while found := client.recv(1 << 20):
                    received += len(found)
            except ConnectionResetError:
                pass  # the connection was reset, with what lay in the buffers
            assert received < request.size_bytes
        assert replies[0].outputs is None
        assert replies[0].is_cut_off
        server.close()


def test_interrupt_ends_all_requests() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = OffloadServer(Address(host="127.0.0.1", port=listener.getsockname()[1]))
        request = make_tail_request("m", {"x": np.zeros(4, np.uint8)}, (), "identity", server.fields)
        pending = server.send(request, 20.0, lambda *_: None)
        client, _ = listener.accept()
        with client:
            client.recv(1 << 16)
            server.interrupt()
            assert pending.done.wait(10)
        assert pending.reply is not None
        assert pending.reply.error is not None
        server.close()


def test_request_on_a_new_connection_is_measured_from_its_first_byte() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        server = OffloadServer(Address(host="127.0.0.1", port=listener.getsockname()[1]))
        body = np.zeros(16 << 20, np.uint8)
        request = make_tail_request("m", {"x": body}, (), "identity", server.fields)
        first = server.send(request, 20.0, lambda *_: None)
        client, _ = listener.accept()
        with client:
            client.settimeout(20)
            rest = request.size_bytes
            while rest:
                rest -= len(client.recv(1 << 20))
            client.sendall(http(b"{}", "404 Not Found"))
            assert first.done.wait(20)
            assert server.find_connect_s() == 0
        assert server.find_connect_s() > 0  # the server has closed the idle connection
        second = server.send(request, 20.0, lambda *_: None)
        client, _ = listener.accept()
        with client:
            client.settimeout(20)
            assert len(client.recv(1 << 16)) > 0
            wait_until(lambda: (second.sent_bytes or 0) > 1 << 16, "its bytes are not counted")
            assert not second.is_sent
            second.abort()
            assert second.done.wait(20)
        assert second.reply is not None
        assert second.reply.exchange.upload_bytes > 1 << 16
        server.close()


def test_request_that_is_ended_while_it_connects_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on, connect = threading.Event(), threading.Event(), Link.connect

    def connect_slowly(self: Link, timeout_s: float) -> None:
        began.set()
        goes_on.wait(20)
        connect(self, timeout_s)

    monkeypatch.setattr(Link, "connect", connect_slowly)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = OffloadServer(Address(host="127.0.0.1", port=listener.getsockname()[1]))
        request = make_tail_request("m", {"x": np.zeros(4, np.uint8)}, (), "identity", server.fields)
        pending = server.send(request, 20.0, lambda *_: None)
        assert began.wait(20)
        assert not pending.is_sent
        pending.abort()
        goes_on.set()
        assert pending.done.wait(20)
        server.close()
        client, _ = listener.accept()
        with client:
            client.settimeout(20)
            assert client.recv(1 << 16) == b""
    assert pending.reply is not None
    assert pending.reply.is_cut_off
    assert pending.reply.exchange.elapsed_s == 0  # says nothing of the link
