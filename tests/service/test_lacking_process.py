"""A real service with few descriptors left, or none: what it answers, what it costs, and afterwards."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.descriptor_parts import without_descriptors
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.region_parts import infer_in, memfd, register
from tests.service.serve_parts import Served, cpu_s
from tests.service.service_parts import (
    Replies,
    Reply,
    X,
    Y,
    get_bytes,
    infer_bytes,
    make_config,
    post_bytes,
    running,
)

from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.resources import RegionLimits

LOAD = post_bytes("/v2/repository/models/linear/load", b"")
ISOLATED = "[models.linear]\nisolated = true\n[models.linear.isolation]\nmax_delay_s = 0.02\n"
MOST = 16  # descriptors that a load needs at one time


def connect(service: Served) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(30)
    client.connect(str(service.socket_path))
    return client


@contextlib.contextmanager
def started(folder: Path, config: str = "") -> Iterator[tuple[Served, str]]:
    """Yield a service, and the line that says where it is ready; it is ended here, unless it is before."""
    (folder / "serve.toml").write_text(config)
    service = Served(folder, "--config", str(folder / "serve.toml"))
    try:
        yield service, service.wait_ready()
    finally:
        with service.process:
            service.process.kill()


def ask_on(client: socket.socket, request: bytes) -> Reply:
    client.sendall(request)
    return Replies(client).next()


@pytest.mark.parametrize("config", ["", ISOLATED], ids=["inside", "isolated"])
def test_service_with_few_descriptors_answers_all_and_goes_on(
    folder: Path, config: str, *, is_long: bool
) -> None:
    statuses, step = [], 1 if is_long or config != ISOLATED else 5  # each costs the model its process
    with started(folder, config) as (service, _):
        with connect(service) as lent, connect(service) as kept:
            assert ask_on(lent, infer_bytes(X)).binary == Y
            for spare in range(0, MOST, step):
                with without_descriptors(service.process.pid, spare):
                    statuses.append(ask_on(kept, LOAD).status)
                    assert ask_on(kept, get_bytes("/v2/health/ready")).status == 200
                    assert ask_on(lent, infer_bytes(X)).binary == Y
        with connect(service) as client:
            assert ask_on(client, LOAD).status == 200
            assert ask_on(client, infer_bytes(X)).binary == Y
        code, printed = service.end()
    assert set(statuses) == {200, 503}, printed
    assert statuses[0] == 503
    assert code == 0
    assert "Traceback" not in printed


def test_memory_that_a_service_has_no_descriptor_for_is_answered_503(folder: Path) -> None:
    with memfd(16) as memory, started(folder) as (service, _), contextlib.ExitStack() as stack:
        os.write(memory, X.tobytes())
        clients = [stack.enter_context(connect(service)) for _ in range(3)]
        for client in clients:
            assert ask_on(client, get_bytes("/v2/health/live")).status == 200
        for spare, client in enumerate(clients):  # a memfd takes two, since what is mapped has one of its own
            with without_descriptors(service.process.pid, spare):
                reply = register(client, "r", [memory], byte_size=16)
            assert reply.status == (200 if spare == 2 else 503), reply
        assert ask_on(clients[2], infer_in("r")).json["outputs"][0]["data"] == (X @ WEIGHT).ravel().tolist()
        code, printed = service.end()
    assert (code, "Traceback" in printed) == (0, False)


def test_segment_that_a_service_has_no_descriptor_for_is_answered_503(
    maker: PackageMaker, tmp_path: Path
) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    segment = Path("/dev/shm") / f"edgekit-{os.getpid()}"  # noqa: S108  # where POSIX has its segments
    segment.write_bytes(X.tobytes())
    body = f'{{"key": "/{segment.name}", "byte_size": 16}}'.encode()
    request = post_bytes("/v2/systemsharedmemory/region/r/register", body)
    config = make_config(tmp_path, shared_memory=RegionLimits(allows_posix=True))
    source = PackageFiles([tmp_path / "linear.edgepkg"], maker.trust)
    try:
        with running(config, source) as served, served.connect() as client:
            assert ask_on(client, get_bytes("/v2/health/live")).status == 200
            with without_descriptors(os.getpid()):
                reply = ask_on(client, request)
            assert (reply.status, "Too many open files" in reply.json["error"]) == (503, True)
            assert ask_on(client, request).status == 200
    finally:
        segment.unlink()


@pytest.mark.parametrize(
    "config", ["", pytest.param(ISOLATED, marks=pytest.mark.long)], ids=["inside", "isolated"]
)
def test_tls_clients_of_a_service_without_descriptors_cost_no_time(
    folder: Path, token_file: Path, certificate: tuple[Path, Path], config: str
) -> None:
    listen = f"[listen]\ntls_certificate = '{certificate[0]}'\ntls_key = '{certificate[1]}'\n"
    config = f"{listen}token_file = '{token_file}'\n{config}"
    with started(folder, config) as (service, said), contextlib.ExitStack() as stack:
        pid, port = service.process.pid, int(said.rsplit(":", 1)[1])
        kept = stack.enter_context(connect(service))
        assert ask_on(kept, infer_bytes(X)).binary == Y
        with without_descriptors(pid):
            for _ in range(30):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            time.sleep(0.5)
            before_s, _ = cpu_s(pid), time.sleep(2)
            assert cpu_s(pid) - before_s < 0.5
            assert ask_on(kept, infer_bytes(X)).binary == Y
        with connect(service) as client:
            assert ask_on(client, infer_bytes(X)).binary == Y
        assert service.end()[0] == 0
