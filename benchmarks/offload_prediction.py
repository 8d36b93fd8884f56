"""How well the latency of every way to run a model is predicted, and what the choice costs beside the best.

    PYTHONPATH=device_runtime:toolkit:offload .venv/bin/python benchmarks/offload_prediction.py
        [--models resnet8 ...] [--bandwidths 1 2 5 10 20 50] [--rtts 5 20 60] [--seconds 8] [--json FILE]

At most 12 minutes as it is: 4 models x 6 bandwidths x 3 round trips, about 8 s each. It needs root for the
emulated device (20 % of a processor) and link, and ../shared/models.

- Ways: all on the device; whole model on the server with the input as float32 and as uint8; the two best cuts
  of the exact solver, float32 and uint8. Ways take turns, so that noise hits all alike.
- Predicted: `latency_model` with times of heads measured on the device, with pauses as between requests (back
  to back they take half as long), times of tails measured on the server, the transport measured once with two
  models that compute nothing, and the link as it is set.
- Error: |predicted - median measured| / median measured. Regret: median of the way with the lowest prediction
  against the lowest median. "Worse than the ends": against the better of local and the best upload.
"""

import telemetry_off  # noqa: F401

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from edgekit_offload.planning.costs import MESSAGE_BYTES, TENSOR_BYTES, CodedTensors, GraphCosts
from edgekit_offload.planning.sweep import Goal, find_cuts
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels, time_models
from edgekit_offload.profiling.planning_graph import PlanningGraph, join_profiles
from edgekit_runtime.remote.cut_table import OffloadPlan, PlanCosts
from edgekit_runtime.remote.latency_model import Conditions, LinkState, predict_s
from offload_bench import SHARED, Feeds, HandWay, OffloadBench, print_table, split_by_hand, write_json

MODELS = {
    "resnet8": "resnet8_cifar10_fp32.onnx",
    "mobilenet_v1": "mobilenet_v1_025_224_fp32.onnx",
    "efficientnet_lite0": "efficientnet_lite0_fp32.onnx",
    "vww": "mobilenetv1_025_vww_fp32.onnx",
}
DEVICE, SERVER = "local@20%", "local"
CUTS = 2
TOLERANCE = 1e9  # of uint8 ways the values differ; accuracy is the business of offload_codec.py
PROFILE_S = 3.0
HEAD_ROUNDS = 40
SMALL_BYTES, LARGE_BYTES = 1_000, 600_000
WARM_WINDOW_BYTES = 1e9  # the connection is in use: its window covers what the link holds
PROBE_LINK = LinkState(20e6, 20e6, 0.005)  # what it holds is less than TCP's first window


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--bandwidths", nargs="+", type=float, default=[1, 2, 5, 10, 20, 50])
    parser.add_argument("--rtts", nargs="+", type=float, default=[5, 20, 60])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each setting")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_s, cells = time.monotonic(), []
    plans = {name: plan_model(name, arguments.bandwidths, arguments.rtts) for name in arguments.models}
    with tempfile.TemporaryDirectory() as folder, OffloadBench(Path(folder), 0.2) as bench:
        probes = make_probes()
        for feeds, ways, *_ in plans.values():
            for way in ways:
                if way.tail is not None:
                    bench.add_tail(way.tail_name or "", way.tail, tail_feeds(way, feeds))
        for way, feeds in probes:
            bench.add_tail(way.tail_name or "", way.tail or b"", feeds)
        bench.serve()
        bench.start_device()
        transport = measure_transport(bench, probes)
        print(
            f"{bench.testbed.label}; transport {transport[0] * 1e3:.2f} ms + {transport[1] * 1e9:.2f} ns/byte"
        )
        for name, (feeds, ways, costs, whole) in plans.items():
            bench.load(whole, ways, feeds, TOLERANCE)
            names = [way.name for way in ways]
            device_s = bench.order("time_heads", ways=names, rounds=HEAD_ROUNDS, pause_s=0.02)
            known = {key: replace(one, device_s=device_s.get(key, 0.0)) for key, one in costs.items()}
            for bandwidth, rtt in itertools.product(arguments.bandwidths, arguments.rtts):
                bench.testbed.set_link(up_mbit_s=bandwidth, down_mbit_s=bandwidth, rtt_ms=rtt)
                bench.order("reconnect")
                link = LinkState(bandwidth * 1e6, bandwidth * 1e6, rtt / 1e3, WARM_WINDOW_BYTES)
                cells.append(measure_cell(bench, name, ways, known, link, transport, arguments.seconds))
    summary = summarise(cells)
    summary["seconds"] = time.monotonic() - began_s
    show(cells, summary)
    write_json(arguments.json, {"summary": summary, "cells": cells})


def read_model(name: str) -> onnx.ModelProto:
    """Return a model with a batch of one and all shapes, folded: else a tail asks for the input's shape."""
    model = onnx.load(SHARED / MODELS[name])
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = 1
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder, "folded.onnx"))
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        model = onnx.load(options.optimized_model_filepath)
    return onnx.shape_inference.infer_shapes(model)


def plan_model(
    name: str, bandwidths: Sequence[float], rtts: Sequence[float]
) -> tuple[Feeds, list[HandWay], dict[str, PlanCosts], bytes]:
    """Return one request, the ways, what they cost without the link, and the whole model."""
    model = read_model(name)
    content = model.SerializeToString()
    weights = {one.name for one in model.graph.initializer}
    (given,) = [one for one in model.graph.input if one.name not in weights]
    shape = [one.dim_value for one in given.type.tensor_type.shape.dim]
    feeds = {given.name: np.random.default_rng(0).random(shape, np.float32)}
    graph = RunnableGraph(content, {"threads": 1}, inputs=feeds)
    profiles = [
        profile_kernels(Machine.parse(one), graph, name=name, seconds=PROFILE_S) for one in (DEVICE, SERVER)
    ]
    joined = join_profiles(content, profiles)
    ways = [HandWay("local", "local", content, None)]
    received = float(sum(joined.tensor_bytes[one] for one in joined.graph.outputs))
    size = float(feeds[given.name].nbytes)
    ways.append(HandWay("upload float32", "upload", None, content, size, received))
    ranges = value_ranges(model, feeds)
    head, tail = split_input(model, given.name, ranges[given.name])
    ways.append(HandWay("upload uint8", "upload", head, tail, size / 4, received))
    for number, tiers in enumerate(best_cuts(joined, bandwidths, rtts), 1):
        costs = graph_costs(joined)
        sent = [joined.graph.tensors[row] for row in costs.sent(tiers)]
        raw = float(costs.raw_bytes[list(costs.sent(tiers))].sum())
        for coding, codes, share in (
            ("float32", None, 1.0),
            ("uint8", {one: ranges[one] for one in sent}, 4.0),
        ):
            head, tail = split_by_hand(model, sent, codes)
            ways.append(HandWay(f"cut {number} {coding}", "cut", head, tail, raw / share, received))
    return feeds, ways, time_ways(ways, feeds), content


def split_input(model: onnx.ModelProto, name: str, code: tuple[float, float]) -> tuple[bytes, bytes]:
    """Return a head that only codes the input as uint8, and the whole model behind it."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    head = onnx.ModelProto()
    head.CopyFrom(model)
    del head.graph.node[:], head.graph.initializer[:], head.graph.output[:], head.graph.value_info[:]
    given = next(one for one in model.graph.input if one.name == name)
    del head.graph.input[:]
    head.graph.input.append(given)
    head.graph.output.append(given)
    return split_by_hand(model, [name], {name: code}, parts=(head, whole))


def graph_costs(joined: PlanningGraph) -> GraphCosts:
    """Return the graph as the solver takes it, sent as float32 or as uint8."""
    raw = np.array([joined.tensor_bytes[one] for one in joined.graph.tensors], np.float64)
    none = np.zeros(len(raw))
    codings = {
        "raw": CodedTensors(("raw",) * len(raw), raw, none, none),
        "uint8": CodedTensors(("uint8",) * len(raw), raw / 4, none, none),
    }
    return GraphCosts(joined.graph, joined.seconds, raw, joined.weight_bytes.astype(np.float64), codings)


def best_cuts(
    joined: PlanningGraph, bandwidths: Sequence[float], rtts: Sequence[float]
) -> list[tuple[int, ...]]:
    """Return the cuts with the lowest mean regret among all real splits over the grid."""
    costs = graph_costs(joined)
    conditions = [
        Conditions(LinkState(mbit * 1e6, mbit * 1e6, rtt / 1e3)) for mbit in bandwidths for rtt in rtts
    ]
    found = dict.fromkeys(one.tiers for one in find_cuts(costs, conditions, Goal()) if one.is_split)
    # A cut that also sends an input is an upload with some work left behind.
    inputs = len(joined.graph.inputs)
    tiers = [one for one in found if min(costs.sent(one)) >= inputs]
    if not tiers:
        return []
    table = np.array(
        [
            [
                predict_s(OffloadPlan("cut", costs.plan_costs(one, "uint8"), tail="t"), condition)
                for condition in conditions
            ]
            for one in tiers
        ]
    )
    order = np.argsort((table / table.min(axis=0)).mean(axis=1))
    return [tiers[int(n)] for n in order[:CUTS]]


def value_ranges(model: onnx.ModelProto, feeds: Feeds) -> dict[str, tuple[float, float]]:
    """Return least and greatest value of every float tensor, for one request."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    known = {one.name for one in shown.graph.output}
    floats = [
        one
        for one in shown.graph.value_info
        if one.name not in known and one.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    ]
    shown.graph.output.extend(floats)
    session = onnxruntime.InferenceSession(shown.SerializeToString())
    names = [one.name for one in session.get_outputs()]
    values = dict(zip(names, session.run(None, feeds), strict=True)) | feeds
    return {
        name: (min(float(array.min()), 0.0), max(float(array.max()), 0.0))
        for name, array in values.items()
        if array.size and array.dtype == np.float32
    }


def tail_feeds(way: HandWay, feeds: Feeds) -> Feeds:
    """Return what a tail gets for one request."""
    if way.head is None:
        return feeds
    session = onnxruntime.InferenceSession(way.head)
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def time_ways(ways: Sequence[HandWay], feeds: Feeds) -> dict[str, PlanCosts]:
    """Measure tails on the server, interleaved; heads are measured on the device, where they will run."""
    options = {"threads": 1}
    tails = [
        RunnableGraph(way.tail, options, inputs=tail_feeds(way, feeds))
        for way in ways
        if way.tail is not None
    ]
    server = iter(time_models(Machine.parse(SERVER), tails, seconds=PROFILE_S))
    return {
        way.name: PlanCosts(
            device_s=0.0,
            server_s=0.0 if way.tail is None else next(server).seconds,
            upload_bytes=way.sent_bytes + MESSAGE_BYTES + TENSOR_BYTES,
            download_bytes=way.received_bytes + MESSAGE_BYTES + TENSOR_BYTES,
            is_measured=True,
        )
        for way in ways
    }


def make_probes() -> list[tuple[HandWay, Feeds]]:
    """Return models that return one value of what they get, to measure the transport alone."""
    probes = []
    for size in (SMALL_BYTES, LARGE_BYTES):
        helper, kind = onnx.helper, onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            [helper.make_node("Slice", ["x", "begin", "end"], ["y"])],
            "first",
            [helper.make_tensor_value_info("x", kind, [1, size // 4])],
            [helper.make_tensor_value_info("y", kind, [1, 1])],
            [
                onnx.numpy_helper.from_array(np.zeros(2, np.int64), "begin"),
                onnx.numpy_helper.from_array(np.ones(2, np.int64), "end"),
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        way = HandWay(f"probe {size}", "upload", None, model.SerializeToString(), size, 4)
        probes.append((way, {"x": np.ones((1, size // 4), np.float32)}))
    return probes


def measure_transport(bench: OffloadBench, probes: Sequence[tuple[HandWay, Feeds]]) -> tuple[float, float]:
    """Return seconds of a request and of each byte beside the link: client on the device, service, TLS.

    The link has a round trip, because the client works while a message is on its way.
    """
    bench.testbed.set_link(up_mbit_s=20, down_mbit_s=20, rtt_ms=5)
    medians = []
    for way, feeds in probes:
        bench.load(way.tail or b"", [way], feeds, TOLERANCE)
        found = bench.order("rounds", ways=[way.name], seconds=2.0, least=10, way_seconds=2.0)
        medians.append(float(np.median([one["s"] for one in found[way.name]])))
        head_bytes = MESSAGE_BYTES + TENSOR_BYTES
        costs = PlanCosts(
            0.0,
            upload_bytes=way.sent_bytes + head_bytes,
            download_bytes=way.received_bytes + head_bytes,
        )
        medians[-1] -= predict_s(OffloadPlan(way.name, costs, tail="probe"), Conditions(PROBE_LINK))
    each = (medians[1] - medians[0]) / (LARGE_BYTES - SMALL_BYTES)
    return medians[0] - each * SMALL_BYTES, each


def measure_cell(
    bench: OffloadBench,
    model: str,
    ways: Sequence[HandWay],
    costs: dict[str, PlanCosts],
    link: LinkState,
    transport: tuple[float, float],
    seconds: float,
) -> dict[str, Any]:
    """Measure all ways at one setting of the link."""
    names = [way.name for way in ways]
    found = bench.order("rounds", ways=names, seconds=seconds, least=3, way_seconds=seconds / len(ways))
    rows = []
    for way in ways:
        good = [one["s"] for one in found[way.name] if "error" not in one]
        if not good:
            raise SystemExit(f"{model}, {way.name}: {found[way.name][0]['error']}")
        plan = OffloadPlan("local" if way.kind == "local" else way.name, costs[way.name], tail=way.tail_name)
        predicted = predict_s(plan, Conditions(link))
        if way.tail is not None:
            predicted += transport[0] + transport[1] * (way.sent_bytes + way.received_bytes)
        low, median, high = np.quantile(good, (0.25, 0.5, 0.75))
        rows.append(
            {
                "way": way.name, "kind": way.kind, "predicted_ms": predicted * 1e3,
                "measured_ms": float(median) * 1e3, "spread": float((high - low) / median),
                "rounds": len(good), "error": abs(predicted - median) / float(median),
                "signed": (predicted - float(median)) / float(median),
            }
        )  # fmt: skip
    setting = {"bandwidth_mbit_s": link.up_bits_per_s / 1e6, "rtt_ms": link.rtt_s * 1e3}
    return {"model": model, **setting, "ways": rows, **judge(rows)}


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the predicted choice costs beside the best way, and beside the better end."""
    chosen = min(rows, key=lambda row: row["predicted_ms"])
    best = min(rows, key=lambda row: row["measured_ms"])
    end = min((row for row in rows if row["kind"] != "cut"), key=lambda row: row["measured_ms"])
    behind_ms = chosen["measured_ms"] - end["measured_ms"]
    return {
        "chosen": chosen["way"],
        "best": best["way"],
        "regret": chosen["measured_ms"] / best["measured_ms"] - 1,
        "is_law_kept": behind_ms <= max(0.05 * end["measured_ms"], 2.0),
    }


def summarise(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures beside the goals."""
    rows = [row for cell in cells for row in cell["ways"]]
    return {
        "error_whole": float(np.mean([row["error"] for row in rows if row["kind"] != "cut"])),
        "error_cuts": float(np.mean([row["error"] for row in rows if row["kind"] == "cut"])),
        "errors": {
            kind: float(np.mean([row["error"] for row in rows if row["kind"] == kind]))
            for kind in ("local", "upload", "cut")
        },
        "spread": float(np.median([row["spread"] for row in rows])),
        "regret_kept": float(np.mean([cell["regret"] <= 0.05 for cell in cells])),
        "regret_worst": max(cell["regret"] for cell in cells),
        "law_kept": float(np.mean([cell["is_law_kept"] for cell in cells])),
        "settings": len(cells),
    }


def show(cells: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print the tables."""
    print_table(
        ["model", "Mbit/s", "RTT, ms", "chosen", "best measured", "regret, %", "mean error, %"],
        [
            [
                cell["model"], cell["bandwidth_mbit_s"], cell["rtt_ms"], cell["chosen"], cell["best"],
                cell["regret"] * 100, float(np.mean([row["error"] for row in cell["ways"]])) * 100,
            ]
            for cell in cells
        ],
    )  # fmt: skip
    print()
    print_table(
        ["figure", "goal", "measured"],
        [
            ["error of whole-model ways, %", "<= 3", summary["error_whole"] * 100],
            ["error of cuts, %", "<= 5", summary["error_cuts"] * 100],
            ["settings with a regret <= 5 %, %", ">= 95", summary["regret_kept"] * 100],
            ["settings at most 5 % or 2 ms behind the better end, %", "100", summary["law_kept"] * 100],
            ["median spread of a way (quartiles), %", "", summary["spread"] * 100],
            ["seconds", "<= 720", summary["seconds"]],
        ],
    )


if __name__ == "__main__":
    main()
