"""Where splitting a model between device and server pays: workloads and photographs, planned and measured.

    scripts/python benchmarks/offload_workloads.py
        --only sensor_tcn [--seconds 3] [--json FILE]
    ... benchmarks/offload_workloads.py --merge FILE... [--json FILE]

At most 4 minutes for one workload; `--merge` makes one table of the files. It needs root for the emulated
device and link, and ../shared/models.

Each workload is planned by the product's planner for a device with a share of one processor, and the ways
then run in the testbed: heads and codecs on the device, tails in our service on the other processor, behind
TLS. Whole-model ways are: local, and the input raw, uint8, JPEG, WebP, differences + zstd, Opus, where they
suit. Published methods choose their cuts from the same profile, and these run too. Ways take turns. A way
whose prediction is over 1 s runs once, one over 4 s does not run. Devices under a tenth of a processor are
emulated by waiting (`workload_device`), and predicted as slowed down.

Ways run by name, whatever they cost in accuracy, so also those above the plan's default `--max-loss`; the
table shows how many answers each changes.

Ratio: median of the best whole-model way / median of the best split. All figures are emulated.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

import workload_models
from edgekit_offload.planning.costs import DeviceLimits
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.result import PlanningResult
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s, served_s
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from offload_bench import Feeds, OffloadBench
from offload_capacity import write_requests
from planned_ways import Planned, PlannedWay
from results import make_parser, print_table, write_json

LONGEST_MS = 4_000.0
SLOW_MS = 1_000.0  # runs once
OTHERS = 16  # clients that load a server
LOAD_START_S, LOAD_END_S = 3.0, 1.0
CUTS = 4  # planned cuts that the benchmark runs
GOAL = 1.5
LEAST_ROUNDS = 3
FEW_CHANGED = 0.0625  # of the answers, up to which a way counts as faithful: one of 16 samples
FLIP_MBIT_S = np.geomspace(0.01, 200, 241)


@dataclass(frozen=True)
class Workload:
    """A model, devices and links.

    Attributes:
        build: returns the model and samples.
        shares: of a processor that the devices have; the first one is planned for.
        bandwidths_mbit_s: each way.
        rtt_ms: round trip.
        setting: what it stands for.
        limits: further fields of `PlanInputs`.
        busy: requests of other clients, as a multiple of what the server carries of the best upload; they run
            the way that is measured. 0 without others.
    """

    build: Callable[[], tuple[bytes, list[Feeds]]]
    shares: tuple[float, ...]
    bandwidths_mbit_s: tuple[float, ...]
    rtt_ms: float
    setting: str
    limits: Mapping[str, Any] = field(default_factory=dict)
    busy: float = 0.0


# One core does as many float32 multiply-adds a second as this machine's, by its data sheet: Cortex-A76 at
# 2.4 GHz 20 %, A72 at 1.5 GHz 7 %, A53 at 1 GHz 5 %, A7 at 1 GHz 2 %, microcontrollers under 1 %.
WORKLOADS = {
    "sensor_tcn": Workload(
        workload_models.sensor_tcn, (0.1, 0.05, 0.02), (0.05, 0.1, 0.25), 20,
        "16 channels of a sensor, 16 s at 256 Hz; radio of 50 to 250 kbit/s (IEEE 802.15.4)",
    ),
    "tiny_tcn": Workload(
        workload_models.tiny_tcn, (0.1, 0.02), (0.05, 0.25), 20,
        "a spoken vowel, 12 cepstra x 29; the same radio",
    ),
    "keyword_spotting": Workload(
        workload_models.keyword_spotting, (0.1, 0.02), (0.1, 1), 30,
        "1 s of sound at 16 kHz; MFCC in the graph, DS-CNN of 2.7 million multiply-adds",
    ),
    "keyword_res15": Workload(
        workload_models.keyword_res15, (0.1, 0.05, 0.02), (0.25, 1), 30,
        "the same sound; MFCC and res15 of 890 million multiply-adds",
    ),
    "small_memory": Workload(
        workload_models.efficientnet, (0.2, 0.05), (0.25, 0.5, 2), 40,
        "a model of 18.6 MB, a device with 8 MB for weights; LTE-M and LTE upload",
        {"limits": DeviceLimits(memory_bytes=14.5e6)},
    ),
    "loaded_server": Workload(
        workload_models.efficientnet, (0.1, 0.05, 0.02), (100,), 5,
        "photographs over Wi-Fi; other clients ask 1.2 times what the server carries of uploads",
        busy=1.2,
    ),
    "many_heads": Workload(
        workload_models.many_heads, (0.1, 0.05), (1, 2, 5), 20,
        "one backbone, eight heads, all outputs wanted",
    ),
    "photos": Workload(
        workload_models.mobilenet, (0.2, 0.05), (1, 5, 20), 20,
        "photographs of 224 x 224, MobileNet v1 0.25",
    ),
    "photos_large": Workload(
        workload_models.efficientnet, (0.2, 0.05), (1, 5, 20), 20,
        "photographs of 224 x 224, EfficientNet-Lite0",
    ),
}  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each setting")
    parser.add_argument("--merge", nargs="+", type=Path, help="files of `--json`")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found, began_s = [], time.monotonic()
    if arguments.merge:
        found = [one for path in arguments.merge for one in json.loads(path.read_text())["workloads"]]
        write_json(arguments.json, {"workloads": found})
    else:
        for name in arguments.only:
            found.append(run_workload(name, WORKLOADS[name], arguments.seconds))
            show(found[-1])
            write_json(arguments.json, {"workloads": found})
    summarise(found)
    print(f"{time.monotonic() - began_s:.0f} s; load of this machine {os.getloadavg()[0]:.1f}")


def run_workload(name: str, workload: Workload, seconds: float) -> dict[str, Any]:
    """Plan a workload and measure it on all its devices at all its links."""
    began_s = time.monotonic()
    content, feeds = workload.build()
    grid, base = Grid(workload.bandwidths_mbit_s, (workload.rtt_ms,)), workload.shares[0]
    planned = Planned(name, content, feeds, base, grid, **workload.limits)
    settings = [
        (
            mbit_s,
            share,
            Conditions(LinkState(mbit_s * 1e6, mbit_s * 1e6, workload.rtt_ms / 1e3), base / share),
        )
        for mbit_s in workload.bandwidths_mbit_s
        for share in workload.shares
    ]
    peers = [planned.find_peers(conditions) for *_, conditions in settings]
    per_s = 0.0
    if workload.busy:
        per_s = workload.busy / min(served_s(way.plan.costs) for way in planned.ways if way.kind == "upload")
    ways = few_ways(planned.ways, [one for *_, one in settings], per_s)
    planned_s, cells = time.monotonic() - began_s, []
    with tempfile.TemporaryDirectory() as folder, OffloadBench(Path(folder), base) as bench:
        start(bench, ways, feeds, base)
        measured = (
            measure(bench, workload, ways, settings, seconds)
            if not workload.busy
            else (measure_loaded(bench, ways, feeds, per_s, settings, seconds))
        )
        for (mbit_s, share, conditions), one, chosen in zip(settings, measured, peers, strict=True):
            rows = [describe(way, predict_ms(way, conditions, per_s), one.get(way.name, [])) for way in ways]
            cells.append(
                {"mbit_s": mbit_s, "share": share, "rtt_ms": workload.rtt_ms, "rows": rows,
                 "peers": [vars(peer) for peer in chosen], **compare(rows)}
            )  # fmt: skip
        label = bench.testbed.label
    kernels = planned.costs.seconds
    return {
        "workload": name, "setting": workload.setting, "label": label, "cells": cells,
        "pays": {f"{share:.0%}": pays_range(planned.result, workload.rtt_ms, base / share)
                 for share in workload.shares},
        "kernels": len(kernels), "server_ms": float(kernels[:, 1].sum()) * 1e3,
        "refusals": [f"{one.name}: {one.reason}" for one in planned.result.refusals],
        "load": os.getloadavg()[0], "planned_s": planned_s, "seconds": time.monotonic() - began_s,
    }  # fmt: skip


Setting = tuple[float, float, Conditions]
Measured = dict[str, list[dict[str, Any]]]


def measure(
    bench: OffloadBench,
    workload: Workload,
    ways: Sequence[PlannedWay],
    settings: Sequence[Setting],
    seconds: float,
) -> list[Measured]:
    """Return for each setting what each way gave."""
    found = []
    for mbit_s, _, conditions in settings:
        bench.testbed.set_link(up_mbit_s=mbit_s, down_mbit_s=mbit_s, rtt_ms=workload.rtt_ms)
        bench.order("reconnect")
        expected = {way.name: predict_ms(way, conditions) for way in ways}
        order = [
            (name, conditions.device_slowdown, LEAST_ROUNDS if one < SLOW_MS else 1)
            for name, one in expected.items()
            if one <= LONGEST_MS
        ]
        rows = bench.order("rounds", ways=order, seconds=seconds)
        found.append({one[0]: row for one, row in zip(order, rows, strict=True)})
    return found


def measure_loaded(
    bench: OffloadBench,
    ways: Sequence[PlannedWay],
    feeds: Sequence[Feeds],
    per_s: float,
    settings: Sequence[Setting],
    seconds: float,
) -> list[Measured]:
    """Return the same of one link, each way alone, while others send requests of that way at random times."""
    mbit_s, _, conditions = settings[0]
    assert conditions.link is not None
    bench.testbed.set_link(up_mbit_s=mbit_s, down_mbit_s=mbit_s, rtt_ms=conditions.link.rtt_s * 1e3)
    bench.order("reconnect")
    found: list[Measured] = [{} for _ in settings]
    for way in ways:
        with ExitStack() as load:
            if way.tail is not None:
                child = bench.generate_load(
                    "-",
                    requests=write_requests(bench, way, feeds),
                    requests_per_s=per_s / OTHERS,
                    devices=OTHERS,
                    warm_s=0,
                    seconds=60,
                )
                load.callback(child.close)
                time.sleep(LOAD_START_S)
            runs = [(way.name, one.device_slowdown, LEAST_ROUNDS) for *_, one in settings]
            for cell, rows in zip(found, bench.order("rounds", ways=runs, seconds=seconds), strict=True):
                cell[way.name] = rows
        time.sleep(LOAD_END_S)
    return found


def predict_ms(way: PlannedWay, conditions: Conditions, per_s: float = 0.0) -> float:
    """Return the latency of a way; on a server that gets `per_s` requests of it, with the mean wait there."""
    wait_s = mean_wait_s(served_s(way.plan.costs), per_s) if per_s and way.tail is not None else 0.0
    return predict_s(way.plan, replace(conditions, server_wait_s=wait_s)) * 1e3


def mean_wait_s(service_s: float, per_s: float) -> float:
    """Return the mean wait where requests come at random times and each takes the same.

    Source: Pollaczek and Khinchine, M/D/1.
    """
    busy = service_s * per_s
    return float("inf") if busy >= 1 else busy * service_s / (2 * (1 - busy))


def few_ways(ways: Sequence[PlannedWay], settings: Sequence[Conditions], per_s: float) -> list[PlannedWay]:
    """Return the uploads, local runs and peers that will run, and the cuts that are predicted best somewhere.

    Of each kind of cuts, all and those that keep the answers, the best somewhere come first.
    """
    table = {way.name: np.array([predict_ms(way, one, per_s) for one in settings]) for way in ways}
    ways = [way for way in ways if way.kind == "upload" or table[way.name].min() <= LONGEST_MS]
    cuts = [way for way in ways if way.kind == "cut"]
    chosen: list[str] = []
    for pool in ([way for way in cuts if is_faithful(way.plan.answers_changed)], cuts):
        if pool:
            each = np.array([table[way.name] for way in pool])
            ranks = (each / np.maximum(each.min(axis=0), 1e-9)).min(axis=1)
            chosen += [pool[int(n)].name for n in np.argsort(ranks, kind="stable")[: CUTS // 2]]
    rest = [way.name for way in cuts if way.name not in chosen]
    return [way for way in ways if way.kind != "cut" or way.name in [*chosen, *rest][:CUTS]]


def is_faithful(answers_changed: float | None) -> bool:
    return answers_changed is None or answers_changed <= FEW_CHANGED


def start(bench: OffloadBench, ways: Sequence[PlannedWay], feeds: Sequence[Feeds], share: float) -> None:
    """Serve the tails, and make the device open the heads."""
    plain = []
    for number, way in enumerate(ways):
        path, outputs = None, []
        if way.head is not None:
            path = str(bench.folder / f"head{number}.onnx")
            Path(path).write_bytes(way.head)
        if way.tail is not None:
            bench.add_tail(way.tail_name or "", way.tail, way.feeds, way.plan.media)
            session = OrtSession(way.tail, OrtOptions(threads=1))
            outputs = [[one.name, one.dtype, list(one.shape)] for one in session.outputs]
        plain.append(
            {
                "name": way.name, "head": path, "tail": way.tail_name, "sent": list(way.sent),
                "media": dict(way.plan.media), "compression": way.plan.compression, "outputs": outputs,
            }
        )  # fmt: skip
    bench.serve()
    bench.start_device()
    samples = {f"{number}|{key}": one for number, each in enumerate(feeds) for key, one in each.items()}
    np.savez(bench.folder / "samples.npz", **samples)  # type: ignore[arg-type]  # names
    bench.order("load", ways=plain, samples=str(bench.folder / "samples.npz"), share=share)


def describe(way: PlannedWay, predicted_ms: float, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    costs = way.plan.costs
    row: dict[str, Any] = {
        "way": way.name, "kind": way.kind, "predicted_ms": predicted_ms if predicted_ms < 1e9 else None,
        "device_ms": costs.device_s * 1e3, "server_ms": costs.server_s * 1e3,
        "answers_changed": way.plan.answers_changed,
        "p50_ms": None, "spread": None, "rounds": len(found), "sent_bytes": None, "head_ms": None,
        "failed": sum("error" in one for one in found),
    }  # fmt: skip
    if row["failed"]:
        error = next(one["error"] for one in found if "error" in one)
        print(f"{way.name}: {row['failed']} of {len(found)} requests failed: {error}")
    elif found:
        low, middle, high = np.quantile([one["s"] for one in found], (0.25, 0.5, 0.75))
        row |= {
            "p50_ms": float(middle) * 1e3, "spread": float((high - low) / middle),
            "sent_bytes": float(np.mean([one["sent_bytes"] for one in found])),
            "head_ms": float(np.median([one["head_s"] for one in found])) * 1e3,
        }  # fmt: skip
    return row


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a row: the best whole-model way, the best split, and the best split with equal answers."""
    run = [row for row in rows if row["p50_ms"] is not None]
    found: dict[str, Any] = {}
    for suffix, pool in (
        ("", run),
        ("_faithful", [row for row in run if is_faithful(row["answers_changed"])]),
    ):
        for kind, kinds in (("whole", ("local", "upload")), ("split", ("cut",))):
            best = min((row for row in pool if row["kind"] in kinds), key=itemgetter("p50_ms"), default=None)
            found[f"best_{kind}{suffix}"] = best and best["way"]
            found[f"best_{kind}{suffix}_ms"] = best and best["p50_ms"]
        whole_ms, split_ms = found[f"best_whole{suffix}_ms"], found[f"best_split{suffix}_ms"]
        found[f"ratio{suffix}"] = whole_ms / split_ms if whole_ms and split_ms else None
    return found


