"""A request that lost against the local run is ended, also what is not sent of it yet."""

import socket

import numpy as np

from edgekit_runtime.client.link import Address
from edgekit_runtime.remote.offload_server import OffloadServer, make_tail_request


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
