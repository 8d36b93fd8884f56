"""Clients that attack through shared memory and descriptors."""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import PackageMaker
from tests.service.gates import ON_THREADS, Gate
from tests.service.region_parts import REGION, infer_in, memfd, register
from tests.service.service_parts import (
    Manifest_,
    Replies,
    Running,
    X,
    Y,
    ask,
    get_bytes,
    infer_bytes,
    make_config,
    post_bytes,
    running,
    running_linear,
    write_model,
)
from tests.waiting import wait_for

from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.http import HttpLimits
from edgekit_runtime.service.options.resources import RegionLimits


def test_descriptors_with_every_byte_of_a_body_are_not_hoarded(linear: Running) -> None:
    before = count_descriptors()
    with linear.connect() as client, memfd(64) as descriptor:
        fields = "Expect: 100-continue\r\nEdgekit-Descriptor: 1\r\nContent-Length: 1000\r\n"
        client.sendall(f"POST {REGION}/many/register HTTP/1.1\r\nHost: l\r\n{fields}\r\n".encode())
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        for _ in range(200):
            socket.send_fds(client, [b" "], [descriptor] * 4)
        time.sleep(0.2)
        assert count_descriptors() <= before + 10
        client.sendall(b" " * 800)
        assert Replies(client).next().status == 400


def test_registering_again_and_again_on_one_connection_leaks_nothing(linear: Running) -> None:
    with linear.connect() as client, memfd(1 << 20) as descriptor:
        before = count_descriptors()
        for _ in range(300):
            assert register(client, "again", [descriptor], byte_size=1 << 20).status == 200
            client.sendall(post_bytes(f"{REGION}/again/unregister", b""))
            assert Replies(client).next().status == 200
        assert count_descriptors() <= before + 3


@pytest.fixture
def gated(maker: PackageMaker, tmp_path: Path, gate: Gate) -> Iterator[Running]:
    limits = RegionLimits(allows_posix=True)
    with running_linear(maker, tmp_path, models={"linear": ON_THREADS}, shared_memory=limits) as service:
        yield service
        gate.open()


def test_answer_of_a_client_that_left_is_not_written_to_the_memory_of_another(
    gated: Running, gate: Gate
) -> None:
    with memfd(64) as mine, memfd(64) as theirs:
        gate.shut()
        with gated.connect() as leaver:
            os.pwrite(mine, X.tobytes(), 0)
            assert register(leaver, "r", [mine], byte_size=64).status == 200
            leaver.sendall(infer_in("r", out=16))
            wait_for(lambda: gated.call(lambda: any(c.is_busy for c in gated.service.http._connections)))
            client = gated.connect()
            client.sendall(post_bytes(f"{REGION}/r/unregister", b""))
            assert Replies(client).next().status == 200
            assert register(client, "r", [theirs], byte_size=64).status == 200
            gate.open()
            Replies(leaver).next()
        with client:
            assert os.pread(theirs, 64, 0) == bytes(64)


def test_segment_unregistered_while_its_request_is_under_way_is_said(gated: Running, gate: Gate) -> None:
    path = Path("/dev/shm") / f"edgekit-test-{secrets.token_hex(6)}"  # noqa: S108
    path.write_bytes(X.tobytes() + bytes(48))
    try:
        stated = json.dumps({"key": path.name, "byte_size": 64}).encode()
        assert ask(gated, post_bytes(f"{REGION}/p/register", stated)).status == 200
        gate.shut()
        with gated.connect() as client:
            client.sendall(infer_in("p", out=16))
            wait_for(lambda: gated.call(lambda: any(c.is_busy for c in gated.service.http._connections)))
            assert ask(gated, post_bytes(f"{REGION}/p/unregister", b"")).status == 200
            gate.open()
            reply = Replies(client).next()
            assert (reply.status, "unregistered" in reply.json["error"]) == (400, True)
    finally:
        path.unlink()


def test_output_place_that_cannot_be_is_refused_before_the_model_runs(gated: Running, gate: Gate) -> None:
    with gated.connect() as client, memfd(64) as descriptor:
        assert register(client, "o", [descriptor], byte_size=64).status == 200
        gate.shut()
        client.sendall(infer_in("o", out=60))
        assert Replies(client).next().status == 400


def gather_service(maker: PackageMaker, folder: Path) -> Any:
    """Serve `echo`, with int64 inputs."""
    golden = {"in": np.ones((2, 3), np.int64)}
    write_model(maker, folder / "echo.edgepkg", Manifest_("echo", "1.0.0", {"in": "out"}, golden))
    return running(make_config(folder), PackageFiles([folder / "echo.edgepkg"], maker.trust))


