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

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from service_latency import make_packages
from service_servers import (
    INPUT,
    JSON_HEAD,
    MODEL,
    SHAPE,
    MissingError,
    Question,
    Running,
    Server,
    ask,
    oip_binary,
    oip_json,
)

BLOCK = 50  # requests in turn with as many bare runs
CLIENTS = 16
RETURN_LIMIT_S = 30.0
SETTLE_S = 2.0  # after the first answer, for the processes that start later


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
    make_packages(folder)
    unix_socket = f"{folder}/edgekit-{{port}}.sock"
    command = (
        "-m",
        "edgekit_runtime.cli",
        "serve",
        "--package",
        str(folder / "small.edgepkg"),
        "--port",
        "{port}",
    )
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
    """Right answers per second to 16 connections, and what went wrong."""
    question = running.server.question
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder, "body"), Path(folder, "post.lua")
        body.write_bytes(question.body)
        heads = (line.split(": ", 1) for line in question.head.split("\r\n") if line)
        lines = [f'wrk.headers["{name}"] = "{value}"' for name, value in heads]
        script.write_text(
            f'wrk.method = "POST"\nwrk.body = io.open("{body}", "rb"):read("*a")\n' + "\n".join(lines)
        )
        command = [
            "taskset",
            "--cpu-list",
            ",".join(map(str, sorted(cpus))),
            "wrk",
            "--threads",
            "1",
            "--connections",
            str(CLIENTS),
        ]
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
    """A row of the table."""
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


def main() -> int:
    """Print the table."""
    values = np.random.default_rng(0).uniform(0, 1, SHAPE).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        return compare([*ours(values, Path(folder)), *peers(values)], values)


def compare(servers: list[Server], values: NDArray[np.float32]) -> int:
    """Print the table of the servers that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[server.name for server in servers])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing: apt-get install wrk")
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("needs two cores: one for the server, one for its clients")
    print(
        "| server | bare p50 / p99 us | added p50 us | added p99 us | requests/s, 16 clients | on both cores"
        " | return s |"
    )
    print("|---|---|---|---|---|---|---|")
    for server in servers:
        if arguments.only and server.name not in arguments.only:
            continue
        try:
            print(measure(server, values, arguments.seconds), flush=True)
        except (MissingError, OSError) as missing:
            print(f"{server.name}: skipped, {missing}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
