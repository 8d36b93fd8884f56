"""A process that runs out of descriptors, whose models hang, and whose files are not what they seem."""

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import PackageMaker
from tests.service.gates import ON_THREADS, Gate
from tests.service.serve_parts import Served, cpu_s, served
from tests.service.service_parts import (
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
    write_identity,
)
from tests.service.wiring_parts import load
from tests.waiting import wait_for

from edgekit_runtime.errors import TransportError
from edgekit_runtime.service import server
from edgekit_runtime.service.http.listeners import listen_unix
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.config import Inference


def damage(path: Path, kind: str) -> None:
    if kind == "garbage":
        path.write_bytes(b"\xff" * 1000)
    elif kind == "empty":
        path.touch()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nowhere")


@pytest.mark.parametrize("kind", ["garbage", "empty", "fifo", "folder", "dangling"])
def test_file_that_is_no_package_keeps_no_other_from_being_served(
    maker: PackageMaker, tmp_path: Path, kind: str
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    damage(packages / "a.edgepkg", kind)
    maker.write(packages / "linear.edgepkg")
    with running(make_config(tmp_path), PackageFiles([packages], maker.trust)) as service:
        assert ask(service, infer_bytes(X)).binary == Y
        damage(packages / "z.edgepkg", kind)
        assert ask(service, post_bytes("/v2/repository/index", b"")).status == 200
        assert load(service).status == 200


def test_models_that_do_not_exist_leave_no_trace(linear: Running) -> None:
    for number in range(50):
        reply = ask(linear, post_bytes(f"/v2/repository/models/nothing-{number}/load", b""))
        assert reply.status == 404
    assert b"nothing-" not in ask(linear, get_bytes("/metrics")).body
    assert len(ask(linear, post_bytes("/v2/repository/index", b"")).json) == 1


def test_storm_of_loads_unloads_and_inferences_ends_well(maker: PackageMaker, tmp_path: Path) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    write_identity(maker, tmp_path / "echo.edgepkg", ["float32"])
    source = PackageFiles([tmp_path / "linear.edgepkg", tmp_path / "echo.edgepkg"], maker.trust)
    with running(make_config(tmp_path), source) as service:
        stop, wrong = threading.Event(), []

        def infer() -> None:
            with service.connect() as client:
                replies = Replies(client)
                while not stop.is_set():
                    client.sendall(infer_bytes(X))
                    reply = replies.next()
                    if reply.status == 200 and reply.binary != Y:
                        wrong.append(reply)
                    if reply.status not in (200, 404, 503):
                        wrong.append(reply)

        def change(action: str) -> None:
            for _ in range(10):
                reply = ask(service, post_bytes(f"/v2/repository/models/linear/{action}", b""))
                if reply.status not in (200, 404):
                    wrong.append(reply)

        threads = [threading.Thread(target=infer) for _ in range(4)]
        changers = [threading.Thread(target=change, args=(a,)) for a in ("load", "unload", "load")]
        for thread in (*threads, *changers):
            thread.start()
        for thread in changers:
            thread.join(60)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert load(service).status == 200
        assert ask(service, infer_bytes(X)).binary == Y
        assert ask(service, get_bytes("/v2/models/echo/ready")).status == 200


def test_model_that_hangs_does_not_keep_the_service_from_stopping(
    maker: PackageMaker, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "UNLOAD_TIMEOUT_S", 0.5)
    maker.write(tmp_path / "linear.edgepkg")
    config = make_config(tmp_path, inference=Inference(stop_timeout_s=1.0), models={"linear": ON_THREADS})
    service = Running(config, PackageFiles([tmp_path / "linear.edgepkg"], maker.trust))
    gate.shut()
    with service.connect() as client:
        client.sendall(infer_bytes(X))
        time.sleep(0.2)
        opening = threading.Timer(60, gate.open)
        opening.start()
        service.stop()
        assert opening.is_alive()  # stopped while the model hung
        opening.cancel()
        gate.open()


def test_only_package_that_is_none_ends_the_service_with_a_reason(folder: Path) -> None:
    (folder / "linear.edgepkg").write_bytes(b"nothing")
    code, printed = Served(folder).end_by_itself()
    assert code not in (0, -signal.SIGTERM)
    assert "linear.edgepkg" in printed
    assert "Traceback" not in printed


# Sockets


def test_service_that_ends_late_leaves_the_socket_of_its_successor(folder: Path) -> None:
    config = folder / "service.toml"
    config.write_text("[inference]\nstop_timeout_s = 60\n")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(served(folder, "--config", str(config)))
        with first.connect() as client:
            head, _, body = infer_bytes(X, fields="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            client.sendall(head + b"\r\n\r\n")
            assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # the first service waits for it
            first.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            second = stack.enter_context(served(folder))
            client.sendall(body)
            assert Replies(client).next().binary == Y
        assert first.end(0)[0] == 0
        with second.connect() as client:
            client.sendall(infer_bytes(X))
            assert Replies(client).next().binary == Y
        assert second.end()[0] == 0


def test_service_that_does_not_accept_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "hung.sock"
    with socket.socket(socket.AF_UNIX) as hung, contextlib.ExitStack() as stack:
        hung.bind(str(path))
        hung.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(path))
        began_s = time.monotonic()
        with pytest.raises(TransportError, match="another service"):
            listen_unix(path)
        assert time.monotonic() - began_s < 5


def test_two_services_that_start_at_once_do_not_share_a_path(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    for _ in range(30):
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(path))
        stale.close()
        barrier, won = threading.Barrier(4), []

        def start(barrier: threading.Barrier = barrier, won: list[socket.socket] = won) -> None:
            barrier.wait(10)
            with contextlib.suppress(TransportError):
                won.append(listen_unix(path))

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(won) == 1
        won[0].close()
        path.unlink()


def test_process_out_of_descriptors_neither_spins_nor_floods_its_log(folder: Path) -> None:
    with served(folder) as service:
        pid = service.process.pid
        used = count_descriptors(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 20, used + 20))
        with contextlib.ExitStack() as stack:
            clients = []
            for _ in range(60):  # three times as many as it can accept: it tries once a second
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.settimeout(5)
                with contextlib.suppress(OSError):
                    client.connect(str(service.socket_path))
                    clients.append(client)
            time.sleep(0.5)
            before_s, _ = cpu_s(pid), time.sleep(2)
            assert cpu_s(pid) - before_s < 0.5
            clients[0].sendall(infer_bytes(X))
            assert Replies(clients[0]).next().binary == Y

        def is_served() -> bool:
            with service.connect() as client:
                client.sendall(infer_bytes(X))
                reply = Replies(client).next()
            assert reply.status in (200, 503)
            return reply.status == 200

        wait_for(is_served, "room for another client")
        code, printed = service.end()
        assert code == 0
        assert len(printed) < 10_000
