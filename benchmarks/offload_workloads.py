"""Where splitting a model between device and server pays: workloads and photographs, planned and measured.

    PYTHONPATH=device_runtime:toolkit:offload .venv/bin/python benchmarks/offload_workloads.py
        [--only sensor_tcn ...] [--seconds 6] [--json FILE]

At most 8 minutes as it is. It needs root for the emulated device and link, and ../shared/models.

Each workload is planned by the product's planner for a device with a share of one processor, and the ways
then run in the testbed: heads and codecs on the device, tails in our service on the other processor, behind
TLS. Whole-model ways are: local, and the input raw, uint8, JPEG, WebP, differences + zstd, Opus, where they
suit. Ways take turns. A way whose prediction is over 1 s runs once, one over 4 s does not run.

Ratio: median of the best whole-model way / median of the best split. All figures are emulated.
"""

import telemetry_off  # noqa: F401

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import workload_models
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.result import PlanningResult
from edgekit_runtime.remote.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from offload_bench import PORT, Feeds, OffloadBench, print_table, write_json
from offload_capacity import write_requests
from planned_ways import PlannedWay, plan_ways

LONGEST_MS = 4_000.0
SLOW_MS = 1_000.0  # runs once
OTHERS = 16  # clients that load a server
BUSY_SLOWDOWN = 4.0  # of a tail on a loaded server, by which cuts are picked
LOAD_START_S, LOAD_END_S = 3.0, 1.0
CUTS = 3  # planned cuts that the benchmark runs
GOAL = 1.5
LEAST_ROUNDS = 3
FLIP_MBIT_S = np.geomspace(0.01, 200, 241)


@dataclass(frozen=True)
class Workload:
    """A model, a device and links.

    Attributes:
        build: returns the model and samples.
        share: of a processor that the device has.
        bandwidths_mbit_s: each way.
        rtt_ms: round trip.
        limits: further fields of `PlanInputs`.
        setting: what it stands for.
        busy: requests of other clients, as a multiple of what the server carries of the best upload; they run
            the way that is measured.
    """

    build: Callable[[], tuple[bytes, list[Feeds]]]
    share: float
    bandwidths_mbit_s: tuple[float, ...]
    rtt_ms: float
    setting: str
    limits: Mapping[str, Any] = field(default_factory=dict)
    busy: float = 0.0


WORKLOADS = {
    "sensor_tcn": Workload(
        workload_models.sensor_tcn, 0.1, (0.05, 0.1, 0.25), 20,
        "16 channels of a sensor, 16 s at 256 Hz; radio of 50 to 250 kbit/s (IEEE 802.15.4)",
    ),
    "tiny_tcn": Workload(
        workload_models.tiny_tcn, 0.2, (0.05, 0.25), 20, "a spoken vowel, 12 cepstra x 29; the same radio",
    ),
    "keyword_spotting": Workload(
        workload_models.keyword_spotting, 0.2, (0.1, 1), 30, "1 s of sound at 16 kHz; MFCC in the graph",
    ),
    "small_memory": Workload(
        workload_models.efficientnet, 0.2, (0.25, 0.5, 2), 40,
        "a model of 18.6 MB, a device with 8 MB for weights; LTE-M and LTE upload",
        {"memory_bytes": 14.5e6},
    ),
    "loaded_server": Workload(
        workload_models.efficientnet, 0.1, (100,), 5,
        "photographs over Wi-Fi; other clients ask 1.2 times what the server carries of uploads",
        busy=1.2,
    ),
    "many_heads": Workload(
        workload_models.many_heads, 0.1, (1, 2, 5), 20, "one backbone, eight heads, all outputs wanted",
    ),
    "photos": Workload(
        workload_models.mobilenet, 0.2, (1, 5, 20), 20, "photographs of 224 x 224, MobileNet v1 0.25",
    ),
    "photos_large": Workload(
        workload_models.efficientnet, 0.2, (5, 20), 20, "photographs of 224 x 224, EfficientNet-Lite0",
    ),
}  # fmt: skip


