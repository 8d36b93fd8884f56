"""The servers that benchmarks/service.py compares: how each is started and asked, and what runs its model.

All serve models/tiny/digits_cnn.onnx (float32, one thread) on TCP at 127.0.0.1; ours also on a Unix socket.
Other projects run in environments of their own, made on first use.
"""

import telemetry_off  # noqa: F401

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from environments import make_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODEL = ROOT / "models" / "tiny" / "digits_cnn.onnx"
INPUT, SHAPE = "image", (1, 1, 8, 8)
ENGINE = ("onnxruntime==1.24.4", "numpy==2.4.6")  # what requirements/device.txt has for Python 3.11
START_LIMIT_S = 90.0


class MissingError(Exception):
    """A server cannot be had here; the message says why."""


@dataclass(frozen=True)
class Question:
    """One inference as bytes on the wire.

    Attributes:
        path: of the request.
        head: further header lines, each ending in CRLF.
        body: of the request.
    """

    path: str
    head: str
    body: bytes

    @property
    def wire(self) -> bytes:
        """The whole request."""
        lines = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\n{self.head}"
        return f"{lines}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


JSON_HEAD = "Content-Type: application/json\r\n"


def oip_binary(values: bytes) -> Question:
    """An OIP request with the binary tensor extension in both directions."""
    tensor = {
        "name": INPUT,
        "shape": SHAPE,
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(values)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(head)}\r\n"
    return Question("/v2/models/small/infer", lines, head + values)


def oip_json(values: list[float]) -> Question:
    """An OIP request in JSON."""
    tensor = {"name": INPUT, "shape": SHAPE, "datatype": "FP32", "data": values}
    return Question("/v2/models/small/infer", JSON_HEAD, json.dumps({"inputs": [tensor]}).encode())


@dataclass(frozen=True)
class Server:
    """One server with its setting.

    Attributes:
        name: for --only and the tables.
        command: of its start; `{port}` is replaced.
        question: what it is asked.
        environment: requirements of its environment, or None for that of this project.
        isolated: whether another process than the listening one runs the model.
        unix_socket: path of its Unix socket, `{port}` replaced, which latency is measured over; None for TCP.
    """

    name: str
    command: tuple[str, ...]
    question: Question
    environment: tuple[str, ...] | None = None
    isolated: bool = False
    unix_socket: str | None = None

    def python(self) -> str:
        """The interpreter that runs it.

        Raises:
            MissingError: its environment cannot be made.
        """
        if self.environment is None:
            return sys.executable
        project = self.environment[0].partition("=")[0]
        python = make_environment(project, (*self.environment, *ENGINE), "0.5 GB")
        if python is None:
            raise MissingError(f"pip cannot install {' '.join(self.environment)}")
        return str(python)


class Running:
    """A started server; leaving the block ends it with all its processes."""

    def __init__(self, server: Server, cpus: set[int]) -> None:
        self.server, self.cpus = server, cpus

    def __enter__(self) -> "Running":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [self.server.python(), *(word.format(port=self.port) for word in self.server.command)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'device_runtime'}:{HERE / 'peers'}"}
        self.process = subprocess.Popen(
            ["taskset", "--cpu-list", ",".join(map(str, sorted(self.cpus))), *command],
            env=environment,
            cwd=HERE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        limit = time.monotonic() + START_LIMIT_S
        while self.process.poll() is None and time.monotonic() < limit:
            if self.answers(timeout_s=5):
                return self
            time.sleep(0.05)
        self.__exit__()
        raise MissingError(f"{self.server.name} did not answer within {START_LIMIT_S:.0f} s")

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            os.killpg(self.process.pid, signal.SIGKILL)  # what outlives its parent
        self.process.wait()

    def connect(self, timeout_s: float) -> socket.socket:
        """A connection; an OSError where there is none."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def connect_near(self, timeout_s: float) -> socket.socket:
        """A connection over its Unix socket where it has one, else TCP; an OSError where there is none."""
        if self.server.unix_socket is None:
            return self.connect(timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(self.server.unix_socket.format(port=self.port))
        return connection

    def answers(self, timeout_s: float) -> bool:
        """Whether it answers the question with 200."""
        try:
            with self.connect(timeout_s) as connection:
                return ask(connection, self.server.question.wire)
        except OSError:
            return False

    def processes(self) -> Iterator[int]:
        """Ids of all its processes."""
        pending = [self.process.pid]
        while pending:
            yield (parent := pending.pop())
            for task in Path(f"/proc/{parent}/task").glob("*"):
                pending += [int(child) for child in (task / "children").read_text().split()]

    def model_processes(self) -> list[int]:
        """Ids of the processes that have onnxruntime loaded, youngest first."""
        ids = [
            pid for pid in self.processes() if "onnxruntime_pybind" in Path(f"/proc/{pid}/maps").read_text()
        ]
        return sorted(ids, reverse=True)


def ask(connection: socket.socket, wire: bytes) -> bool:
    """Send one request and read its answer whole; returns whether its status is 200.

    Raises:
        OSError: the connection broke, or nothing came in time.
    """
    connection.sendall(wire)
    received = connection.recv(65536)
    while received and b"\r\n\r\n" not in received:
        received += _more(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    lowered = head.lower()
    place = lowered.find(b"content-length:")
    if place >= 0:
        missing = int(lowered[place + 15 :].split(b"\r\n", 1)[0]) - len(body)
        while missing > 0:
            missing -= len(_more(connection))
    elif b"chunked" in lowered:
        while not body.endswith(b"0\r\n\r\n"):
            body += _more(connection)
    return head.startswith(b"HTTP/1.1 200")


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionResetError("the server closed the connection")
    return data
