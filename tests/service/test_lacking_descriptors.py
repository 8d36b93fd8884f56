"""Services and workers that have no descriptor free: who is answered what, and that nothing is lost by it."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from tests.descriptor_parts import without_descriptors
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.region_parts import infer_in, memfd, register
from tests.service.service_parts import Replies, X, Y, ask, get_bytes, infer_bytes, running_linear
from tests.service.worker_parts import (
    OTHER,
    ask_again,
    asking,
    find_model,
    find_pids,
    running_isolated,
    wait_for,
)

LARGE = np.arange(5000, dtype=np.float32).reshape(-1, 4)


def test_connections_are_lent_to_a_busy_worker_by_a_service_without_descriptors(
    maker: PackageMaker, tmp_path: Path
) -> None:
    with running_isolated(maker, tmp_path) as service, contextlib.ExitStack() as stack:
        (pid,) = find_pids(service)
        clients = [stack.enter_context(service.connect()) for _ in range(40)]
        for client in clients:
            client.sendall(get_bytes("/v2/health/live"))
            assert Replies(client).next().status == 200
        os.kill(pid, signal.SIGSTOP)  # so that its channel is full after some 200 KB
        try:
            with without_descriptors(os.getpid()):
                for client in clients:
                    client.sendall(infer_bytes(LARGE))
                model = find_model(service)
                wait_for(lambda: sum(service.call(lambda: [w.lent for w in model.workers])) == 40, "lending")
                os.kill(pid, signal.SIGCONT)
                for client in clients:
                    assert np.array_equal(
                        np.frombuffer(Replies(client).next().binary, np.float32), (LARGE @ WEIGHT).ravel()
                    )
        finally:
            os.kill(pid, signal.SIGCONT)
        assert find_pids(service) == (pid,)


def test_client_that_connects_while_no_descriptor_is_free_is_served_later(
    maker: PackageMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_linear(maker, tmp_path) as service, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        with without_descriptors(os.getpid()):
            client.connect(service.socket_path)
            wait_for(lambda: "cannot accept connections" in caplog.text, "a refusal of the system")
        client.sendall(infer_bytes(X))
        assert Replies(client).next().binary == Y


@pytest.mark.parametrize("tcp", [False, True])
def test_connection_that_a_worker_has_no_descriptor_for_is_answered_503(
    maker: PackageMaker, tmp_path: Path, tcp: bool
) -> None:
    with running_isolated(maker, tmp_path) as service, asking(service, OTHER) as other:
        (pid,) = find_pids(service)
        with service.connect() as before:
            replies = Replies(before)
            before.sendall(infer_bytes(X))
            assert replies.next().binary == Y
            with without_descriptors(pid):
                with service.connect_tcp() if tcp else service.connect() as client:
                    client.sendall(infer_bytes(X))
                    refused = Replies(client)
                    reply = refused.next()
                    assert (reply.status, reply.fields["retry-after"]) == (503, "1")
                    assert "no descriptor free" in reply.json["error"]
                    assert refused.is_closed()
                before.sendall(infer_bytes(X))
                assert replies.next().binary == Y
        assert ask_again(service, infer_bytes(X)).binary == Y
        assert find_pids(service) == (pid,)
        assert service.call(lambda: service.service.http.lent) <= 1
    assert (set(other.statuses), other.ends, other.wrong) == ({200}, 0, 0)


def test_region_that_a_worker_has_no_descriptor_for_is_answered_503_until_it_is_registered_again(
    maker: PackageMaker, tmp_path: Path
) -> None:
    with running_isolated(maker, tmp_path) as service, memfd(16) as memory, service.connect() as client:
        os.write(memory, X.tobytes())
        client.sendall(infer_bytes(X))
        assert Replies(client).next().binary == Y
        with service.connect() as owner:
            with without_descriptors(find_pids(service)[0]):
                assert register(owner, "r", [memory], byte_size=16).status == 200
                client.sendall(infer_in("r"))  # upon which it looks whether there is word of the region
                reply = Replies(client).next()
            assert (reply.status, "register it again" in reply.json["error"]) == (503, True)
        wait_for(lambda: not service.call(lambda: list(service.service._regions)), "the end of the region")
        with service.connect() as owner:
            assert register(owner, "r", [memory], byte_size=16).status == 200
            client.sendall(infer_in("r"))
            assert Replies(client).next().json["outputs"][0]["data"] == (X @ WEIGHT).ravel().tolist()
            assert ask(service, infer_bytes(X)).binary == Y


def test_region_with_letters_beyond_ascii_is_found_by_a_worker(maker: PackageMaker, tmp_path: Path) -> None:
    with running_isolated(maker, tmp_path) as service, memfd(16) as memory, service.connect() as client:
        os.write(memory, X.tobytes())
        assert register(client, "gr%C3%B6%C3%9Fe", [memory], byte_size=16, key="\ud800").status == 200
        client.sendall(infer_in("größe"))
        assert Replies(client).next().json["outputs"][0]["data"] == (X @ WEIGHT).ravel().tolist()
