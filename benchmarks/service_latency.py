"""What the service adds to a bare `InferenceSession.run`, and what it costs while nobody asks.

    scripts/python benchmarks/service_latency.py [--seconds 10]
        [--device-python DEVICE_ENV/bin/python] [--idle-seconds 20] [--profile]

- Added latency: client and server share one core, so that no other core has to wake up; blocks of requests
  take turns with blocks of bare runs of the same file in this process. "added" is the difference of the
  medians, and of the 99th percentiles. Everything is on: scheduler, metrics, statistics, deadlines (stated).
  "prepared bytes" sends the same request again and again and reads the answer; "client" is our own client,
  whose work in Python counts too.
- Shared memory: a model that copies one value out of a float32 tensor of 4.9 MB, which is written in place.
- Idle: PSS and CPU time of the service with one small model, and the time from its start to "ready", by the
  clock and of a processor, which the load of the machine changes less; with `--device-python` by the
  environment of a device: requirements/device.txt, or `edgekit[device]` as pip installs it.

Every figure is of this machine and this run: compare ratios.
"""

import telemetry_off  # noqa: F401

import argparse
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner

from edgekit_runtime import Client
from edgekit_runtime.client.requests import InferOptions, make_template
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.packaging.signing_keys import StatementSigner

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny" / "digits_cnn.onnx"
BLOCK = 50
HOST = "Host: localhost\r\n"
LARGE = (1, 3, 640, 640)  # 4.9 MB
STARTS = 7


