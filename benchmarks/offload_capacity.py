"""How many devices a server carries at the same p99: planned for capacity, against all on the server.

    PYTHONPATH=device_runtime:toolkit:offload .venv/bin/python benchmarks/offload_capacity.py
        [--only small_memory ...] [--seconds 4] [--rate 2] [--json FILE]

At most 4 minutes as it is. It needs root, two processors and ../shared/models.

The server is our service behind TLS on one processor; the devices are connections of a generator on another
one. Each sends requests at random times (Poisson) at a fixed rate, whether the server keeps up or not. Heads
ran before; their time on the device, as measured, and the link, as modelled, are added to each latency, which
only shifts the arrivals. The largest number of devices whose p99 keeps the limit is found by bisection.
All figures are emulated.
"""

import telemetry_off  # noqa: F401

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import run as run_command
from typing import Any

import numpy as np

import workload_models
from edgekit_offload.planning.envelope import Grid
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.remote.latency_model import LinkState, transfer_s
from edgekit_runtime.remote.offload_server import make_tail_request
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from offload_bench import PORT, TOKEN, Feeds, OffloadBench, print_table, write_json
from planned_ways import PlannedWay, plan_ways

SHARE = 0.2
LINK = LinkState(50e6, 50e6, 0.01, 1e9)  # an office: connections are warm
GENERATED = 8  # different requests
WARM_S = 1.0
MOST_TRIALS = 6
PRECISION = 0.06  # of the number of devices
MOST_DEVICES = 400  # that the generator carries on its processor
GOAL = 2.0


@dataclass(frozen=True)
class Case:
    """Why not all devices run the model themselves.

    Attributes:
        limit_s: of the p99.
        limits: further fields of `PlanInputs`.
        setting: in words.
    """

    limit_s: float
    setting: str
    limits: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "small_memory": Case(0.25, "8 MB for weights, p99 <= 250 ms", {"memory_bytes": 14.5e6}),
    "latency": Case(0.0, "no limit on memory; p99 <= 80 % of the local run"),
}
LATENCY_SHARE = 0.8


