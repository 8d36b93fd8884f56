"""What a request to a tail costs beside the model: ours against Starlette/uvicorn, on loopback, in one run.

    scripts/python benchmarks/offload_transport.py [--ray] [--json FILE]

About 40 s, with Ray Serve 120. Two models that compute nothing: 602 kB up and 4 kB back, and 4 kB both
ways. All servers speak the protocol, and are asked by our client and by a bare socket that sends prepared
bytes. The floor is a socket that receives as many bytes into one buffer and knows no protocol. All take turns
of 25 requests. Starlette and Ray run in environments of their own, made on first use. Ray's processes listen
on all addresses, so `--ray` needs root: it puts the benchmark into a network namespace.

The ratio is taken within each round, where the servers are asked a few milliseconds apart, and the median of
these counts: a processor that is now fast and now slow makes the ratio of two medians of a whole run jump.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tests.free_port import free_port

from edgekit_runtime.client.client import Client
from edgekit_runtime.client.link import Address, open_connection
from edgekit_runtime.client.requests import InferOptions, make_template
from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.packaging.signing_keys import load_signer
from environments import make_environment
from graphs import GraphBuilder
from results import machine, make_parser, write_json
from serving import ROOT, write_signed

HERE = Path(__file__).resolve().parent
PEER = ("starlette==0.50.0", "uvicorn[standard]==0.38.0", "onnxruntime==1.24.4", "numpy==2.4.6")
RAY = ("ray[serve]==2.60.0", "onnxruntime==1.24.4", "numpy==2.4.6")
OUTPUTS = 1000
WORKS = {"602 kB up, 4 kB back": ("large", 224 * 224 * 3), "4 kB up, 4 kB back": ("small", 1000)}
TURN, WARM_UP = 25, 100
GOAL_MS, GOAL_RATIO = 1.0, 0.6
START_LIMIT_S = 60.0
OURS, PEER_NAME, RAY_NAME, FLOOR = "edgekit", "Starlette/uvicorn", "Ray Serve", "bytes over TCP"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h

Ask: TypeAlias = Callable[[], "np.ndarray"]


def write_models(folder: Path) -> None:
    """Write models y[N, 1000] = the first values of x[N, values], as ONNX files and as packages."""
    sign = load_signer(folder=folder / "keys")
    for name, values in WORKS.values():
        build = GraphBuilder()
        limits = [build.weight(np.array([value])) for value in (0, OUTPUTS, 1)]  # start, end, axis
        y = build.add("Slice", ["x", *limits], "y")
        model = build.model({"x": ("N", values)}, {y: ("N", OUTPUTS)}).SerializeToString()
        (folder / f"{name}.onnx").write_bytes(model)
        row = np.random.default_rng(0).normal(size=(1, values)).astype(np.float32)
        write_signed(folder, name, model, {"x": row}, sign)
    (folder / "service.toml").write_text('[listen]\nunix_socket = ""\n[http]\nserver_timing = true\n')


@contextlib.contextmanager
def running(command: list[str], port: int, folder: Path) -> Iterator[None]:
    """Start a server, wait until it accepts, and end it after the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "device_runtime"), "EDGEKIT_STATE": str(folder)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        limit_s = time.monotonic() + START_LIMIT_S
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < limit_s, f"{command} did not start"
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def ask_by_client(port: int, name: str, row: "np.ndarray") -> Ask:
    """A function that asks a server of the protocol through our client."""
    client = Client(f"127.0.0.1:{port}")
    return lambda: client.infer(name, {"x": row})["y"]


def ask_by_socket(port: int, name: str, row: "np.ndarray") -> Ask:
    """A function that sends the same request as prepared bytes, and reads the answer's length only."""
    connection = open_connection(Address.parse(f"127.0.0.1:{port}"), START_LIMIT_S)
    options = InferOptions(name, None, 0, None)
    start = make_template(options, {"x": row}, [None], (), "Host: localhost\r\n").start
    answer = memoryview(bytearray(1 << 16))

    def ask() -> "np.ndarray":
        send(connection, start, row)
        filled, end = connection.recv_into(answer), 0
        while not end or filled < end:
            head, is_whole, _ = bytes(answer[:filled]).lower().partition(b"\r\n\r\n")
            if is_whole:
                end = len(head) + 4 + int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
            if filled < end or not end:
                filled += connection.recv_into(answer[filled:])
        return np.frombuffer(answer[end - 4 * OUTPUTS : end], np.float32)[None].copy()

    return ask


def ask_raw(port: int, row: "np.ndarray") -> Ask:
    """A function that sends a row, and takes as many bytes as an output has."""
    connection = open_connection(Address.parse(f"127.0.0.1:{port}"), START_LIMIT_S)
    answer = np.empty((1, OUTPUTS), np.float32)
    answer[:] = row[:, :OUTPUTS]  # these bytes are not looked at

    def ask() -> "np.ndarray":
        send(connection, b"", row)
        left = 4 * OUTPUTS
        while left:
            left -= len(connection.recv(left))
        return answer

    return ask


def send(connection: socket.socket, start: bytes, row: "np.ndarray") -> None:
    """Send both, in one call where the socket takes them."""
    sent = connection.sendmsg((start, row))
    if sent < len(start) + row.nbytes:
        connection.sendall(memoryview(row.reshape(-1).view(np.uint8))[sent - len(start) :])