def pays_range(result: PlanningResult, rtt_ms: float, slowdown: float) -> str:
    """Return between which bandwidths a split is predicted to be the fastest way."""
    wins = []
    for mbit_s in FLIP_MBIT_S:
        conditions = Conditions(LinkState(mbit_s * 1e6, mbit_s * 1e6, rtt_ms / 1e3), slowdown)
        best = min(result.candidates, key=lambda way: predict_s(way.plan, conditions))
        wins.append(best.kind == "cut")
    if not any(wins):
        return "nowhere"
    places = np.flatnonzero(wins)
    low, high = FLIP_MBIT_S[places[0]], FLIP_MBIT_S[places[-1]]
    return f"{low:.2g} to {high:.2g}" + ("" if places[-1] + 1 < len(wins) else " and above")


def show(found: Mapping[str, Any]) -> None:
    print(f"\n## {found['workload']}: {found['setting']}\n{found['label']}; load {found['load']:.1f}\n")
    print_table(
        ["device", "Mbit/s", "way", "sends, B", "on device, ms", "on server, ms", "predicted, ms", "p50, ms",
         "spread, %", "requests", "accuracy"],
        [
            [
                f"{cell['share']:.0%}", cell["mbit_s"], row["way"], *(format_figure(row[key]) for key in
                ("sent_bytes", "head_ms", "server_ms", "predicted_ms", "p50_ms")),
                format_figure(row["spread"] and row["spread"] * 100), row["rounds"],
                format_figure(row["answers_changed"]),
            ]
            for cell in found["cells"]
            for row in cell["rows"]
        ],
    )  # fmt: skip
    print()
    print_peers(found)
    for share, pays in found["pays"].items():
        print(f"A split is predicted to be best on a device of {share} at Mbit/s: {pays}.")
    print(f"{found['kernels']} kernels, {found['server_ms']:.3g} ms on the server; planned in "
          f"{found['planned_s']:.0f} s, {found['seconds']:.0f} s in all.")  # fmt: skip
    for one in found["refusals"]:
        print(f"- {one}")
    print(flush=True)