def main() -> None:
    """Plan, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=6.0, help="of each link")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found, began_s = [], time.monotonic()
    for name in arguments.only:
        found.append(run_workload(name, WORKLOADS[name], arguments.seconds))
        show(found[-1])
        write_json(arguments.json, {"workloads": found})
    print_table(
        ["workload", "best ratio", "at Mbit/s", "split pays, Mbit/s (predicted)"],
        [
            [one["workload"], *max((cell["ratio"] or 0.0, cell["mbit_s"]) for cell in one["cells"]),
             one["pays"]]
            for one in found
        ],
    )  # fmt: skip
    print(f"{time.monotonic() - began_s:.0f} s; load of this machine {os.getloadavg()[0]:.1f}")


def run_workload(name: str, workload: Workload, seconds: float) -> dict[str, Any]:
    """Plan a workload and measure it at all its links."""
    began_s = time.monotonic()
    content, feeds = workload.build()
    grid = Grid(workload.bandwidths_mbit_s, (workload.rtt_ms,))
    result, ways = plan_ways(name, content, feeds, share=workload.share, grid=grid, **workload.limits)
    ways = few_ways(ways, BUSY_SLOWDOWN if workload.busy else 1.0)
    with tempfile.TemporaryDirectory() as folder, OffloadBench(Path(folder), workload.share) as bench:
        start(bench, ways, feeds)
        cells = []
        for column, mbit_s in enumerate(workload.bandwidths_mbit_s):
            bench.testbed.set_link(up_mbit_s=mbit_s, down_mbit_s=mbit_s, rtt_ms=workload.rtt_ms)
            bench.order("reconnect")
            least = {
                way.name: LEAST_ROUNDS if way.predicted_ms[column] < SLOW_MS else 1
                for way in ways
                if way.predicted_ms[column] <= LONGEST_MS
            }
            if workload.busy:
                measured = run_loaded(bench, ways, feeds, workload.busy, seconds)
            else:
                measured = bench.order("rounds", least=least, seconds=seconds)
            rows = [describe(way, column, measured.get(way.name, [])) for way in ways]
            cells.append({"mbit_s": mbit_s, "rtt_ms": workload.rtt_ms, "rows": rows, **compare(rows)})
        label = bench.testbed.label
    return {
        "workload": name, "setting": workload.setting, "label": label, "cells": cells,
        "pays": pays_range(result, workload.rtt_ms),
        "refusals": [f"{one.name}: {one.reason}" for one in result.refusals],
        "load": os.getloadavg()[0], "seconds": time.monotonic() - began_s,
    }  # fmt: skip


def run_loaded(
    bench: OffloadBench, ways: Sequence[PlannedWay], feeds: Sequence[Feeds], busy: float, seconds: float
) -> dict[str, Any]:
    """Measure each way alone, while other clients send requests of the same way at random times."""
    per_second = busy / min(way.server_s for way in ways if way.kind == "upload")
    found = {}
    for way in ways:
        with ExitStack() as load:
            if way.tail is not None:
                order = {
                    "host": bench.testbed.server_host, "port": PORT, "warm_s": 0, "seconds": 60,
                    "ca_file": str(bench.folder / "server.pem"), "devices": OTHERS,
                    "requests_per_s": per_second / OTHERS, "requests": write_requests(bench, way, feeds),
                }  # fmt: skip
                script = str(Path(__file__).with_name("load_generator.py"))
                child = bench.testbed.spawn("server", [sys.executable, script, "-", json.dumps(order)])
                load.callback(child.close)
                time.sleep(LOAD_START_S)
            found |= bench.order("rounds", least={way.name: LEAST_ROUNDS}, seconds=seconds)
        time.sleep(LOAD_END_S)
    return found


def few_ways(ways: Sequence[PlannedWay], server_slowdown: float) -> list[PlannedWay]:
    """Return the whole-model ways that will run, and those cuts that are predicted best at some link."""
    ways = [way for way in ways if min(way.predicted_ms) <= LONGEST_MS]
    cuts = [way for way in ways if way.kind == "cut"]
    more_ms = [[(server_slowdown - 1) * way.server_s * 1e3] for way in cuts]
    table = np.array([way.predicted_ms for way in cuts]).reshape(len(cuts), -1) + np.array(more_ms).reshape(
        -1, 1
    )
    ranks = (table / table.min(axis=0)).min(axis=1) if cuts else []
    chosen = {cuts[int(n)].name for n in np.argsort(ranks, kind="stable")[:CUTS]}
    return [way for way in ways if way.kind != "cut" or way.name in chosen]


def start(bench: OffloadBench, ways: Sequence[PlannedWay], feeds: Sequence[Feeds]) -> None:
    """Serve the tails, and make the device open the heads."""
    plain = []
    for number, way in enumerate(ways):
        path, outputs = None, []
        if way.head is not None:
            path = str(bench.folder / f"head{number}.onnx")
            Path(path).write_bytes(way.head)
        if way.tail is not None:
            bench.add_tail(way.tail_name or "", way.tail, way.feeds, way.media)
            session = OrtSession(way.tail, OrtOptions(threads=1))
            outputs = [[one.name, one.dtype, list(one.shape)] for one in session.outputs]
        plain.append(
            {
                "name": way.name, "head": path, "tail": way.tail_name, "sent": list(way.sent),
                "media": dict(way.media), "compression": way.compression, "outputs": outputs,
            }
        )  # fmt: skip
    bench.serve()
    bench.start_device()
    samples = {f"{number}|{key}": one for number, each in enumerate(feeds) for key, one in each.items()}
    np.savez(bench.folder / "samples.npz", **samples)  # type: ignore[arg-type]  # names
    bench.order("load", ways=plain, samples=str(bench.folder / "samples.npz"))


def describe(way: PlannedWay, column: int, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a way at a link."""
    row: dict[str, Any] = {
        "way": way.name, "kind": way.kind, "predicted_ms": way.predicted_ms[column],
        "server_ms": way.server_s * 1e3, "accuracy_change": way.accuracy_change,
        "p50_ms": None, "spread": None, "rounds": len(found), "sent_bytes": None, "head_ms": None,
    }  # fmt: skip
    if errors := [one["error"] for one in found if "error" in one]:
        print(f"{way.name}: {len(errors)} of {len(found)} requests failed: {errors[0]}")
    elif found:
        low, middle, high = np.quantile([one["s"] for one in found], (0.25, 0.5, 0.75))
        row |= {
            "p50_ms": float(middle) * 1e3, "spread": float((high - low) / middle),
            "sent_bytes": float(np.mean([one["sent_bytes"] for one in found])),
            "head_ms": float(np.median([one["head_s"] for one in found])) * 1e3,
        }  # fmt: skip
    return row


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the best whole-model way beside the best split."""
    run = [row for row in rows if row["p50_ms"] is not None]
    whole = min((row for row in run if row["kind"] != "cut"), key=lambda row: float(row["p50_ms"]))
    cut = min(
        (row for row in run if row["kind"] == "cut"), key=lambda row: float(row["p50_ms"]), default=None
    )
    return {
        "best_whole": whole["way"],
        "best_whole_ms": whole["p50_ms"],
        "best_split": cut and cut["way"],
        "best_split_ms": cut and cut["p50_ms"],
        "ratio": cut and whole["p50_ms"] / cut["p50_ms"],
    }


def pays_range(result: PlanningResult, rtt_ms: float) -> str:
    """Return between which bandwidths a split is predicted to be the fastest way."""
    wins = []
    for mbit_s in FLIP_MBIT_S:
        link = Conditions(LinkState(mbit_s * 1e6, mbit_s * 1e6, rtt_ms / 1e3))
        best = min(result.ways, key=lambda way: predict_s(way.plan, link))
        wins.append(best.kind == "cut")
    if not any(wins):
        return "nowhere"
    places = np.flatnonzero(wins)
    low, high = FLIP_MBIT_S[places[0]], FLIP_MBIT_S[places[-1]]
    return f"{low:.2g} to {high:.2g}" + ("" if places[-1] + 1 < len(wins) else " and above")


def show(found: Mapping[str, Any]) -> None:
    """Print the tables of one workload."""
    print(f"\n## {found['workload']}: {found['setting']}\n{found['label']}; load {found['load']:.1f}\n")
    print_table(
        ["Mbit/s", "way", "sends, B", "on device, ms", "on server, ms", "predicted, ms", "p50, ms",
         "spread, %", "requests", "accuracy"],
        [
            [
                cell["mbit_s"], row["way"], *(format_figure(row[key]) for key in
                ("sent_bytes", "head_ms", "server_ms", "predicted_ms", "p50_ms")),
                format_figure(row["spread"] and row["spread"] * 100), row["rounds"],
                format_figure(row["accuracy_change"]),
            ]
            for cell in found["cells"]
            for row in cell["rows"]
        ],
    )  # fmt: skip
    print()
    for cell in found["cells"]:
        if cell["ratio"] is not None:
            print(
                f"{cell['mbit_s']:g} Mbit/s: {cell['best_whole']} {cell['best_whole_ms']:.0f} ms / "
                f"{cell['best_split']} {cell['best_split_ms']:.0f} ms = {cell['ratio']:.2f} (goal >= {GOAL})"
            )
    print(f"A split is predicted to be best at {found['pays']} Mbit/s; {found['seconds']:.0f} s.")
    for one in found["refusals"]:
        print(f"- {one}")
    print(flush=True)


def format_figure(value: float | None) -> str:
    """Return a figure with three digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
