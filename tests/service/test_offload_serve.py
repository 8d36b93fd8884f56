import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.serve_parts import wait_ready
from tests.service.service_parts import post_bytes
from tests.service.tail_parts import FEATURES, scale_part, write_split
from tests.waiting import bounded

import edgekit_runtime
import edgekit_toolkit
from edgekit_runtime.client.client import Client


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, *arguments: object) -> "subprocess.Popen[str]":
    sources = [Path(module.__file__ or "").parents[1] for module in (edgekit_runtime, edgekit_toolkit)]
    environment = {
        **os.environ,
        "EDGEKIT_HOME": str(folder),
        "EDGEKIT_STATE": str(folder / "state"),
        "PYTHONPATH": ":".join(map(str, sources)),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "edgekit_toolkit", "offload", "serve", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@contextlib.contextmanager
def serving(folder: Path, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    with bounded(start(folder, *arguments)) as process:
        yield process


@pytest.fixture
def split(maker: PackageMaker, folder: Path) -> tuple[Path, str]:
    path = folder / "split.edgepkg"
    _, tail = write_split(maker, path, scale_part("cut1.head", 2.0), scale_part("cut1.tail", 3.0))
    return path, tail


def test_tails_are_served_with_times_and_the_process_ends_on_sigterm(split: tuple[Path, str]) -> None:
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
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_address_beyond_this_machine_needs_tls_and_a_token(split: tuple[Path, str]) -> None:
    path, _ = split
    with serving(path.parent, path, "--host", "192.0.2.1", "--port", free_port()) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 17
    assert "tls_certificate and token_file" in error


def test_package_without_tails_is_refused(maker: PackageMaker, folder: Path) -> None:
    maker.write(folder / "whole.edgepkg")
    with serving(folder, folder / "whole.edgepkg") as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 18
    assert "edgekit offload plan" in error
