"""How many devices a server carries at the same p99: planned for capacity, against all on the server.

    scripts/python benchmarks/offload_capacity.py
        --only small_memory [--seconds 4] [--rate 2] [--json FILE]

At most 4 minutes for one case. It needs root, two processors and ../shared/models.

The server is our service behind TLS on one processor; the devices are connections of a generator on another
one. Each sends requests at random times (Poisson) at a fixed rate, whether the server keeps up or not. Heads
ran before; their time on the device, as measured, and the link, as modelled, are added to each latency, which
only shifts the arrivals. The largest number of devices whose p99 keeps the limit is found by bisection, and
stands beside the one that the plan modelled.

The case `stay_local` has no such search: devices that obey the load in the replies, beside others that do
not, at multiples of what the server carries. All figures are emulated.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import run as run_command
from typing import Any

import numpy as np

import workload_models
from edgekit_offload.planning.costs import DeviceLimits
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.profiling.machine import Machine, RunnableGraph, time_models
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.offload.latency_model import LinkState, transfer_s
from edgekit_runtime.offload.offload_server import make_tail_request
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from offload_bench import TOKEN, Feeds, OffloadBench
from planned_ways import Planned, PlannedWay
from processes import read_cpu_s
from results import make_parser, print_table, write_json

LINK = LinkState(50e6, 50e6, 0.01)  # an office; a connection that idles for 0.5 s starts slowly again
GENERATED = 8  # different requests
WARM_S = 1.0
MOST_TRIALS = 6
PRECISION = 0.06  # of the number of devices
MOST_DEVICES = 400  # that the generator carries on its processor
GOAL = 2.0
MULTIPLES = (0.8, 1.5, 2.0, 3.0)  # of the server's capacity


@dataclass(frozen=True)
class Case:
    """Why not all devices run the model themselves.

    Attributes:
        share: of a processor that a device has.
        limit_s: of the p99.
        local_share: the same as a share of the local run, where `limit_s` is 0.
        setting: in words.
        limits: further fields of `PlanInputs`.
    """

    share: float
    limit_s: float
    setting: str
    local_share: float = 0.0
    limits: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "small_memory": Case(
        0.2, 0.25, "8 MB for weights, p99 <= 250 ms", limits={"limits": DeviceLimits(memory_bytes=14.5e6)}
    ),
    "latency": Case(0.1, 0.0, "no limit on memory; p99 <= 80 % of the local run", local_share=0.8),
    "stay_local": Case(0.2, 0.25, "devices that can run all; they stay local on a loaded server"),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each trial")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second of one device")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_s, found = time.monotonic(), []
    for name in arguments.only:
        found.append(run_case(name, CASES[name], arguments.seconds, arguments.rate))
        write_json(arguments.json, {"cases": found})
    print(f"{time.monotonic() - began_s:.0f} s; load of this machine {os.getloadavg()[0]:.1f}")


def run_case(name: str, case: Case, seconds: float, rate: float) -> dict[str, Any]:
    content, feeds = workload_models.efficientnet()
    grid = Grid((LINK.up_bits_per_s / 1e6,), (LINK.rtt_s * 1e3,))
    limits = {**case.limits, "objective": "capacity", "requests_per_s": rate}
    local_s = time_locally(content, feeds, case.share)
    limit_s = case.limit_s or case.local_share * local_s
    planned = Planned(name, content, feeds, case.share, grid, latency_limit_s=limit_s, **limits)
    uploads = [way for way in planned.ways if way.kind == "upload" and way.is_offered]
    cloud = min(uploads, key=lambda way: fixed_s(way) + way.plan.costs.server_s)
    found: dict[str, Any] = {"case": name, "setting": case.setting, "limit_ms": limit_s * 1e3}
    with Server(cloud, feeds, seconds=seconds, rate=rate) as server:
        row = {"role": "always on the server", **server.find_capacity(limit_s)}
        if name == "stay_local":
            found["trials"] = [
                {"multiple": one, "obeys": obeys, **server.run_trial(
                    max(int(one * row["devices"]), 1), limit_s, local_s if obeys else None)}
                for one in MULTIPLES
                for obeys in (False, True)
            ]  # fmt: skip
            found |= {"rows": [row], "ratio": None, "local_ms": local_s * 1e3}
            show_obeying(found)
            return found
    best = planned.result.best(grid.bandwidths_mbit_s[0], grid.rtts_ms[0])
    chosen = next(way for way in planned.ways if way.name == best.name)
    found["rows"] = [row]
    if chosen.tail is not None:
        with Server(chosen, feeds, seconds=seconds, rate=rate) as server:
            found["rows"].append({"role": "planned for capacity", **server.find_capacity(limit_s)})
    devices = [row["devices"] for row in found["rows"]]
    found["ratio"] = devices[1] / devices[0] if len(devices) > 1 and all(devices) else None
    show(found)
    return found


def time_locally(content: bytes, feeds: Sequence[Feeds], share: float) -> float:
    graph = RunnableGraph(content, {"threads": 1}, inputs=feeds[0])
    return time_models(Machine.parse(f"local@{share:.0%}"), [graph], seconds=2)[0].seconds


class Server:
    """The service with the tail of one way, on one processor, for a `with` block."""

    def __init__(self, way: PlannedWay, feeds: Sequence[Feeds], *, seconds: float, rate: float) -> None:
        self._way, self._open = way, ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        self._bench = bench = self._open.enter_context(OffloadBench(folder, None))
        bench.add_tail(way.tail_name or "", way.tail or b"", way.feeds, way.plan.media)
        cpus = sorted(os.sched_getaffinity(0))
        self._cpu, self._rate = cpus[-1], rate
        self._pid = bench.serve().pid
        run_command(["taskset", "-acp", str(cpus[0]), str(self._pid)], check=True, capture_output=True)
        requests = write_requests(bench, way, feeds)
        self._order = {"requests": requests, "requests_per_s": rate, "seconds": seconds, "warm_s": WARM_S}

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def find_capacity(self, limit_s: float) -> dict[str, Any]:
        """Return the most devices whose p99 keeps the limit, by bisection."""
        costs, trials = self._way.plan.costs, []
        low, high = 0, MOST_DEVICES + 1
        guess = min(max(int(0.7 / (costs.server_s * self._rate)), 1), MOST_DEVICES)
        for _ in range(MOST_TRIALS):
            trials.append(self.run_trial(guess, limit_s))
            low, high = (guess, high) if trials[-1]["is_kept"] else (low, guess)
            if high - low <= max(1, PRECISION * low):
                break
            guess = (low + high) // 2 if high <= MOST_DEVICES else min(2 * guess, MOST_DEVICES)
            if guess == low:
                break
        return {
            "way": self._way.name, "server_ms": costs.server_s * 1e3, "modelled": self._way.devices,
            "devices": low, "added_ms": fixed_s(self._way) * 1e3, "trials": trials,
        }  # fmt: skip

    def run_trial(self, devices: int, limit_s: float, local_s: float | None = None) -> dict[str, Any]:
        """Return p50 and p99 with a number of devices; with `local_s` they obey the server's load."""
        before_s = read_cpu_s(self._pid)
        began_s = time.monotonic()
        child = self._bench.generate_load(self._cpu, **self._order, devices=devices, local_s=local_s)
        if child.wait(60 + 2 * self._order["seconds"]) != 0:
            raise SystemExit(f"the load generator ended {child.explain_end()}")
        found, took_s = json.loads(child.output), time.monotonic() - began_s
        good = [one + fixed_s(self._way) for one in found["remote"]] + found["local"]
        every = np.sort([*good, *(float("inf") for _ in found["errors"])] or [float("inf")])
        p50, p99 = every[len(every) // 2], every[int(np.ceil(0.99 * len(every))) - 1]  # refused is late
        seconds = self._order["seconds"]
        share = seconds / (seconds + WARM_S)  # the warm-up is not among the requests
        return {
            "devices": devices, "requests": len(good) + len(found["errors"]), "errors": len(found["errors"]),
            "local": len(found["local"]), "p50_ms": float(p50) * 1e3, "p99_ms": float(p99) * 1e3,
            "cpu_ms": (read_cpu_s(self._pid) - before_s) * share / max(len(found["remote"]), 1) * 1e3,
            "seconds": took_s, "is_kept": bool(p99 <= limit_s),
        }  # fmt: skip


def write_requests(bench: OffloadBench, way: PlannedWay, feeds: Sequence[Feeds]) -> list[str]:
    """Write requests of several samples as the device sends them, and return their paths."""
    head = None if way.head is None else OrtSession(way.head, OrtOptions(threads=1))
    fields = f"Host: {bench.testbed.server_host}\r\nAuthorization: Bearer {TOKEN}\r\n"
    paths = []
    for number, sample in enumerate(feeds[:GENERATED]):
        made = {**sample, **({} if head is None else head.run(sample))}
        sent = {name: made[name] for name in way.sent}
        for name, codec in way.plan.media.items():
            sent[name] = np.frombuffer(encode_media(MediaCodec.parse(codec), sent[name][0]), np.uint8)
        compression: Any = way.plan.compression
        request = make_tail_request(way.tail_name or "", sent, (), compression, fields)
        path = bench.folder / f"request{number}.bin"
        path.write_bytes(b"".join(bytes(part) for part in request.parts))
        paths.append(str(path))
    return paths


def fixed_s(way: PlannedWay) -> float:
    """Return what a request takes beside the server: device, link and round trip."""
    costs = way.plan.costs
    up_s = transfer_s(costs.upload_bytes, LINK.up_bits_per_s, LINK.rtt_s, LINK.window_bytes)
    down_s = transfer_s(costs.download_bytes, LINK.down_bits_per_s, LINK.rtt_s, LINK.window_bytes)
    return costs.device_s + up_s + down_s + LINK.rtt_s


def show(found: Mapping[str, Any]) -> None:
    print(f"\n## {found['case']}: {found['setting']}; limit {found['limit_ms']:.0f} ms")
    rows = []
    for row in found["rows"]:
        kept = [one for one in row["trials"] if one["is_kept"]]
        nothing = {"devices": 0, "p50_ms": 0.0, "p99_ms": 0.0, "cpu_ms": 0.0}
        last = max(kept, key=lambda one: one["devices"], default=nothing)
        rows.append(
            [
                row["role"], row["way"], row["server_ms"], last["cpu_ms"], row["added_ms"],
                str(row["modelled"]), str(row["devices"]), last["p50_ms"], last["p99_ms"],
                len(row["trials"]),
            ]
        )  # fmt: skip
    print_table(
        ["devices run", "way", "server as planned, ms", "its processor time, ms", "device and link, ms",
         "devices, modelled", "devices, measured", "p50, ms", "p99, ms", "trials"],
        rows,
    )  # fmt: skip
    if found["ratio"] is not None:
        print(f"\nratio {found['ratio']:.2f} (goal >= {GOAL:g})", flush=True)


def show_obeying(found: Mapping[str, Any]) -> None:
    """Print devices that obey the server's load beside others."""
    (row,) = found["rows"]
    print(
        f"\n## {found['case']}: {found['setting']}; limit {found['limit_ms']:.0f} ms, "
        f"local run {found['local_ms']:.0f} ms; {row['way']}, the server carries {row['devices']} devices"
    )
    print_table(
        ["devices", "obey", "p50, ms", "p99, ms", "refused", "local, %", "p99 is kept"],
        [
            [
                one["devices"], "yes" if one["obeys"] else "no", one["p50_ms"], one["p99_ms"], one["errors"],
                100 * one["local"] / max(one["requests"], 1), "yes" if one["is_kept"] else "no",
            ]
            for one in found["trials"]
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
