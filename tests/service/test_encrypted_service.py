"""A device with encrypted packages over its life: it serves them, and no weights lie on its disk."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.fork_server import runtime_server
from tests.runtime.conftest import PackageMaker
from tests.runtime.encryption_parts import encrypt_package, find_plaintext, make_device, make_heavy
from tests.runtime.slot_cases import MODEL
from tests.service.serve_parts import environment, served
from tests.waiting import wait_for

from edgekit_runtime.client import Client


@pytest.mark.parametrize("isolated", [pytest.param(False, marks=pytest.mark.long), True])
def test_disk_holds_no_weights_after_install_serve_crash_and_rollback(
    maker: PackageMaker, folder: Path, monkeypatch: pytest.MonkeyPatch, isolated: bool
) -> None:
    heavy, secret = make_heavy(maker)
    for name in ("cache", "tmp"):
        (folder / name).mkdir()
    monkeypatch.setenv("EDGEKIT_HOME", str(folder))
    monkeypatch.setenv("EDGEKIT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "serve.toml").write_text(f"[models.linear]\nisolated = {str(isolated).lower()}\n")
    device = make_device(folder)
    for version, name in (("1.0.0", "linear"), ("2.0.0", "next")):
        heavy.write(folder / "plain", version=version)
        encrypt_package(folder / "plain", folder / f"{name}.edgepkg", device)
        (folder / "plain").unlink()

    def run(*arguments: str) -> None:
        command = [sys.executable, "-m", "edgekit_runtime.cli", *arguments]
        started = runtime_server().popen(
            command, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        output, _ = started.communicate(timeout=120)
        assert started.returncode == 0, output

    def check() -> None:
        assert find_plaintext(folder, secret) == []

    config = ("--config", str(folder / "serve.toml"))
    with served(folder, *config, installed=True, is_copy=False) as service:
        assert ask(service.socket_path) == "1.0.0"
        assert_no_dumps(service.process.pid)
        check()
        run("install", str(folder / "next.edgepkg"), "--socket", str(service.socket_path))
        wait_for(lambda: ask(service.socket_path) == "2.0.0", "the new version")
        check()
        service.end(signal.SIGKILL)
        check()
    run("rollback", MODEL)
    with served(folder, *config, installed=True) as service:
        assert ask(service.socket_path) == "1.0.0"
        check()
        service.end()
    check()


def ask(socket_path: Path) -> str:
    """Return the version that answers."""
    with Client(str(socket_path)) as client:
        client.infer(MODEL, {"x": np.ones((1, 4), np.float32)})
        versions: list[str] = client.metadata(MODEL)["versions"]
    return versions[0]


def assert_no_dumps(pid: int) -> None:
    """Assert that a crash of a service or a worker writes no memory."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    for number in pids:
        limits = Path(f"/proc/{number}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert set(line.split()[4:6]) <= {"1", "0"}
        assert int(Path(f"/proc/{number}/coredump_filter").read_text(), 16) == 0