def measure(
    asks: dict[tuple[str, str], Ask], expected: "np.ndarray", rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each request, by who was asked and how; in turns."""
    times: dict[tuple[str, str], list[float]] = {name: [] for name in asks}
    for ask in asks.values():
        for _ in range(WARM_UP):
            np.testing.assert_array_equal(ask(), expected)
    for index in range(rounds):
        for name in list(asks) if index % 2 else reversed(list(asks)):
            ask = asks[name]
            for _ in range(TURN):
                began = time.perf_counter()
                ask()
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def leave_network() -> None:
    """Go on in a network namespace where nothing but loopback is."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
        sys.exit(f"--ray needs root, for a network namespace: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def start_servers(folder: Path, stack: contextlib.ExitStack, *, with_ray: bool) -> dict[str, int]:
    peers = {PEER_NAME: (make_environment("starlette", PEER, "0.3 GB"), "serve_starlette.py")}
    if with_ray:
        peers[RAY_NAME] = make_environment("ray", RAY, "0.6 GB"), "serve_ray.py"
        leave_network()
    ports = {OURS: free_port()}
    command = [sys.executable, "-m", "edgekit_runtime.cli", "serve", "--package", str(folder)]
    command += ["--keys", f"{folder}/keys", "--config", f"{folder}/service.toml", "--port", str(ports[OURS])]
    stack.enter_context(running(command, ports[OURS], folder))
    for name, (python, script) in peers.items():
        if python is not None:
            ports[name] = free_port()
            command = [str(python), str(HERE / "peers" / script), str(folder), str(ports[name])]
            stack.enter_context(running(command, ports[name], folder))
    for port in ports.values():
        wait_for_answer(port)  # they listen before their models are loaded
    return ports


def wait_for_answer(port: int) -> None:
    model, values = WORKS["4 kB up, 4 kB back"]
    ask, limit_s = (
        ask_by_client(port, model, np.zeros((1, values), np.float32)),
        time.monotonic() + START_LIMIT_S,
    )
    while time.monotonic() < limit_s:
        with contextlib.suppress(EdgekitError):
            ask()
            return
        time.sleep(0.2)
    ask()  # raises


def measure_work(folder: Path, ports: dict[str, int], work: str, rounds: int) -> list[dict[str, Any]]:
    model, values = WORKS[work]
    row = np.random.default_rng(1).normal(size=(1, values)).astype(np.float32)
    asks: dict[tuple[str, str], Ask] = {}
    for server, port in ports.items():
        asks[server, "Client"] = ask_by_client(port, model, row)
        asks[server, "socket"] = ask_by_socket(port, model, row)
    floor = free_port()
    command = [sys.executable, str(HERE / "peers" / "serve_bytes.py"), str(row.nbytes), str(4 * OUTPUTS)]
    with running([*command, str(floor)], floor, folder):
        asks[FLOOR, "socket"] = ask_raw(floor, row)
        times = measure(asks, row[:, :OUTPUTS], rounds)
    found = []
    for (server, client), milliseconds in times.items():
        p10, p50, p99 = np.percentile(milliseconds, (10, 50, 99))
        names = {"work": work, "server": server, "client": client}
        turns = np.median(np.reshape(milliseconds, (rounds, TURN)), axis=1).tolist()
        found.append({**names, "p10_ms": p10, "p50_ms": p50, "p99_ms": p99, "turns_ms": turns})
    return found


def compare_turns(ours: dict[str, Any], peer: dict[str, Any], floor: dict[str, Any]) -> dict[str, float]:
    """Return the ratio of two rows, within each round: its median and quartiles; and of their p50.

    Also that of what they take above the floor, where it counts how much faster the servers' own work is.
    """
    turns = [np.asarray(row["turns_ms"]) for row in (ours, peer, floor)]
    lower, median, upper = np.quantile(turns[0] / turns[1], (0.25, 0.5, 0.75))
    above = float(np.median((turns[0] - turns[2]) / (turns[1] - turns[2])))
    of_p50 = ours["p50_ms"] / peer["p50_ms"]
    return {"lower": lower, "median": median, "upper": upper, "of_p50": of_p50, "above_floor": above}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_models(folder)
        ports = start_servers(folder, stack, with_ray=arguments.ray)
        rows = [row for work in WORKS for row in measure_work(folder, ports, work, arguments.rounds)]
    for row in rows:
        print(
            "{work:22} {server:18} by {client:7} p10 {p10_ms:6.3f} ms  p50 {p50_ms:6.3f}"
            "  p99 {p99_ms:7.3f}".format(**row)
        )
    large = {(row["server"], row["client"]): row for row in rows if row["work"] == next(iter(WORKS))}
    ratios = {}
    for client in ("Client", "socket"):
        ours, peer = large[OURS, client], large.get((PEER_NAME, client))
        if peer is None:
            continue
        ratios[client] = compare_turns(ours, peer, large[FLOOR, "socket"])
        print(
            f"602 kB by {client}: {ours['p50_ms']:.3f} ms (goal {GOAL_MS}), "
            + "{median:.2f} ({lower:.2f} to {upper:.2f}) x Starlette".format(**ratios[client])
            + f" (goal {GOAL_RATIO}); of the p50: {ratios[client]['of_p50']:.2f};"
            + f" above the floor: {ratios[client]['above_floor']:.2f}"
        )
    write_json(arguments.json, {"machine": machine(), "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