def print_peers(found: Mapping[str, Any]) -> None:
    """Print what published methods and our planner chose, and what that gave."""
    rows = []
    for cell in found["cells"]:
        by_name = {row["way"]: row for row in cell["rows"]}
        predicted = [row for row in cell["rows"] if row["kind"] != "peer" and row["predicted_ms"] is not None]
        ours = min(predicted, key=lambda row: float(row["predicted_ms"]))["way"]
        for peer in [*cell["peers"], {"method": "edgekit", "way": ours, "obstacle": ""}]:
            p50_ms = by_name.get(peer["way"], {}).get("p50_ms")
            way = peer["way"] or peer["obstacle"]
            rows.append([f"{cell['share']:.0%}", cell["mbit_s"], peer["method"], way, format_figure(p50_ms)])
    print_table(["device", "Mbit/s", "method", "chooses", "p50, ms"], rows)
    print()


def summarise(found: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        ["workload", "device", "Mbit/s", "best whole-model way", "ms", "best split", "ms", "ratio",
         "ratio where answers stay"],
        [
            [
                one["workload"], f"{cell['share']:.0%}", cell["mbit_s"],
                str(cell["best_whole"]), format_figure(cell["best_whole_ms"]),
                str(cell["best_split"]), format_figure(cell["best_split_ms"]),
                *(format_figure(cell[key]) for key in ("ratio", "ratio_faithful")),
            ]
            for one in found
            for cell in one["cells"]
        ],
    )  # fmt: skip
    won = sum(max(cell["ratio"] or 0.0 for cell in one["cells"]) >= GOAL for one in found)
    print(f"\n{won} of {len(found)} workloads have a setting with a ratio of {GOAL:g} or more")


def format_figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
