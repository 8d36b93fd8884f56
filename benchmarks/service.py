"""The service beside MLServer, LitServe and BentoML: added latency, requests/s, return after a crash.

    scripts/python benchmarks/service.py [--only NAME ...] [--seconds 5]

Needs `wrk` (apt-get install wrk) and two cores; makes the environments of the others on first use (1.5 GB).

- Added latency: the server and this client share one core; requests take turns with bare
  `InferenceSession.run` in this process. "added" is the difference of the medians (of the 99th percentiles).
  edgekit is asked over its Unix socket with binary tensors, the others over TCP in the form that each reads
  fastest; all by the same client, which sends prepared bytes.
- Requests/s: wrk with 16 connections on one core, the server on the other; and both on both cores, the server
  started again, which is where several processes count.
- Return: SIGSEGV to the process that runs the model, where that is not the listening one; seconds until the
  next right answer, at most 30.

Every figure is of this machine and this run: compare ratios.
"""

import telemetry_off  # noqa: F401

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tests.free_port import free_port

from edgekit_toolkit.packaging.signing_keys import load_signer
from environments import make_environment
from processes import list_children
from results import make_parser, print_head
from serving import INPUT, MODEL, ROOT, SHAPE, write_signed

HERE = Path(__file__).resolve().parent
ENGINE = ("onnxruntime==1.24.4", "numpy==2.4.6")  # what requirements/device.txt has for Python 3.11
START_LIMIT_S = 90.0
BLOCK = 50  # requests in turn with as many bare runs
CLIENTS = 16
RETURN_LIMIT_S = 30.0
SETTLE_S = 2.0  # after the first answer, for the processes that start later


class MissingError(Exception):
    """A server cannot be had here; the message says why."""


@dataclass(frozen=True)
class Question:
    """One inference as bytes on the wire; each line of `head` ends in CRLF."""

    path: str
    head: str
    body: bytes

    @property
    def wire(self) -> bytes:
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
        """The interpreter that runs it."""
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
        self.port = free_port()
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
        try:
            with self.connect(timeout_s) as connection:
                return ask(connection, self.server.question.wire)
        except OSError:
            return False

    def processes(self) -> Iterator[int]:
        pending = [self.process.pid]
        while pending:
            yield (parent := pending.pop())
            pending += list_children(parent)

    def model_processes(self) -> list[int]:
        """Ids of the processes that have onnxruntime loaded, youngest first."""
        ids = [
            pid for pid in self.processes() if "onnxruntime_pybind" in Path(f"/proc/{pid}/maps").read_text()
        ]
        return sorted(ids, reverse=True)


def ask(connection: socket.socket, wire: bytes) -> bool:
    """Send one request and read its answer whole; returns whether its status is 200."""
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


def peers(values: NDArray[np.float32]) -> list[Server]:
    """The other projects' servers, MLServer in its fastest setting, in its default, and with two workers."""
    flat = [float(value) for value in values.ravel()]
    model = str(MODEL)
    mlserver = ("mlserver==1.7.1", "uvloop<0.22")  # its worker does not start with newer ones
    shape = ",".join(map(str, SHAPE))
    to_list = Question("/predict", JSON_HEAD, json.dumps({"x": flat}).encode())
    nested = Question("/predict", JSON_HEAD, json.dumps({"x": values.tolist()}).encode())
    run_mlserver, run_litserve = "peers/serve_mlserver.py", "peers/serve_litserve.py"
    return [
        Server("MLServer, in process", (run_mlserver, model, "{port}", "0"), oip_json(flat), mlserver),
        Server("MLServer, one worker", (run_mlserver, model, "{port}", "1"), oip_json(flat), mlserver, True),
        Server("MLServer, two workers", (run_mlserver, model, "{port}", "2"), oip_json(flat), mlserver, True),
        Server("LitServe", (run_litserve, model, "{port}", shape), to_list, ("litserve==0.2.19",), True),
        Server("BentoML", ("peers/serve_bentoml.py", model, "{port}"), nested, ("bentoml==1.4.39",), True),
    ]


def ours(values: NDArray[np.float32], folder: Path) -> list[Server]:
    """The service with the model in itself, in a process of its own, and in two."""
    package = write_signed(
        folder, "small", MODEL.read_bytes(), {INPUT: values}, load_signer(folder=folder / "keys")
    )
    unix_socket = f"{folder}/edgekit-{{port}}.sock"
    command = ("-m", "edgekit_runtime.cli", "serve", "--package", str(package), "--port", "{port}")
    command += ("--keys", str(folder / "keys"), "--unix-socket", unix_socket)
    question = oip_binary(values.tobytes())
    two = folder / "two.toml"
    two.write_text("[models.small]\nisolated = true\n[models.small.isolation]\nprocesses = 2\n")
    return [
        Server("edgekit", command, question, unix_socket=unix_socket),
        Server("edgekit, isolated", (*command, "--isolate", "small"), question, None, True, unix_socket),
        Server("edgekit, two processes", (*command, "--config", str(two)), question, None, True, unix_socket),
    ]


