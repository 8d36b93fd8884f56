"""What the offload benchmarks share: an emulated device and server, the service, ways by hand.

The server is our service with TLS and a token, as anybody runs it beyond loopback. The device is a process
under a CPU quota (`workload_device`). Figures are `emulated`, of this machine and this run: compare ratios.
"""

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgekit_host.emulation.testbed import Testbed
from edgekit_offload.demo.demo_package import write_certificate
from edgekit_offload.export.service_config import service_config
from edgekit_toolkit.packaging.signing_keys import load_signer
from serving import write_signed

TOKEN = "token-of-an-emulated-server"  # noqa: S105  # of an emulated server
PORT = 8443
START_LIMIT_S = 180.0  # every tail proves itself first, on one processor

Feeds = dict[str, NDArray[Any]]


class EmulatedBench:
    """An emulated device and server, before anything runs there; for a `with` block."""

    def __init__(self, folder: Path, device_share: float | None = 0.2) -> None:
        self.folder = folder
        self._open = ExitStack()
        self.testbed = self._open.enter_context(Testbed(device_share=device_share))
        write_certificate(folder, self.testbed.server_host)
        (folder / "token").write_text(f"{TOKEN}\n")
        (folder / "token").chmod(0o600)
        self._lines: Any = None

    def __enter__(self) -> "EmulatedBench":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def url(self) -> str:
        host, port = self.testbed.reach(PORT)
        return f"https://{host}:{port}"

    def start_server(self, command: Sequence[str]) -> Any:
        """Start the service, wait until it is ready, and return its process."""
        child = self.testbed.spawn("server", list(command), folder=self.folder)
        deadline = time.monotonic() + START_LIMIT_S
        # What it says of sensors may come last.
        while not any(word in child.last_line for word in ("ready", "no sensors")):
            if child.wait(0.05) is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service ended {child.explain_end()}")
        return child

    def start_program(self, name: str) -> None:
        """Start a program of this folder on the device; it obeys orders by `device_orders`."""
        path = self.folder / "device.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(START_LIMIT_S)
            program = str(Path(__file__).with_name(name))
            self.testbed.spawn("device", [sys.executable, program, str(path)], output="log")
            connection, _ = listener.accept()
        self._lines = self._open.enter_context(connection).makefile("rw", encoding="ascii")

    def begin(self, do: str, **what: Any) -> None:
        self._lines.write(f"{json.dumps({'do': do, **what})}\n")
        self._lines.flush()

    def end(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise SystemExit("the device ended")
        return json.loads(line)

    def order(self, do: str, **what: Any) -> Any:
        self.begin(do, **what)
        return self.end()


class OffloadBench(EmulatedBench):
    """Serves tails by hand; the device runs ways by hand (`workload_device`)."""

    def __init__(self, folder: Path, device_share: float | None = 0.2) -> None:
        super().__init__(folder, device_share)
        self._sign = load_signer(folder=folder / "keys")
        self._names: list[str] = []

    def add_tail(
        self, name: str, model: bytes, feeds: Feeds, decode: Mapping[str, str] | None = None
    ) -> None:
        """Write the package of a tail; before `serve`. Inputs in `decode` arrive as files of a codec."""
        if name not in self._names:
            write_signed(self.folder, name, model, feeds, self._sign, decode=decode)
            self._names.append(name)

    def serve(self) -> Any:
        """Start the service as `edgekit offload serve` does, wait until it is ready, return its process."""
        config = self.folder / "service.toml"
        listen = {
            "unix_socket": "",
            "host": self.testbed.server_host,
            "port": PORT,
            "tls_certificate": f"{self.folder}/server.pem",
            "tls_key": f"{self.folder}/server.key",
            "token_file": f"{self.folder}/token",
        }
        config.write_text(service_config(self._names, listen, devices=1024))
        paths = [str(self.folder / f"{name}.edgepkg") for name in self._names]
        packages = [word for path in paths for word in ("--package", path)]
        return self.start_server(
            [
                *(sys.executable, "-m", "edgekit_runtime.cli", "serve", "--config", str(config)),
                *("--keys", str(self.folder / "keys"), *packages),
            ]
        )

    def start_device(self, timeout_s: float = 60.0) -> None:
        self.start_program("workload_device.py")
        ca_file = str(self.folder / "server.pem")
        self.order("connect", address=self.url, token=TOKEN, ca_file=ca_file, timeout_s=timeout_s)

    def generate_load(self, cpu: int | str, **order: Any) -> Any:
        """Start `load_generator` beside the server, and return its process."""
        script = str(Path(__file__).with_name("load_generator.py"))
        order |= {"host": self.testbed.server_host, "port": PORT, "ca_file": f"{self.folder}/server.pem"}
        return self.testbed.spawn("server", [sys.executable, script, str(cpu), json.dumps(order)])
