"""`edgekit-device serve` as a process, and what it is started with."""

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.fork_server import runtime_server
from tests.waiting import bounded

import edgekit_runtime
from edgekit_runtime.slots import Slots
from edgekit_runtime.trust.trust_store import TrustStore

TOKEN = "0123456789abcdef0123456789abcdef"  # noqa: S105


def environment(home: Path) -> dict[str, str]:
    """Return that of a process which finds nothing of ours but the runtime."""
    runtime = Path(edgekit_runtime.__file__).parents[1]
    state = str(home / "state")
    return {**os.environ, "EDGEKIT_HOME": str(home), "EDGEKIT_STATE": state, "PYTHONPATH": str(runtime)}


def install(folder: Path) -> None:
    """Install the package of `folder` in the state folder there, unless that was done."""
    trust = TrustStore.from_folder(folder / "keys")
    Slots(folder / "state", trust).install(folder / "linear.edgepkg")


def wait_ready(process: "subprocess.Popen[str]") -> str:
    """Return the line on which a service says that it is ready."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:  # what loads slowly lets others speak first
        said.append(line)
        if "ready at" in line:
            return line
    raise AssertionError("".join(said))


class Served:
    """`edgekit-device serve` with the model `linear`.

    Attributes:
        process: it.
        socket_path: of its Unix socket.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        command: Sequence[str] = ("-m", "edgekit_runtime.cli"),
        installed: bool = False,
        is_copy: bool = True,
        **started: Any,
    ) -> None:
        """Start it with the package in `folder`, or with what is installed in the state folder there.

        It is a copy of a process that has imported it, or Python starts, see `tests.fork_server`.
        """
        self.socket_path = folder / "serve.sock"
        stated = ["--unix-socket", str(self.socket_path), "--port", "0"]
        if installed:
            install(folder)
        else:
            stated += ["--package", str(folder / "linear.edgepkg")]
        popen = runtime_server().popen if is_copy else subprocess.Popen
        self.process = popen(
            [sys.executable, *command, "serve", *stated, *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(folder),
            cwd=folder,
            **started,
        )

    @property
    def tcp_port(self) -> str:
        """The port of TCP, once it is ready."""
        return self._ready.rsplit(":", 1)[1].strip()

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(60)
        try:
            client.connect(str(self.socket_path))
        except OSError:
            client.close()
            raise
        return client

    def wait_ready(self) -> str:
        self._ready = wait_ready(self.process)
        return self._ready

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.end_by_itself()

    def end_by_itself(self) -> tuple[int, str]:
        try:
            out, error = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, error = self.process.communicate()
            raise AssertionError(f"still runs: {out}{error}") from None
        return self.process.returncode, out + error


@contextlib.contextmanager
def served(
    folder: Path,
    *arguments: str,
    installed: bool = False,
    is_copy: bool = True,
    limit_s: float = 240.0,
) -> Iterator[Served]:
    service = Served(folder, *arguments, installed=installed, is_copy=is_copy)
    with bounded(service.process, limit_s):
        service.wait_ready()
        yield service


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_certificate(folder: Path, host: str = "127.0.0.1") -> tuple[Path, Path]:
    """Write a certificate for an address or a name that signs itself, and its key; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "edgekit test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    is_address = host[0].isdigit()
    named = x509.IPAddress(ipaddress.ip_address(host)) if is_address else x509.DNSName(host)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([named]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths
