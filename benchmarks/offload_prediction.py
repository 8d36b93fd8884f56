"""How well the latency of every way to run a model is predicted, and what the choice costs beside the best.

    scripts/python benchmarks/offload_prediction.py
        [--quick] [--models resnet8 ...] [--seconds 6] [--json FILE] [--merge FILE ...]

At most 7 minutes a model at rest, so 28 in all: 4 models x 6 bandwidths x 3 round trips; with `--quick` 1
minute: one model, two bandwidths, one round trip. With `--merge` it measures nothing and prints one table of
what earlier calls wrote by `--json`. It needs root for the emulated device (20 % of a processor) and link,
and ../shared/models.

- Ways: all that `edgekit offload plan` extracts and measures, whatever they cost in accuracy: local, uploads,
  cuts. One session is told which to run, as by the option `plan` of a device; a second one chooses
  (`session`). All take turns in a random order; in its turn a way answers one request that does not count,
  and then all inputs in a row.
- A request comes 20 ms after the reply to the last one, which is the rhythm in which planning measures too.
  Ways that are predicted to take over 1.5 s, or that the session cannot use then, are left out, and counted.
- The processor of a virtual machine changes its speed up to twofold for seconds or minutes. Where the device
  has over 2 % of the time, requests count at the speed at which the costs were measured (`SpeedGate`). Ways
  that were not seen at that speed with all inputs are only among the errors at any speed.
- Predicted: `latency_model` with the costs in the package, and the link that the device measures first, as
  `edgekit offload plan --server URL` does. The plan is made on 16 images, and four others are sent. Measured
  is the mean over these four, and of each the mean of the middle half of its times, as in planning.
  Compressed images differ in size by a quarter and more, so the error is stated twice: with the sizes of the
  images that are sent, and with those of the samples, which is what a user has.
  Error: |predicted - measured| / measured.
- Regret: how much slower than the fastest way are the predicted best and what the session chose.
  "Worse than the ends": against the better of local and the best upload; for the session with its own times
  too, in which late replies and its work count. Two ways are compared by requests with the same input in the
  same turn, at any speed: the median of their ratios. A session that ran all requests locally, as the better
  end does, is not compared with it: its choice takes microseconds (`offload_overhead.py`).
- Foreseen: what the session itself predicts before each request, with what it has learned about the link and
  both machines until then, in 12 requests at this setting and in those that count; the mean of the middle
  half of the predictions, compared at any speed.
"""

import itertools
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.offload.measurement.job_runner import PAUSE_S
from edgekit_runtime.offload.measurement.request_cost import average_middle
from edgekit_runtime.offload.offload_plan import LOCAL, OffloadPlan
from offload_bench import TOKEN
from offload_product import ALL, MODELS, ROWS, ProductBench, describe_load, plan_product, use_folder
from results import make_parser, print_table, write_json

SHARE: Final = 0.2
BANDWIDTHS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
RTTS: Final = (5.0, 20.0, 60.0)
WINDOW_BYTES: Final = 1e9  # of a connection in use: larger than any of these links holds
LONGEST_S: Final = 1.5
MOST: Final = 12  # turns of a way at one setting
NEGLIGIBLE: Final = 0.02  # share of the device, below which its speed does not matter
SESSION: Final = "session"
PROVE_S: Final = 60.0
SETTLING: Final = 12  # requests in which a session finds out about another link
SETTLING_S: Final = 2.0
CUT: Final = "cut"
GOALS: Final = {"whole-model candidates": "<= 3", "cuts": "<= 5"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=6.0, help="at each setting")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", nargs="+", type=Path, help="JSON of earlier calls")
    arguments = parser.parse_args()
    if arguments.merge:
        parts = [json.loads(path.read_text()) for path in arguments.merge]
        found = {"cells": [cell for one in parts for cell in one["cells"]]}
        found |= {"label": parts[0]["label"], "load": "; ".join(one["load"] for one in parts)}
        found["seconds"] = sum(one["seconds"] for one in parts)
    elif arguments.quick:
        found = measure(arguments.models[:1], (2.0, 20.0), (20.0,), arguments.seconds)
    else:
        found = measure(arguments.models, BANDWIDTHS, RTTS, arguments.seconds)
    found["summary"] = summarise(found["cells"])
    show(found)
    write_json(arguments.json, found)


def measure(
    models: Sequence[str], bandwidths: Sequence[float], rtts: Sequence[float], seconds: float
) -> dict[str, Any]:
    began_s, load = time.monotonic(), describe_load()
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        use_folder(folder)
        planned = [plan_product(one, folder, SHARE, bandwidths, rtts) for one in models]
        with ProductBench(folder, SHARE) as bench:
            bench.serve(planned)
            bench.start_device()
            for one in planned:
                bench.set_link(bandwidths[-1], rtts[0])
                bench.open(
                    replace(one, packages={**one.packages, SESSION: one.packages[ALL]}), [ALL, SESSION]
                )
                usable = bench.order("prove", name=ALL, plans=list(one.plans), seconds=PROVE_S)
                bench.order("prove", name=SESSION, plans=usable, seconds=PROVE_S)
                for bandwidth, rtt in itertools.product(reversed(bandwidths), rtts):
                    bench.set_link(bandwidth, rtt)
                    plans = {name: (one.plans[name], one.as_sent[name]) for name in usable}
                    cells.append(
                        {
                            "model": one.name,
                            "bandwidth_mbit_s": bandwidth,
                            "rtt_ms": rtt,
                            **measure_cell(bench, plans, probe_link(bench), seconds, one.usual_s),
                        }
                    )
            label = bench.testbed.label
    plans = {one.name: {name: str(plan.costs) for name, plan in one.plans.items()} for one in planned}
    spent_s = time.monotonic() - began_s
    return {"cells": cells, "plans": plans, "label": label, "load": load, "seconds": spent_s}


def probe_link(bench: ProductBench) -> LinkState:
    certificate = str(bench.folder / "server.pem")
    found = bench.order("probe", server=bench.url, token=TOKEN, ca_file=certificate)
    up, down = found["up_bits_per_s"], found["down_bits_per_s"]
    return LinkState(up, down or up, found["rtt_s"], WINDOW_BYTES)


def measure_cell(
    bench: ProductBench,
    plans: Mapping[str, tuple[OffloadPlan, OffloadPlan]],
    link: LinkState,
    seconds: float,
    usual_s: float | None,
) -> dict[str, Any]:
    """Measure all ways at one setting; a plan comes with one that has the sizes of the requests."""
    predicted = {name: predict_s(plan, Conditions(link)) for name, (plan, _) in plans.items()}
    as_sent = {name: predict_s(plan, Conditions(link)) for name, (_, plan) in plans.items()}
    names = {
        name: plans[name][0].costs.device_s > NEGLIGIBLE * one
        for name, one in predicted.items()
        if one <= LONGEST_S
    }
    for name in (SESSION, ALL):
        bench.order("run", name=name, count=SETTLING, seconds=SETTLING_S, pause_s=PAUSE_S)
    found = bench.order(
        "take_turns",
        forced=ALL,
        free=SESSION,
        plans=names,
        most=MOST,
        seconds=seconds,
        pause_s=PAUSE_S,
        usual_s=usual_s,
    )
    rows = []
    for name in [*(name for name in names if found[name]), SESSION]:
        records = found[name]
        by_input = [pick([one for one in records if one["input"] == place]) for place in range(ROWS)]
        used = [one for each in by_input for one in each]
        low, median, high = np.quantile(used, (0.25, 0.5, 0.75))
        rows.append(
            {
                "way": name,
                "predicted_ms": predicted.get(name, records[-1]["predicted_s"]) * 1e3,
                "as_sent_ms": as_sent.get(name, records[-1]["predicted_s"]) * 1e3,
                "measured_ms": float(np.mean([average_middle(each) for each in by_input])) * 1e3,
                "spread": float((high - low) / median),
                "foreseen_ms": average_middle([one["predicted_s"] for one in records]) * 1e3,
                "typical_ms": find_typical_ms(records),
                "requests": len(used),
                "of": len(records),
                "inputs_at_usual_speed": len({one["input"] for one in records if one["counts"]}),
                "plans": [one["plan"] for one in records],
                "asked": [[one["turn"], one["input"], one["s"] * 1e3, one["counts"]] for one in records],
                "right": float(np.mean([one["is_right"] for one in records])),
                "failed": sum("error" in one for one in records),
            }
        )
    probed = {"up_mbit_s": link.up_bits_per_s / 1e6, "rtt_ms": link.rtt_s * 1e3}
    return {
        "probed": probed,
        "ways": rows,
        "left_out": len(predicted) + 1 - len(rows),
        **judge(rows),
    }


def pick(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the times of requests at the usual speed; of all, if there are none."""
    return [one["s"] for one in records if one["counts"]] or [one["s"] for one in records]


def judge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the choice costs beside the best way, and beside the better end."""
    ways, session = {row["way"]: row for row in rows[:-1]}, rows[-1]
    typical_ms = {name: row["typical_ms"] for name, row in ways.items()}
    chosen = min(ways.values(), key=lambda row: row["predicted_ms"])
    best = ways[min(typical_ms, key=lambda name: typical_ms[name])]
    end = ways[min((name for name in ways if not name.startswith(CUT)), key=lambda name: typical_ms[name])]
    allowed = 1 + max(0.05, 2.0 / typical_ms[end["way"]])
    is_same = {end["way"], *session["plans"]} == {LOCAL}
    regrets = [compare(ways[name], best) - 1 for name in session["plans"] if name in ways]
    return {
        "chosen": chosen["way"],
        "best": best["way"],
        "end": end["way"],
        "regret": compare(chosen, best) - 1,
        "session_plan": session["plans"][-1],
        "session_regret": float(np.mean(regrets)) if regrets else math.inf,
        "session_to_end": compare(session, end),
        "is_law_kept": compare(chosen, end) <= allowed,
        "session_keeps_law": is_same or compare(session, end) <= allowed,
    }


def find_typical_ms(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean over the inputs of the middle half of their times, at any speed."""
    found = [[one["s"] for one in records if one["input"] == place] for place in range(ROWS)]
    return float(np.mean([average_middle(each) for each in found])) * 1e3


def compare(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how many times longer a way takes than another; median of the same inputs in the same turns."""
    theirs = {(turn, place): ms for turn, place, ms, _ in other["asked"]}
    ratios = [ms / theirs[turn, place] for turn, place, ms, _ in row["asked"] if (turn, place) in theirs]
    return float(np.median(ratios))


def error(row: Mapping[str, Any]) -> float:
    return abs(float(row["predicted_ms"]) / float(row["measured_ms"]) - 1)


def kind_of(row: Mapping[str, Any]) -> str:
    if row["way"] == LOCAL:
        return LOCAL
    return CUT if row["way"].startswith(CUT) else "upload"


def summarise(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures beside the goals."""
    rows = [row for cell in cells for row in cell["ways"][:-1]]
    steady = [row for row in rows if row["inputs_at_usual_speed"] == ROWS]
    foreseen = [{**row, "predicted_ms": row["foreseen_ms"], "measured_ms": row["typical_ms"]} for row in rows]
    errors = {
        "at the speed of planning": [{**row, "predicted_ms": row["as_sent_ms"]} for row in steady],
        "at that speed, by sizes of the samples": steady,
        "at any speed": [{**row, "predicted_ms": row["as_sent_ms"]} for row in rows],
        "foreseen by the session": foreseen,
    }
    return {
        "errors": {speed: find_errors(each) for speed, each in errors.items()},
        "spread": float(np.median([row["spread"] for row in rows])),
        "regret_kept": float(np.mean([cell["regret"] <= 0.05 for cell in cells])),
        "regret_worst": max(cell["regret"] for cell in cells),
        "session_regret_kept": float(np.mean([cell["session_regret"] <= 0.05 for cell in cells])),
        "law_kept": float(np.mean([cell["is_law_kept"] for cell in cells])),
        "session_law_kept": float(np.mean([cell["session_keeps_law"] for cell in cells])),
        "settings": len(cells),
        "left_out": sum(cell["left_out"] for cell in cells),
        "failed": sum(row["failed"] for row in rows),
    }


def find_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return for each kind of way how many there are, the mean error, and the mean signed error."""
    kinds = {
        "whole-model candidates": (LOCAL, "upload"),
        LOCAL: (LOCAL,),
        "uploads": ("upload",),
        "cuts": (CUT,),
    }
    found = {}
    for name, members in kinds.items():
        ratios = [row["predicted_ms"] / row["measured_ms"] for row in rows if kind_of(row) in members]
        if ratios:
            signed = np.array(ratios) - 1
            found[name] = [len(ratios), float(np.abs(signed).mean()), float(signed.mean())]
    return found


def show(found: Mapping[str, Any]) -> None:
    cells, summary = found["cells"], found["summary"]
    print(f"{found['label']}; before: {found['load']}; after: {describe_load()}")
    print_table(
        ["model", "Mbit/s", "RTT, ms", "way", "predicted, ms", "measured, ms", "error, %", "spread, %"],
        [
            [
                *(cell["model"], cell["bandwidth_mbit_s"], cell["rtt_ms"], row["way"]),
                *(row["predicted_ms"], row["measured_ms"], error(row) * 100, row["spread"] * 100),
            ]
            for cell in cells
            for row in cell["ways"]
        ],
    )
    print()
    print_table(
        ["figure", "goal", "measured"],
        [
            *(
                [
                    f"error of {kind} {speed} ({count:.0f}; signed {signed:+.1%}), %",
                    GOALS.get(kind, ""),
                    one * 100,
                ]
                for speed, kinds in summary["errors"].items()
                for kind, (count, one, signed) in kinds.items()
            ),
            ["settings with a regret <= 5 %, %: planned", ">= 95", summary["regret_kept"] * 100],
            ["settings with a regret <= 5 %, %: session", ">= 95", summary["session_regret_kept"] * 100],
            ["at most 5 % or 2 ms behind the better end, %: planned", "100", summary["law_kept"] * 100],
            [
                "at most 5 % or 2 ms behind the better end, %: session",
                "100",
                summary["session_law_kept"] * 100,
            ],
            ["median spread of a way (quartiles), %", "", summary["spread"] * 100],
            ["ways left out", "", summary["left_out"]],
            ["seconds", "<= 1680", found["seconds"]],
        ],
    )


if __name__ == "__main__":
    main()