def test_indices_in_shared_memory_cannot_change_after_they_were_read(
    maker: PackageMaker, tmp_path: Path
) -> None:
    """Engines check indices and then use them; a client that changes them in between reads anything."""
    with gather_service(maker, tmp_path) as service, service.connect() as client, memfd(64) as descriptor:
        assert register(client, "i", [descriptor], byte_size=64).status == 200
        codec = service.service.registry.models.find("echo", None).codec
        place = {"shared_memory_region": "i", "shared_memory_byte_size": 48}
        entry = {"name": "in", "datatype": "INT64", "shape": [2, 3], "parameters": place}
        text = json.dumps({"inputs": [entry]}).encode()
        taken = service.call(lambda: codec.decode(memoryview(text), None)[1]["in"])
        os.pwrite(descriptor, b"\xff" * 48, 0)
        assert (taken == 0).all()


def test_memory_of_local_clients_is_out_of_reach_over_tcp(linear: Running) -> None:
    with linear.connect() as client, memfd(64) as descriptor:
        assert register(client, "mine", [descriptor], byte_size=64).status == 200
        with linear.connect_tcp() as stranger:
            replies = Replies(stranger)
            stranger.sendall(infer_in("mine"))
            assert replies.next().status == 400
            stranger.sendall(post_bytes(f"{REGION}/mine/unregister", b""))
            assert replies.next().status == 200  # nothing to forget here
            stranger.sendall(get_bytes(f"{REGION}/mine/status"))
            assert replies.next().status == 400
            stranger.sendall(post_bytes("/v2/systemsharedmemory/unregister", b""))
            assert replies.next().status == 200
        client.sendall(infer_in("mine"))
        assert Replies(client).next().status == 200


# Bodies


@contextlib.contextmanager
def small(maker: PackageMaker, folder: Path, **limits: Any) -> Iterator[Running]:
    with running_linear(maker, folder, http=HttpLimits(**limits)) as service:
        yield service


def test_chunked_bodies_count_as_memory(maker: PackageMaker, tmp_path: Path) -> None:
    head = b"POST /v2/models/linear/infer HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        small(maker, tmp_path, max_body_bytes=1 << 20, max_receiving_bytes=3 << 20) as service,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(service.connect()) for _ in range(8)]
        for client in clients:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(head + b"f0000\r\n" + bytes(0xF0000))
        wait_for(lambda: service.call(lambda: service.service.http.receiving_bytes) > 2 << 20)
        refused = 0
        for client in clients:
            client.settimeout(0.3)
            with contextlib.suppress(TimeoutError):
                refused += Replies(client).next().status == 503
        assert refused >= 5
        stack.close()
        wait_for(lambda: service.call(lambda: service.service.http.receiving_bytes) == 0)


def test_bodies_that_are_announced_and_never_come_keep_nobody_out(
    maker: PackageMaker, tmp_path: Path
) -> None:
    limits = {"max_body_bytes": 1 << 20, "max_receiving_bytes": 2 << 20, "read_timeout_s": 1.0}
    head = f"POST /v2/models/linear/infer HTTP/1.1\r\nHost: l\r\nContent-Length: {1 << 20}\r\n\r\n".encode()
    x = np.ones((10_000, 4), np.float32)
    with small(maker, tmp_path, **limits) as service, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(service.connect()) for _ in range(20)]
        for client in clients:
            client.sendall(head + b"{")
        assert ask(service, infer_bytes(x)).status == 200
        begun_s = time.monotonic()
        for client in clients:
            assert Replies(client).next().status == 408
        assert time.monotonic() - begun_s < 8  # not the 17 s that its size would be given


def test_answers_that_nobody_reads_are_bounded(maker: PackageMaker, tmp_path: Path) -> None:
    x = np.ones((200_000, 4), np.float32)  # the answer has 1.6 MB
    with (
        small(maker, tmp_path, max_sending_bytes=5 << 20, max_body_bytes=4 << 20) as service,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(service.connect()) for _ in range(12)]
        for client in clients:
            client.sendall(infer_bytes(x))
        connections = service.service.http._connections
        wait_for(lambda: service.call(lambda: all(c._parser.body_bytes is None for c in connections)))
        time.sleep(0.3)
        assert service.call(lambda: service.service.http.sending_bytes) <= 5 << 20
        assert ask(service, infer_bytes(X)).binary == Y
        stack.close()
        wait_for(lambda: service.call(lambda: service.service.http.sending_bytes) == 0)
