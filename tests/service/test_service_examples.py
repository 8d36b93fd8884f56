"""The examples that talk to a running service."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Running, running_linear

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def service(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_linear(maker, tmp_path_factory.mktemp("e")) as service:
        yield service


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl_session_shows_every_step(service: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    printed = run(str(EXAMPLES / "curl_session.sh"), service.socket_path, "linear")
    assert '"data":[0.0,0.0]' in printed
    assert 'edgekit_requests_total{model="linear",version="1.0.0",outcome="succeeded"} 1' in printed
    assert printed.rstrip().endswith("curl ended with 22")


def test_triton_session_runs_the_model(service: Running) -> None:
    pytest.importorskip("tritonclient")
    script = str(EXAMPLES / "triton_session.py")
    printed = run(sys.executable, script, f"127.0.0.1:{service.port}", "linear")
    assert "ready: True" in printed
    assert "y (1, 2)" in printed


def test_camera_loop_gets_its_frames_answered(service: Running) -> None:
    printed = run(sys.executable, str(EXAMPLES / "camera_loop.py"), service.socket_path, "linear", "60")
    assert "of 60 frames answered" in printed
    assert not printed.startswith("0 of")
