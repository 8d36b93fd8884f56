import contextlib
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.free_port import free_port
from tests.offload import offload_service
from tests.runtime.conftest import PackageMaker
from tests.service.serve_parts import TOKEN, environment, wait_ready, write_certificate
from tests.service.service_parts import post_bytes
from tests.service.tail_parts import FEATURES, scale_part, write_split
from tests.waiting import bounded, wait_for

import edgekit_cli
import edgekit_offload
import edgekit_runtime
import edgekit_toolkit
from edgekit_cli.cli import cli
from edgekit_runtime.client.client import Client
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.offload_options import read_offload_options


def start(folder: Path, *arguments: object, descriptors: int | None = None) -> "subprocess.Popen[str]":
    modules = (edgekit_runtime, edgekit_cli, edgekit_toolkit, edgekit_offload)
    sources = [Path(module.__file__ or "").parents[1] for module in modules]
    environment = {
        **os.environ,
        "EDGEKIT_HOME": str(folder),
        "EDGEKIT_STATE": str(folder / "state"),
        "PYTHONPATH": ":".join(map(str, sources)),
    }
    limited = [] if descriptors is None else ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]
    return subprocess.Popen(
        [*limited, sys.executable, "-m", "edgekit_cli", "offload", "serve", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@contextlib.contextmanager
def serving(
    folder: Path, *arguments: object, descriptors: int | None = None
) -> Iterator["subprocess.Popen[str]"]:
    with bounded(start(folder, *arguments, descriptors=descriptors)) as process:
        yield process


@pytest.fixture
def split(maker: PackageMaker, folder: Path) -> tuple[Path, str]:
    path = folder / "split.edgepkg"
    _, tail = write_split(maker, path, scale_part("cut1.head", 2.0), scale_part("cut1.tail", 3.0))
    return path, tail


class AskingThread(threading.Thread):
    """Asks until the service is gone.

    Attributes:
        answers: how many whole answers came.
        cut: what came of an answer that did not come whole, or None.
    """

    def __init__(self, port: int, request: bytes) -> None:
        super().__init__()
        self.answers, self.cut = 0, b""
        self._port, self._request = port, request

    def run(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), 60) as connected:
            while self._ask(connected):
                self.answers += 1

    def _ask(self, connected: socket.socket) -> bool:
        """Ask once; a service that goes may leave the request unread, but begins no answer then."""
        received = b""
        with contextlib.suppress(ConnectionError):
            connected.sendall(self._request)
            while not received.endswith(b"[1.5,-3.0,6.0]}]}") and (data := connected.recv(1 << 16)):
                received += data
        if received.startswith(b"HTTP/1.1 200") and received.endswith(b"[1.5,-3.0,6.0]}]}"):
            return True
        self.cut = received
        return False


def test_tails_are_served_with_times_and_no_answer_is_lost_or_cut_at_a_sigterm_under_load(
    split: tuple[Path, str],
) -> None:
    path, tail = split
    port = free_port()
    with serving(path.parent, path, "--port", port) as process:
        wait_ready(process)
        with Client(f"127.0.0.1:{port}") as client:
            answer = client.infer(tail, {"features": FEATURES})
            np.testing.assert_array_equal(answer["z"], FEATURES * 3)
        with socket.create_connection(("127.0.0.1", port), 20) as plain:
            body = b'{"inputs":[{"name":"features","datatype":"FP32","shape":[1,3],"data":[1,2,3]}]}'
            plain.sendall(post_bytes(f"/v2/models/{tail}/infer", body))
            head = plain.recv(1 << 16).partition(b"\r\n\r\n")[0]
        assert head.startswith(b"HTTP/1.1 200")
        assert b"\r\nServer-Timing: queue;dur=" in head
        assert b"\r\nEndpoint-Load-Metrics: TEXT application_utilization=" in head
        body = b'{"inputs":[{"name":"features","datatype":"FP32","shape":[1,3],"data":[0.5,-1,2]}]}'
        asking = [AskingThread(port, post_bytes(f"/v2/models/{tail}/infer", body)) for _ in range(4)]
        for one in asking:
            one.start()
        wait_for(lambda: all(one.answers > 50 for one in asking), "answers to all")
        process.send_signal(signal.SIGTERM)
        for one in asking:
            one.join(60)
        assert process.wait(60) == 0
    assert [one.cut for one in asking] == [b""] * 4


def test_printed_command_sets_the_server_on_a_device(
    split: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tail = split
    folder, port = path.parent, free_port()
    certificate, key = write_certificate(folder)
    token_file = folder / "its token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    files = ("--tls-cert", certificate, "--tls-key", key, "--token-file", token_file)
    with serving(folder, path, "--port", port, *files) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "On each device: " in line)
        program, *words = shlex.split(said.partition("On each device: ")[2])
        assert program == "edgekit-device"
        command = [sys.executable, "-m", "edgekit_runtime.cli", *words]
        subprocess.run(command, cwd=folder, env=environment(folder), check=True, capture_output=True)
        wait_ready(process)
        monkeypatch.setenv("EDGEKIT_HOME", str(folder))
        kept = read_offload_options()
        assert kept is not None
        with Client(kept.server, token=kept.read_token(), ca_file=kept.ca_file) as client:
            np.testing.assert_array_equal(client.infer(tail, {"features": FEATURES})["z"], FEATURES * 3)


def secured(folder: Path) -> tuple[object, ...]:
    certificate, key = write_certificate(folder)
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    return ("--tls-cert", certificate, "--tls-key", key, "--token-file", token_file)


def connect(folder: Path, port: int) -> ssl.SSLSocket:
    """Return a connection that has sent a request with the token, and got its reply."""
    context = ssl.create_default_context(cafile=folder / "cert.pem")
    plain = socket.create_connection(("127.0.0.1", port), 20)
    connected = context.wrap_socket(plain, server_hostname="127.0.0.1")
    ask_live(connected)
    return connected


def ask_live(connected: ssl.SSLSocket) -> None:
    fields = f"Host: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    connected.sendall(f"GET /v2/health/live HTTP/1.1\r\n{fields}".encode())
    assert connected.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_many_devices_stay_connected_where_one_beyond_the_limit_is_dropped(
    split: tuple[Path, str], is_long: bool
) -> None:
    path, _ = split
    folder, port, count = path.parent, free_port(), 300 if is_long else 100
    options = ("--port", port, "--max-devices", count, *secured(folder))
    with offload_service.serving(folder, path, *options) as process, contextlib.ExitStack() as stack:
        wait_ready(process)
        devices = [stack.enter_context(connect(folder, port)) for _ in range(count)]
        with pytest.raises(OSError):  # reset or ended, as it comes
            connect(folder, port)
        for device in devices:
            ask_live(device)


def test_devices_are_bounded_by_the_limit_of_descriptors(split: tuple[Path, str]) -> None:
    path, _ = split
    folder, options = path.parent, ("--port", free_port(), *secured(path.parent))
    with serving(folder, path, *options, descriptors=556) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "On each device: " in line)
    assert "for at most 100 devices" in said
    with serving(folder, path, *options, "--max-devices", 101, descriptors=556) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 17
    assert "expected at most 100" in error


def test_address_beyond_this_machine_needs_tls_and_a_token(split: tuple[Path, str]) -> None:
    path, _ = split
    options = ("--host", "192.0.2.1", "--port", free_port())
    with offload_service.serving(path.parent, path, *options) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 17
    assert "tls_certificate and token_file" in error


def test_package_without_tails_is_refused(
    maker: PackageMaker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(folder))
    path = folder / "whole.edgepkg"
    maker.write(path)
    arguments = ["offload", "serve", str(path)]
    with pytest.raises(CutError, match="edgekit offload plan") as refused:  # before it becomes the service
        CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
    assert refused.value.exit_code == 18
