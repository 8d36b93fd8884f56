"""What the service adds to a bare `InferenceSession.run`, and what it costs while nobody asks.

    scripts/python benchmarks/service_latency.py [--seconds 10]
        [--device-python DEVICE_ENV/bin/python] [--idle-seconds 20]

- Added latency: client and server share one core, so that no other core has to wake up; blocks of requests
  take turns with blocks of bare runs of the same file in this process. "added" is the difference of the
  medians, and of the 99th percentiles. Everything is on: scheduler, metrics, statistics, deadlines (stated).
  "prepared bytes" sends the same request again and again and reads the answer; "client" is our own client,
  whose work in Python counts too.
- Shared memory: a model that copies one value out of a float32 tensor of 4.9 MB, which is written in place.
- gRPC: the same small model, and a copy of one value out of 150 kB, asked by tritonclient over HTTP/2 on the
  Unix socket; its work in Python and C++ counts too. "cpu_us" is the service's time for one request. In this
  process, so all that tritonclient needs is in this environment (requirements/dev.txt).
- Idle: PSS and CPU time of the service with one small model, and the time from its start to "ready", by the
  clock and of a processor, which the load of the machine changes less; with `--device-python` by the
  environment of a device: requirements/device.txt, or `edgekit[device]` as pip installs it.

Every figure is of this machine and this run: compare ratios.
"""

import telemetry_off  # noqa: F401

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from edgekit_runtime import Client
from edgekit_runtime.client.requests import InferOptions, make_template
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.packaging.signing_keys import load_signer
from graphs import GraphBuilder
from processes import read_cpu_s, read_memory
from results import make_parser
from serving import INPUT, MODEL, SHAPE, Service, serving, write_signed

BLOCK = 50
HOST = "Host: localhost\r\n"
LARGE = (1, 3, 640, 640)  # 4.9 MB
IMAGE = (1, 3, 112, 112)  # 150 kB
CPU_CALLS = 1000
STARTS = 7


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each comparison")
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--device-python", default=sys.executable)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, first, image = write_packages(folder)
        found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        with serving(folder, small, first) as service:
            found["added_us"] = measure_small(service, arguments.seconds)
            found["shared_4.9_mb_added_us"] = measure_large(service, folder, arguments.seconds)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        with serving(folder, small, image, words=("--grpc-unix-socket", f"{folder}/grpc.sock")) as service:
            found["grpc_added_us"] = measure_grpc(service, folder, arguments.seconds)
        idle = partial(measure_idle, folder, small, arguments.device_python, arguments.idle_seconds)
        found["idle"] = idle()
        found["idle, gRPC listens"] = idle(("--grpc-unix-socket", f"{folder}/grpc.sock"))
        print(json.dumps(found, indent=2))


def write_packages(folder: Path) -> tuple[Path, Path, Path]:
    """Write the packages of the small model and of two that copy a value, which are also there as files."""
    sign, draws = load_signer(folder=folder / "keys"), np.random.default_rng(0)
    copies = []
    for name, shape in (("first", LARGE), ("image", IMAGE)):
        build = GraphBuilder()
        ends = build.weight(np.zeros(4, np.int64)), build.weight(np.ones(4, np.int64))
        y = build.add("Slice", ["x", *ends], "y")
        model = build.model({"x": shape}, {y: (1, 1, 1, 1)}).SerializeToString()
        (folder / f"{name}.onnx").write_bytes(model)
        copies.append(write_signed(folder, name, model, {"x": draws.random(shape, np.float32)}, sign))
    feeds = {INPUT: draws.random(SHAPE, np.float32)}
    return write_signed(folder, "small", MODEL.read_bytes(), feeds, sign), copies[0], copies[1]


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


def measure_small(service: Service, seconds: float) -> dict[str, Any]:
    bare, own = open_bare(MODEL), OrtSession(MODEL, OrtOptions(threads=1))
    name = own.inputs[0].name
    x = np.random.default_rng(1).random((1, 1, 8, 8), np.float32)
    feed = {name: x}
    names = [spec.name for spec in own.outputs]
    with Client(service.path) as client, Client(f"127.0.0.1:{service.port}") as tcp, ExitStack() as stack:
        shared = client.shared(x.shape)
        shared[...] = x
        client.infer("small", feed, timeout_s=10.0)
        request = (
            make_template(InferOptions("small", None, 0, 10.0), feed, [None], (), HOST).start + x.tobytes()
        )
        send_prepared = send_repeatedly(stack, service.path, request)
        pin(service.pid)
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


