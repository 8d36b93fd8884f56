"""A stand-in for a board: OpenSSH's own server on loopback, with a folder of its own as the user's home."""

import contextlib
import getpass
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.free_port import free_port
from yaml import safe_dump

import edgekit_runtime

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
_START_LIMIT_S = 10.0
_MODULES = {
    "SensorsDriver": "edgekit_hil.drivers.sensors",
    "CommandMeterDriver": "edgekit_hil.drivers.meter",
    "OwnMeter": "own_meter.py",
}


@dataclass
class SshBoard:
    """Where the server is.

    Attributes:
        folder: of its keys and of the user's home.
        port: on loopback.
        key: of the user.
        home: of the user.
        python: starts a Python with the runtime.
        server_pid: process id of the server.
    """

    folder: Path
    port: int
    key: Path
    home: Path
    python: Path
    server_pid: int

    def write_bench(
        self,
        path: Path,
        *,
        address: str = "127.0.0.1",
        drivers: Mapping[str, Any] | None = None,
        **settings: str,
    ) -> Path:
        """Write an environment file that leads here, with more drivers by name."""
        section = {
            "name": "stand-in",
            "kind": "simulated",
            "target": "x86-64",
            "architecture": "x86_64",
            "python": str(self.python),
            **settings,
        }
        service = {"address": address, "port": self.port, "username": getpass.getuser()}
        ssh = {"SSHDriver": {"keyfile": str(self.key), "connection_timeout": 5.0}}
        main = {"resources": {"NetworkService": service}, "drivers": {**ssh, **(drivers or {})}}
        imports = [_MODULES[name] for name in drivers or () if name in _MODULES]
        path.write_text(safe_dump({"edgekit": section, "targets": {"main": main}, "imports": imports}))
        return path


@contextlib.contextmanager
def run_ssh_board(folder: Path) -> Iterator[SshBoard]:
    """Run the server until the end of the block."""
    if SSHD is None:
        pytest.skip("no OpenSSH server: apt-get install openssh-server")
    home = folder / "home"
    home.mkdir(parents=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    python = home / "python"
    runtime = Path(edgekit_runtime.__file__).parents[1]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={runtime} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    port = free_port()
    config = folder / "sshd_config"
    config.write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
        "StrictModes no\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nPasswordAuthentication no\nPermitRootLogin yes\n"
        "KexAlgorithms curve25519-sha256\n"  # others take most of the time of a connection
        f"SetEnv HOME={home} OPENBLAS_NUM_THREADS=1\nSubsystem sftp internal-sftp -d {home}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # where the server puts its own children
    with (folder / "sshd.log").open("w") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stdout=log, stderr=log)
        try:
            _wait_for(port, folder / "sshd.log")
            yield SshBoard(folder, port, folder / "user_key", home, python, server.pid)
        finally:
            server.terminate()
            server.wait()


def _wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    pytest.skip(f"the OpenSSH server does not start here: {log.read_text()[-300:]}")