def measure_added(running: Running, values: NDArray[np.float32], seconds: float) -> tuple[float, ...]:
    """Microseconds: median and 99th percentile of bare runs, and what the server adds to each."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(MODEL), options)
    feed, clock = {INPUT: values}, time.perf_counter
    bare: list[float] = []
    served: list[float] = []
    with running.connect_near(30) as connection:
        wire = running.server.question.wire
        end = clock() + seconds
        while clock() < end:
            for _ in range(BLOCK):
                begin = clock()
                session.run(None, feed)
                bare.append(clock() - begin)
            for _ in range(BLOCK):
                begin = clock()
                right = ask(connection, wire)
                served.append(clock() - begin)
                if not right:
                    raise MissingError(f"{running.server.name} refused a request")
    skip = 2 * BLOCK  # warm-up
    p50, p99 = np.quantile(bare[skip:], (0.5, 0.99)) * 1e6
    with_server = np.quantile(served[skip:], (0.5, 0.99)) * 1e6
    return float(p50), float(p99), float(with_server[0] - p50), float(with_server[1] - p99)


def measure_throughput(running: Running, seconds: float, cpus: set[int]) -> tuple[float, str]:
    question = running.server.question
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder, "body"), Path(folder, "post.lua")
        body.write_bytes(question.body)
        heads = (line.split(": ", 1) for line in question.head.split("\r\n") if line)
        lines = [f'wrk.headers["{name}"] = "{value}"' for name, value in heads]
        script.write_text(
            f'wrk.method = "POST"\nwrk.body = io.open("{body}", "rb"):read("*a")\n' + "\n".join(lines)
        )
        command = ["taskset", "--cpu-list", ",".join(map(str, sorted(cpus))), "wrk", "--threads", "1"]
        command += ["--connections", str(CLIENTS)]
        command += ["--duration", f"{max(1, round(seconds))}s", "--script", str(script)]
        command += [f"http://127.0.0.1:{running.port}{question.path}"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", output)
    assert rate is not None, output
    wrong = re.findall(r"(Socket errors.*|Non-2xx.*)", output)
    return float(rate.group(1)), "; ".join(wrong)


def measure_return(running: Running) -> float | None:
    """Seconds from SIGSEGV of the model's process to the next right answer, or None where none comes."""
    os.kill(running.model_processes()[0], signal.SIGSEGV)
    begin = time.monotonic()
    time.sleep(0.01)  # until the kernel has ended it
    while time.monotonic() - begin < RETURN_LIMIT_S:
        if running.answers(timeout_s=1):
            return time.monotonic() - begin
        time.sleep(0.005)
    return None


def measure(server: Server, values: NDArray[np.float32], seconds: float) -> str:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    everywhere = os.sched_getaffinity(0)
    with Running(server, {first}) as running:
        os.sched_setaffinity(0, {first})
        try:
            p50, p99, added_p50, added_p99 = measure_added(running, values, seconds)
        finally:
            os.sched_setaffinity(0, everywhere)
        rate, wrong = measure_throughput(running, seconds, {second})
        returned = ""
        if server.isolated:
            returned_s = measure_return(running)
            returned = f"not within {RETURN_LIMIT_S:.0f} s" if returned_s is None else f"{returned_s:.2f}"
    with Running(server, {first, second}) as running:
        time.sleep(SETTLE_S)
        rate_of_two, wrong_of_two = measure_throughput(running, seconds, {first, second})
    cells = [server.name, f"{p50:.0f} / {p99:.0f}", f"+{added_p50:.0f}", f"+{added_p99:.0f}"]
    cells += [f"{rate:,.0f}", f"{rate_of_two:,.0f}", returned]
    wrong = "; ".join(filter(None, [wrong, wrong_of_two]))
    return f"| {' | '.join(cells)} |" + (f" ({wrong})" if wrong else "")


def main() -> None:
    values = np.random.default_rng(0).uniform(0, 1, SHAPE).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        compare([*ours(values, Path(folder)), *peers(values)], values)


def compare(servers: list[Server], values: NDArray[np.float32]) -> None:
    """Print the table of the servers that the command line names."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[server.name for server in servers])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing: apt-get install wrk")
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("needs two cores: one for the server, one for its clients")
    print_head(
        "server | bare p50 / p99 us | added p50 us | added p99 us | requests/s, 16 clients"
        " | on both cores | return s"
    )
    for server in servers:
        if arguments.only and server.name not in arguments.only:
            continue
        try:
            print(measure(server, values, arguments.seconds), flush=True)
        except (MissingError, OSError) as missing:
            print(f"{server.name}: skipped, {missing}", file=sys.stderr)


if __name__ == "__main__":
    main()