def main() -> None:
    """Plan, load, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each trial")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second of one device")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_s, found = time.monotonic(), []
    for name in arguments.only:
        found.append(run_case(name, CASES[name], arguments.seconds, arguments.rate))
        show(found[-1])
        write_json(arguments.json, {"cases": found})
    print(f"{time.monotonic() - began_s:.0f} s; load of this machine {os.getloadavg()[0]:.1f}")


def run_case(name: str, case: Case, seconds: float, rate: float) -> dict[str, Any]:
    """Return how many devices the server carries, always-cloud and planned."""
    content, feeds = workload_models.efficientnet()
    grid = Grid((LINK.up_bits_per_s / 1e6,), (LINK.rtt_s * 1e3,))
    limits = {**case.limits, "objective": "capacity", "requests_per_s": rate}
    limit_s = case.limit_s or LATENCY_SHARE * local_s(content, feeds)
    result, ways = plan_ways(name, content, feeds, share=SHARE, grid=grid, latency_limit_s=limit_s, **limits)
    chosen = result.best(grid.bandwidths_mbit_s[0], grid.rtts_ms[0])
    uploads = [way for way in ways if way.kind == "upload"]
    cloud = min(uploads, key=lambda way: fixed_s(way) + way.server_s)
    planned = next(way for way in ways if way.name == chosen.name)
    simulated = {way.name: way.devices_per_server for way in result.ways}
    rows = []
    for role, way in (("always on the server", cloud), ("planned for capacity", planned)):
        row = {
            "role": role,
            "way": way.name,
            "simulated": simulated[way.name],
            "server_ms": way.server_s * 1e3,
        }
        if way.tail is not None:
            row |= find_capacity(way, feeds, limit_s, seconds=seconds, rate=rate)
        rows.append(row)
    devices = [row.get("devices") for row in rows]
    return {
        "case": name, "setting": case.setting, "limit_ms": limit_s * 1e3, "rows": rows,
        "ratio": devices[1] / devices[0] if all(devices) else None,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def local_s(content: bytes, feeds: Sequence[Feeds]) -> float:
    """Return the time of the whole model on the device."""
    from edgekit_offload.profiling.machine import Machine, RunnableGraph, time_models

    graph = RunnableGraph(content, {"threads": 1}, inputs=feeds[0])
    return time_models(Machine.parse(f"local@{SHARE:.0%}"), [graph], seconds=2)[0].seconds


def find_capacity(
    way: PlannedWay, feeds: Sequence[Feeds], limit_s: float, *, seconds: float, rate: float
) -> dict[str, Any]:
    """Return the most devices whose p99 keeps the limit, by bisection."""
    with tempfile.TemporaryDirectory() as folder, OffloadBench(Path(folder), None) as bench:
        bench.add_tail(way.tail_name or "", way.tail or b"", way.feeds, way.media)
        cpus = sorted(os.sched_getaffinity(0))
        server = bench.serve()
        run_command(["taskset", "-acp", str(cpus[0]), str(server.pid)], check=True, capture_output=True)
        requests = write_requests(bench, way, feeds)
        added_s = fixed_s(way)
        order = {
            "host": bench.testbed.server_host, "port": PORT, "ca_file": str(bench.folder / "server.pem"),
            "requests": requests, "requests_per_s": rate, "seconds": seconds, "warm_s": WARM_S,
        }  # fmt: skip
        low, high, trials = 0, MOST_DEVICES + 1, []
        guess = min(max(int(0.7 / (way.server_s * rate)), 1), MOST_DEVICES)
        for _ in range(MOST_TRIALS):
            trials.append(run_trial(bench, {**order, "devices": guess}, cpus[-1], added_s, limit_s))
            low, high = (guess, high) if trials[-1]["is_kept"] else (low, guess)
            if high - low <= max(1, PRECISION * low):
                break
            guess = (low + high) // 2 if high <= MOST_DEVICES else min(2 * guess, MOST_DEVICES)
            if guess == low:
                break
    return {"devices": low, "added_ms": added_s * 1e3, "trials": trials}


def run_trial(
    bench: OffloadBench, order: dict[str, Any], cpu: int, added_s: float, limit_s: float
) -> dict[str, Any]:
    """Return p50 and p99 with a number of devices."""
    script = str(Path(__file__).with_name("load_generator.py"))
    child = bench.testbed.spawn("server", [sys.executable, script, str(cpu), json.dumps(order)])
    if child.wait(60 + 2 * order["seconds"]) != 0:
        raise SystemExit(f"the load generator ended {child.explain_end()}")
    found = json.loads(child.output)
    errors = [one for one in found if isinstance(one, str)]
    good = [one + added_s for one in found if not isinstance(one, str)]
    p50, p99 = np.quantile(good, (0.5, 0.99)) if good else (np.inf, np.inf)
    return {
        "devices": order["devices"], "requests": len(found), "errors": len(errors),
        "p50_ms": float(p50) * 1e3, "p99_ms": float(p99) * 1e3,
        "is_kept": not errors and bool(p99 <= limit_s),
    }  # fmt: skip


def write_requests(bench: OffloadBench, way: PlannedWay, feeds: Sequence[Feeds]) -> list[str]:
    """Write requests of several samples as the device sends them, and return their paths."""
    head = None if way.head is None else OrtSession(way.head, OrtOptions(threads=1))
    fields = f"Host: {bench.testbed.server_host}\r\nAuthorization: Bearer {TOKEN}\r\n"
    paths = []
    for number, sample in enumerate(feeds[:GENERATED]):
        made = {**sample, **({} if head is None else head.run(sample))}
        sent = {name: made[name] for name in way.sent}
        for name, codec in way.media.items():
            sent[name] = np.frombuffer(encode_media(MediaCodec.parse(codec), sent[name][0]), np.uint8)
        compression: Any = way.compression
        request = make_tail_request(way.tail_name or "", sent, (), compression, fields)
        path = bench.folder / f"request{number}.bin"
        path.write_bytes(b"".join(bytes(part) for part in request.parts))
        paths.append(str(path))
    return paths


def fixed_s(way: PlannedWay) -> float:
    """Return what a request takes beside the server: device, link and round trip."""
    up_s = transfer_s(way.upload_bytes, LINK.up_bits_per_s, LINK.rtt_s, LINK.window_bytes)
    down_s = transfer_s(way.download_bytes, LINK.down_bits_per_s, LINK.rtt_s, LINK.window_bytes)
    return way.device_s + up_s + down_s + LINK.rtt_s


def show(found: Mapping[str, Any]) -> None:
    """Print the table of a case."""
    print(f"\n## {found['case']}: {found['setting']}; limit {found['limit_ms']:.0f} ms")
    print(f"load of this machine {found['load']:.1f}\n")
    rows = []
    for row in found["rows"]:
        kept = [one for one in row.get("trials", []) if one["is_kept"]]
        last = max(kept, key=lambda one: one["devices"], default={"p50_ms": 0.0, "p99_ms": 0.0})
        rows.append(
            [
                row["role"], row["way"], row["server_ms"], row.get("added_ms", 0.0), str(row["simulated"]),
                str(row.get("devices", "any")), last["p50_ms"], last["p99_ms"], len(row.get("trials", [])),
            ]
        )  # fmt: skip
    print_table(
        ["devices run", "way", "server, ms", "device and link, ms", "devices, simulated", "devices, measured",
         "p50, ms", "p99, ms", "trials"],
        rows,
    )  # fmt: skip
    if found["ratio"] is not None:
        print(f"\nratio {found['ratio']:.2f} (goal >= {GOAL:g})", flush=True)


if __name__ == "__main__":
    main()
