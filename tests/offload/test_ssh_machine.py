"""Measuring over ssh, against a real sshd on loopback with keys of its own."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.offload.test_planner import narrowing_model
from tests.service.test_offload_serve import free_port
from tests.waiting import bounded, wait_for

import edgekit_runtime
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_runtime.errors import CutError

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
RUN_FOLDER = Path("/run/sshd")  # sshd of root asks for it

pytestmark = [
    pytest.mark.skipif(SSHD is None, reason="needs sshd: apt-get install openssh-server"),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh: apt-get install openssh-client"),
]


@dataclass(frozen=True)
class Host:
    """The host `board` as ssh sees it.

    Attributes:
        bin: first folder of the PATH of its users.
        known_hosts: of the client.
    """

    bin: Path
    known_hosts: Path

    def install(self, script: str) -> None:
        """Put a program in the place of `edgekit-device` there."""
        program = self.bin / "edgekit-device"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Run sshd on a free port; yield its folder and its port."""
    folder = tmp_path_factory.mktemp("sshd")
    (folder / "bin").mkdir()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    made_folder = os.geteuid() == 0 and not RUN_FOLDER.exists()
    if made_folder:
        RUN_FOLDER.mkdir(mode=0o755)
    port = free_port()
    settings = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "StrictModes": "no",  # the folder of a test is in one that others may write
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "SetEnv": f"PATH={folder / 'bin'}:/usr/bin:/bin",
    }
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    log = (folder / "log").open("wb")
    try:
        with (
            log,
            bounded(
                subprocess.Popen([SSHD or "", "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
            ) as process,
        ):

            def listens() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", port)) == 0

            wait_for(listens, "sshd")
            yield folder, port
    finally:
        if made_folder:
            RUN_FOLDER.rmdir()


@pytest.fixture
def host(sshd: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Let `ssh board` go there."""
    folder, port = sshd
    shutil.rmtree(folder / "bin")
    (folder / "bin").mkdir()
    public = (folder / "host.pub").read_text()
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port} {public}")
    settings = {
        "HostName": "127.0.0.1", "Port": port, "User": getpass.getuser(), "IdentityFile": folder / "user",
        "IdentitiesOnly": "yes", "UserKnownHostsFile": known, "GlobalKnownHostsFile": "none",
        "SetEnv": "LC_ALL=C",
    }  # fmt: skip
    lines = "".join(f"  {name} {value}\n" for name, value in settings.items())
    (tmp_path / "config").write_text(f"Host board\n{lines}")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path / "config"} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Host(folder / "bin", known)


def profile() -> None:
    machine, graph = Machine.parse("ssh:board"), RunnableGraph(narrowing_model(3, 64))
    found = profile_kernels(machine, graph, seconds=0.1)
    assert (found.measured_on, found.label) == ("ssh:board", "measured")
    assert len(found.kernels) >= 3


def test_model_is_profiled_over_ssh(host: Host) -> None:
    source = Path(edgekit_runtime.__file__).parents[1]
    host.install(f'PYTHONPATH={source} exec {sys.executable} -m edgekit_runtime.cli "$@"')
    profile()


def test_unknown_host_key_is_refused_with_what_to_do(host: Host) -> None:
    host.known_hosts.write_text("")
    with pytest.raises(CutError, match=r"ssh:board: ssh failed: Host key verification failed.*`ssh board`"):
        profile()


def test_host_without_edgekit_is_refused_with_what_to_do(host: Host) -> None:
    assert not list(host.bin.iterdir())
    with pytest.raises(CutError, match=r"ssh:board: .*edgekit-device.*not found.*install edgekit there"):
        profile()


@pytest.mark.parametrize(
    "script", ["exec /usr/bin/no-python -m x", "echo 'SyntaxError: invalid syntax' >&2; exit 1"]
)
def test_edgekit_that_does_not_start_there_is_refused_with_its_words(host: Host, script: str) -> None:
    host.install(script)
    words = "not found" if "no-python" in script else "SyntaxError"
    with pytest.raises(CutError, match=rf"ssh:board: .*{words}.*`ssh board edgekit-device --version`"):
        profile()