def main() -> None:
    """Measure all and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each comparison")
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--device-python", default=sys.executable)
    parser.add_argument("--profile", action="store_true", help="print where the server's time goes, and end")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_packages(folder)
        if arguments.profile:
            profile(folder)
            return
        found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        with serve(folder, sys.executable) as (process, path, _):
            found["added_us"] = measure_small(process, path, arguments.seconds)
            found["shared_4.9_mb_added_us"] = measure_large(process, path, folder, arguments.seconds)
        found["idle"] = measure_idle(folder, arguments.device_python, arguments.idle_seconds)
        print(json.dumps(found, indent=2))


def make_packages(folder: Path) -> None:
    """Write the packages of the small model and of the trivial one, signed by a key of their own."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", "starts", "ends"], ["y"])],
        "first",
        [helper.make_tensor_value_info("x", kind, list(LARGE))],
        [helper.make_tensor_value_info("y", kind, [1, 1, 1, 1])],
        [
            onnx.numpy_helper.from_array(np.zeros(4, np.int64), "starts"),
            onnx.numpy_helper.from_array(np.ones(4, np.int64), "ends"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (folder / "first.onnx").write_bytes(model.SerializeToString())
    key = Ed25519PrivateKey.generate()
    (folder / "keys").mkdir()
    (folder / "keys" / "bench.pub.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    signer = StatementSigner(CryptoSigner(key))
    write(folder, "small", MODEL.read_bytes(), (1, 1, 8, 8), signer)
    write(folder, "first", (folder / "first.onnx").read_bytes(), LARGE, signer)


def write(
    folder: Path,
    name: str,
    model: bytes,
    shape: tuple[int, ...],
    signer: StatementSigner,
    version: str = "1.0.0",
) -> None:
    """Write one package, whose golden output is what onnxruntime computes here."""
    session = OrtSession(model, OrtOptions(threads=1))
    values = np.random.default_rng(0).random(shape, np.float32)
    (given,), (got,) = session.inputs, session.outputs
    expected = session.run({given.name: values})[got.name]
    contents = {"model.onnx": model, "golden/in.bin": values.tobytes(), "golden/out.bin": expected.tobytes()}
    roles = {"model.onnx": "model", "golden/in.bin": "golden", "golden/out.bin": "golden"}
    manifest = Manifest(
        name=name,
        version=version,
        target="x86-64",
        inputs=session.inputs,
        outputs=session.outputs,
        artifacts=tuple(
            Artifact(path, len(data), hash_bytes(data), roles[path])
            for path, data in sorted(contents.items())
        ),
        backend=BackendChoice("ort", "model.onnx", {"threads": 1}),
        golden=Golden(
            (GoldenInput(given.name, "float32", shape, "golden/in.bin"),),
            (GoldenOutput(got.name, "float32", expected.shape, "golden/out.bin", 1e-4, 1e-4),),
        ),
    )
    file = f"{name}.edgepkg" if version == "1.0.0" else f"{name}-{version}.edgepkg"
    write_package(folder / file, manifest, contents, signer)


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serve(folder: Path, python: str, *packages: str) -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    """Run the service; yields its process, its Unix socket and the seconds until it was ready."""
    path = str(folder / "bench.sock")
    named = [
        word
        for name in packages or ("small", "first")
        for word in ("--package", str(folder / f"{name}.edgepkg"))
    ]
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [
            *(python, "-m", "edgekit_runtime.cli", "serve", *named),
            *("--keys", str(folder / "keys"), "--unix-socket", path, "--port", "0"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "device_runtime")},
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:  # what loads slowly lets others speak first
            said.append(line)
            if "ready" in line:
                break
        else:
            raise SystemExit("".join(said))
        ready_s = time.perf_counter() - began_s
        yield process, path, ready_s
    finally:
        process.send_signal(signal.SIGTERM)
        with process:
            process.wait(30)


def pin(process: int) -> None:
    """Put the server and this process on one core."""
    core = {max(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, core)
    for task in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(task.name), core)


def open_bare(model: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def take_turns(ways: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Return microseconds of each call, blocks of the ways in turn."""
    clock, found = time.perf_counter, {name: list[float]() for name in ways}
    until_s = clock() + seconds
    while clock() < until_s:
        for name, call in ways.items():
            call()  # the first after a change finds cold caches
            for _ in range(BLOCK):
                begin = clock()
                call()
                found[name].append((clock() - begin) * 1e6)
    return found


def measure_small(process: "subprocess.Popen[str]", path: str, seconds: float) -> dict[str, Any]:
    """Every way to run the small CNN, against the bare one."""
    bare, own = open_bare(MODEL), OrtSession(MODEL, OrtOptions(threads=1))
    name = own.inputs[0].name
    x = np.random.default_rng(1).random((1, 1, 8, 8), np.float32)
    feed = {name: x}
    names = [spec.name for spec in own.outputs]
    port = find_port(process)
    with Client(path) as client, Client(f"127.0.0.1:{port}") as tcp, ExitStack() as stack:
        shared = client.shared(x.shape)
        shared[...] = x
        client.infer("small", feed, timeout_s=10.0)
        request = (
            make_template(InferOptions("small", None, 0, 10.0), feed, [None], (), HOST).start + x.tobytes()
        )
        send_prepared = send_repeatedly(stack, path, request)
        pin(process.pid)
        times = take_turns(
            {
                "bare": lambda: bare.run(names, feed),
                "session": lambda: own.run(feed),
                "prepared bytes": send_prepared,
                "client, bound": client.bind("small", feed, timeout_s=10.0),
                "client": lambda: client.infer("small", feed, timeout_s=10.0),
                "client, shared memory": lambda: client.infer("small", {name: shared}, timeout_s=10.0),
                "client, TCP": lambda: tcp.infer("small", feed, timeout_s=10.0),
            },
            seconds,
        )
    return compare(times)


def measure_large(
    process: "subprocess.Popen[str]", path: str, folder: Path, seconds: float
) -> dict[str, Any]:
    """A tensor of 4.9 MB in shared memory, written in place, and over the socket."""
    bare = open_bare(folder / "first.onnx")
    x = np.random.default_rng(1).random(LARGE, np.float32)
    with Client(path) as client, ExitStack() as stack:
        shared, out = client.shared(LARGE), client.shared((1, 1, 1, 1))
        shared[...] = x
        client.infer("first", {"x": shared})
        place = client._place(shared)
        request = make_template(InferOptions("first", None, 0, 10.0), {"x": shared}, [place], (), HOST).start
        pin(process.pid)
        times = take_turns(
            {
                "bare": lambda: bare.run(["y"], {"x": x}),
                "shared, prepared bytes": send_repeatedly(stack, path, request),
                "shared, bound": client.bind("first", {"x": shared}, outputs={"y": out}),
                "shared": lambda: client.infer("first", {"x": shared}),
                "socket": lambda: client.infer("first", {"x": x}),
            },
            seconds,
        )
    return compare(times)


def send_repeatedly(stack: ExitStack, path: str, request: bytes) -> Callable[[], object]:
    """Return what sends the same bytes on a connection of its own and reads the answer."""
    plain = stack.enter_context(socket.socket(socket.AF_UNIX))
    plain.connect(path)

    def send() -> None:
        plain.sendall(request)
        assert plain.recv(65536).startswith(b"HTTP/1.1 200")

    return send


def compare(times: dict[str, list[float]]) -> dict[str, Any]:
    bare = np.percentile(times["bare"], [50, 99])
    found: dict[str, Any] = {"bare": {"p50": round(bare[0], 1), "p99": round(bare[1], 1)}}
    for name, values in times.items():
        if name != "bare":
            p50, p99 = np.percentile(values, [50, 99]) - bare
            found[name] = {"p50": round(p50, 1), "p99": round(p99, 1), "count": len(values)}
    return found


def find_port(process: "subprocess.Popen[str]") -> int:
    """Return the TCP port at which the process listens."""
    inodes = {str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            return int(words[1].split(":")[1], 16)
    raise SystemExit("the service listens on no TCP port")


def measure_idle(folder: Path, python: str, idle_seconds: float) -> dict[str, Any]:
    """Memory, CPU and time to ready, with the small model alone."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    starts, used = [], []
    for _ in range(STARTS):
        with serve(folder, python, "small") as (process, path, ready_s):
            starts.append(ready_s * 1e3)
            used.append(cpu_seconds(process.pid) * 1e3)
    with serve(folder, python, "small") as (process, path, _):
        with Client(path) as client:
            client.metadata()
            time.sleep(1)
            before_s = cpu_seconds(process.pid)
            time.sleep(idle_seconds)
            used_s = cpu_seconds(process.pid) - before_s
        pss_kb = next(
            int(line.split()[1])
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            if line.startswith("Pss:")
        )
    return {
        "python": python,
        "pss_mb": round(pss_kb * 1024 / 1e6, 1),
        "pss_mib": round(pss_kb / 1024, 1),
        "cpu_percent": round(100 * used_s / idle_seconds, 3),
        "ready_ms_median": round(statistics.median(starts)),
        "ready_ms_best": round(min(starts)),
        "ready_cpu_ms_median": round(statistics.median(used)),
        "ready_cpu_ms_best": round(min(used)),
    }


def cpu_seconds(process: int) -> float:
    """Return the CPU time of all threads, in nanosecond steps."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{process}/task").iterdir()
    )


def profile(folder: Path) -> None:
    """Print the profile of the server's side of 20,000 requests, driven without a loop."""
    import asyncio
    import cProfile
    import pstats

    from edgekit_runtime.service.http.connection import Connection
    from edgekit_runtime.service.models.file_source import PackageFiles
    from edgekit_runtime.service.options.config import Listen, ServiceConfig
    from edgekit_runtime.service.server import Service
    from edgekit_runtime.trust.trust_store import TrustStore

    x = np.zeros((1, 1, 8, 8), np.float32)

    async def run() -> None:
        config = ServiceConfig(listen=Listen(unix_socket="", host="127.0.0.1", port=0))
        source = PackageFiles([folder / "small.edgepkg"], TrustStore.from_folder(folder / "keys"))
        service = Service(config, source)
        await service.registry.load_all()
        ours, theirs = socket.socketpair()
        connection = Connection(service.http, theirs, is_local=True)
        name = service.registry.models.find("small", None).codec.inputs[0].name
        request = record_request(name, x)

        def ask(times: int) -> None:
            for _ in range(times):
                ours.sendall(request)
                connection._on_readable()  # what the loop would call
                ours.recv(65536)

        ask(1000)
        profiler = cProfile.Profile()
        profiler.runcall(ask, 20_000)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        await service.stop()

    asyncio.run(run())


def record_request(name: str, x: Any) -> bytes:
    """Return the bytes that the client sends."""
    return (
        make_template(InferOptions("small", None, 0, None), {name: x}, [None], (), HOST).start + x.tobytes()
    )


if __name__ == "__main__":
    main()
