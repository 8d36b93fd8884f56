"""What a request to a tail costs beside the model: ours against Starlette/uvicorn, on loopback, in one run.

    scripts/python benchmarks/offload_transport.py [--rounds 40] [--json FILE]

About 30 s. Two models that compute nothing: 602 kB up and 4 kB back, and 4 kB both ways. Ours is asked by our
client over TCP; Starlette by a bare socket that sends prepared bytes, the fastest client there is. The two
take turns of 25 requests. Starlette runs in an environment of its own, made on first use.
"""

import telemetry_off  # noqa: F401

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner

from edgekit_runtime.client.client import Client
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from environments import make_environment
from results import machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEER = ("starlette==0.50.0", "uvicorn[standard]==0.38.0", "onnxruntime==1.24.4", "numpy==2.4.6")
OUTPUTS = 1000
WORKS = {"602 kB up, 4 kB back": ("large", 224 * 224 * 3), "4 kB up, 4 kB back": ("small", 1000)}
TURN, WARM_UP = 25, 100
GOAL_MS, GOAL_RATIO = 1.0, 0.6
START_LIMIT_S = 60.0


def make_model(values: int) -> bytes:
    """y[N, 1000] = the first values of x[N, values]."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    limits = {"start": [0], "end": [OUTPUTS], "axis": [1]}
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", *limits], ["y"])],
        "first",
        [helper.make_tensor_value_info("x", kind, ["N", values])],
        [helper.make_tensor_value_info("y", kind, ["N", OUTPUTS])],
        [onnx.numpy_helper.from_array(np.array(value), name) for name, value in limits.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return model.SerializeToString()


def write_models(folder: Path) -> None:
    """Both models, as ONNX files and as packages, and the key that signs them."""
    key = Ed25519PrivateKey.generate()
    (folder / "keys").mkdir()
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / "keys" / "benchmark.pub.pem").write_bytes(public)
    for name, values in WORKS.values():
        row = np.random.default_rng(0).normal(size=(1, values)).astype(np.float32)
        contents = {
            "golden/x.bin": row.tobytes(),
            "golden/y.bin": row[:, :OUTPUTS].tobytes(),
            "model.onnx": make_model(values),
        }
        (folder / f"{name}.onnx").write_bytes(contents["model.onnx"])
        manifest = Manifest(
            name=name,
            version="1.0.0",
            target="x86-64",
            inputs=(TensorSpec("x", "float32", ("N", values)),),
            outputs=(TensorSpec("y", "float32", ("N", OUTPUTS)),),
            artifacts=tuple(
                Artifact(
                    path,
                    len(data),
                    hashlib.sha256(data).hexdigest(),
                    path.partition("/")[0].partition(".")[0],
                )
                for path, data in contents.items()
            ),
            backend=BackendChoice("ort", "model.onnx", {"threads": 1}),
            golden=Golden(
                (GoldenInput("x", "float32", (1, values), "golden/x.bin"),),
                (GoldenOutput("y", "float32", (1, OUTPUTS), "golden/y.bin", 0.0, 0.0),),
            ),
        )
        write_package(folder / f"{name}.edgepkg", manifest, contents, StatementSigner(CryptoSigner(key)))
    (folder / "service.toml").write_text('[listen]\nunix_socket = ""\n[http]\nserver_timing = true\n')


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def ask_ours(port: int, name: str, row: "np.ndarray") -> Callable[[], "np.ndarray"]:
    """A function that asks our service through our client."""
    client = Client(f"127.0.0.1:{port}")
    return lambda: client.infer(name, {"x": row})["y"]


def ask_peer(port: int, name: str, row: "np.ndarray") -> Callable[[], "np.ndarray"]:
    """A function that sends prepared bytes to Starlette."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = row.tobytes()
    head = f"POST /{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def ask() -> "np.ndarray":
        sent = connection.sendmsg((head, body))
        if sent < len(head) + len(body):
            connection.sendall(memoryview(body)[sent - len(head) :])
        received = connection.recv(1 << 16)
        while len(received) < received.find(b"\r\n\r\n") + 4 + 4 * OUTPUTS or b"\r\n\r\n" not in received:
            received += connection.recv(1 << 16)
        return np.frombuffer(received[received.index(b"\r\n\r\n") + 4 :], np.float32)[None]

    return ask


def measure(
    asks: dict[str, Callable[[], "np.ndarray"]], expected: "np.ndarray", rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each request, by who was asked; in turns."""
    times: dict[str, list[float]] = {name: [] for name in asks}
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


def main() -> None:
    """Print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    python = make_environment("starlette", PEER, "0.3 GB")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        ours, peer = free_port(), free_port()
        command = [sys.executable, "-m", "edgekit_runtime.cli", "serve", "--package", name]
        command += ["--keys", f"{name}/keys", "--config", f"{name}/service.toml", "--port", str(ours)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(running(command, ours, folder))
            time.sleep(2)  # it listens before its models are loaded
            if python is not None:
                peer_command = [str(python), str(HERE / "peers" / "serve_starlette.py"), name, str(peer)]
                stack.enter_context(running(peer_command, peer, folder))
            for work, (model, values) in WORKS.items():
                row = np.random.default_rng(1).normal(size=(1, values)).astype(np.float32)
                asks = {"edgekit": ask_ours(ours, model, row)}
                if python is not None:
                    asks["Starlette/uvicorn"] = ask_peer(peer, model, row)
                for who, times in measure(asks, row[:, :OUTPUTS], arguments.rounds).items():
                    p50, p90, p99 = np.percentile(times, (50, 90, 99))
                    rows.append({"work": work, "server": who, "p50_ms": p50, "p90_ms": p90, "p99_ms": p99})
    for row in rows:
        print(
            "{work:22} {server:18} p50 {p50_ms:7.3f} ms  p90 {p90_ms:7.3f}  p99 {p99_ms:7.3f}".format(**row)
        )
    large = {row["server"]: row["p50_ms"] for row in rows if row["work"].startswith("602")}
    ratio = large["edgekit"] / large["Starlette/uvicorn"] if len(large) > 1 else float("nan")
    print(f"602 kB: {large['edgekit']:.3f} ms (goal {GOAL_MS}), {ratio:.2f} x Starlette (goal {GOAL_RATIO})")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows, "ratio": ratio}, indent=2))


if __name__ == "__main__":
    main()