def measure_large(service: Service, folder: Path, seconds: float) -> dict[str, Any]:
    """A tensor of 4.9 MB in shared memory, written in place, and over the socket."""
    bare = open_bare(folder / "first.onnx")
    x = np.random.default_rng(1).random(LARGE, np.float32)
    with Client(service.path) as client, ExitStack() as stack:
        shared, out = client.shared(LARGE), client.shared((1, 1, 1, 1))
        shared[...] = x
        client.infer("first", {"x": shared})
        place = client._place(shared)
        request = make_template(InferOptions("first", None, 0, 10.0), {"x": shared}, [place], (), HOST).start
        pin(service.pid)
        times = take_turns(
            {
                "bare": lambda: bare.run(["y"], {"x": x}),
                "shared, prepared bytes": send_repeatedly(stack, service.path, request),
                "shared, bound": client.bind("first", {"x": shared}, outputs={"y": out}),
                "shared": lambda: client.infer("first", {"x": shared}),
                "socket": lambda: client.infer("first", {"x": x}),
            },
            seconds,
        )
    return compare(times)


def measure_grpc(service: Service, folder: Path, seconds: float) -> dict[str, Any]:
    """Both models over gRPC and, for comparison, over HTTP by our client."""
    import tritonclient.grpc as triton

    draws, found = np.random.default_rng(1), dict[str, Any]()
    with Client(service.path) as client:
        grpc = triton.InferenceServerClient(f"unix:{folder}/grpc.sock")
        for name, model, shape in (("small", MODEL, (1, 1, 8, 8)), ("image", folder / "image.onnx", IMAGE)):
            bare = open_bare(model)
            x, tensor = draws.random(shape, np.float32), bare.get_inputs()[0].name
            source = triton.InferInput(tensor, shape, "FP32")
            source.set_data_from_numpy(x)
            calls: dict[str, Callable[[], object]] = {
                "bare": partial(bare.run, None, {tensor: x}),
                "tritonclient": partial(grpc.infer, name, [source]),
                "HTTP, client": partial(client.infer, name, {tensor: x}),
            }
            for call in calls.values():
                call()
            pin(service.pid)
            found[name] = compare(take_turns(calls, seconds))
            for way in ("tritonclient", "HTTP, client"):
                before_s = read_cpu_s(service.pid)
                for _ in range(CPU_CALLS):
                    calls[way]()
                used_s = read_cpu_s(service.pid) - before_s
                found[name][way]["cpu_us"] = round(used_s / CPU_CALLS * 1e6)
        grpc.close()
    return found


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


def measure_idle(
    folder: Path, package: Path, python: str, idle_seconds: float, words: tuple[str, ...] = ()
) -> dict[str, Any]:
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    starts, used = [], []
    for _ in range(STARTS):
        with serving(folder, package, python=python, words=words) as service:
            starts.append(service.ready_s * 1e3)
            used.append(read_cpu_s(service.pid) * 1e3)
    with serving(folder, package, python=python, words=words) as service, Client(service.path) as client:
        client.metadata()
        time.sleep(1)
        before_s = read_cpu_s(service.pid)
        time.sleep(idle_seconds)
        used_s = read_cpu_s(service.pid) - before_s
        pss_bytes = read_memory(service.pid)["Pss"]
    return {
        "python": python,
        "pss_mb": round(pss_bytes / 1e6, 1),
        "pss_mib": round(pss_bytes / 2**20, 1),
        "cpu_percent": round(100 * used_s / idle_seconds, 3),
        "ready_ms_median": round(statistics.median(starts)),
        "ready_ms_best": round(min(starts)),
        "ready_cpu_ms_median": round(statistics.median(used)),
        "ready_cpu_ms_best": round(min(used)),
    }


if __name__ == "__main__":
    main()
