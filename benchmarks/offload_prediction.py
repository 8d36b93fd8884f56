"""How well the latency of every way to run a model is predicted, and what the choice costs beside the best.

    PYTHONPATH=device_runtime:toolkit:offload .venv/bin/python benchmarks/offload_prediction.py
        [--quick] [--models resnet8 ...] [--seconds 6] [--json FILE]

At most 12 minutes at rest: 4 models x 6 bandwidths x 3 round trips; with `--quick` 2 minutes: one model, two
bandwidths, one round trip. It needs root for the emulated device (20 % of a processor) and link, and
../shared/models.

- Ways: all that `edgekit offload plan` extracts and measures: local, uploads, cuts. Each is run by the
  session of a package that has that plan alone; `all` is the session of the package with all, which chooses.
- A way is measured by requests with pauses of 20 ms, as planning measures, without the first, which opens
  TCP's window. Ways that are predicted to take over 1.5 s are left out, and counted.
- Predicted: `latency_model` with the costs in the package and the link as it is set. Error: |predicted -
  median measured| / median measured.
- Regret: of the plan with the lowest prediction, and of the session that chooses, against the lowest median.
  "Worse than the ends": against the better of local and the best upload.
"""

import telemetry_off  # noqa: F401

import argparse
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgekit_runtime.remote.cut_table import LOCAL
from edgekit_runtime.remote.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.remote.measure import PAUSE_S
from offload_bench import print_table, write_json
from offload_product import ALL, MODELS, Planned, ProductBench, describe_load, plan_product, use_folder

SHARE: Final = 0.2
BANDWIDTHS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
RTTS: Final = (5.0, 20.0, 60.0)
WINDOW_BYTES: Final = 1e9  # of a connection in use: larger than any of these links holds
LONGEST_S: Final = 1.5
MOST: Final = 6  # requests of a way at one setting
CUT: Final = "cut"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=6.0, help="at each setting")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    models, bandwidths, rtts = arguments.models, BANDWIDTHS, RTTS
    if arguments.quick:
        models, bandwidths, rtts = models[:1], (2.0, 20.0), (20.0,)
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
                bench.open(one, [ALL, *one.plans])
                for bandwidth, rtt in itertools.product(reversed(bandwidths), rtts):
                    bench.set_link(bandwidth, rtt)
                    link = LinkState(bandwidth * 1e6, bandwidth * 1e6, rtt / 1e3, WINDOW_BYTES)
                    cells.append(measure_cell(bench, one, link, arguments.seconds))
            label = bench.testbed.label
    summary = summarise(cells)
    summary |= {"label": label, "load": load, "seconds": time.monotonic() - began_s}
    show(cells, summary)
    plans = {one.name: {name: str(plan.costs) for name, plan in one.plans.items()} for one in planned}
    write_json(arguments.json, {"summary": summary, "cells": cells, "plans": plans})


def measure_cell(bench: ProductBench, planned: Planned, link: LinkState, seconds: float) -> dict[str, Any]:
    """Measure all ways at one setting of the link."""
    predicted = {name: predict_s(plan, Conditions(link)) for name, plan in planned.plans.items()}
    names = [name for name, one in predicted.items() if one <= LONGEST_S]
    rows = []
    for name in [*names, ALL]:
        bench.order("run", name=name, count=2 if name == ALL else 1)
        limit_s = seconds / (len(names) + 1)
        records = bench.order("run", name=name, count=MOST, seconds=limit_s, pause_s=PAUSE_S)
        low, median, high = np.quantile([one["s"] for one in records], (0.25, 0.5, 0.75))
        rows.append(
            {
                "way": name,
                "predicted_ms": predicted.get(name, records[-1]["predicted_s"]) * 1e3,
                "measured_ms": float(median) * 1e3,
                "spread": float((high - low) / median),
                "rounds": len(records),
                "plans": [one["plan"] for one in records],
                "right": float(np.mean([one["is_right"] for one in records])),
                "failed": sum("error" in one for one in records),
            }
        )
    setting = {"bandwidth_mbit_s": link.up_bits_per_s / 1e6, "rtt_ms": link.rtt_s * 1e3}
    left_out = len(predicted) - len(names)
    return {"model": planned.name, **setting, "ways": rows, "left_out": left_out, **judge(rows)}


def judge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the choice costs beside the best way, and beside the better end."""
    ways, session = rows[:-1], rows[-1]
    chosen = min(ways, key=lambda row: row["predicted_ms"])
    best = min(ways, key=lambda row: row["measured_ms"])
    end_ms = min(row["measured_ms"] for row in ways if not row["way"].startswith(CUT))
    allowed_ms = end_ms + max(0.05 * end_ms, 2.0)
    return {
        "chosen": chosen["way"],
        "best": best["way"],
        "regret": chosen["measured_ms"] / best["measured_ms"] - 1,
        "session_plan": session["plans"][-1],
        "session_regret": session["measured_ms"] / best["measured_ms"] - 1,
        "is_law_kept": chosen["measured_ms"] <= allowed_ms,
        "session_keeps_law": session["measured_ms"] <= allowed_ms,
    }


def error(row: Mapping[str, Any]) -> float:
    """Return the error of a prediction."""
    return abs(float(row["predicted_ms"]) / float(row["measured_ms"]) - 1)


def kind_of(row: Mapping[str, Any]) -> str:
    """Return local, upload or cut."""
    if row["way"] == LOCAL:
        return LOCAL
    return CUT if row["way"].startswith(CUT) else "upload"


def summarise(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures beside the goals."""
    rows = [row for cell in cells for row in cell["ways"][:-1]]
    errors = {kind: [error(row) for row in rows if kind_of(row) == kind] for kind in (LOCAL, "upload", CUT)}
    return {
        "error_whole": float(np.mean([*errors[LOCAL], *errors["upload"]])),
        "error_cuts": float(np.mean(errors[CUT])) if errors[CUT] else None,
        "errors": {kind: float(np.mean(each)) for kind, each in errors.items() if each},
        "bias": {
            kind: float(
                np.mean(
                    [row["predicted_ms"] / row["measured_ms"] - 1 for row in rows if kind_of(row) == kind]
                )
            )
            for kind, each in errors.items()
            if each
        },
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


def show(cells: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print the tables."""
    print(f"{summary['label']}; before: {summary['load']}; after: {describe_load()}")
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
            ["error of whole-model ways, %", "<= 3", summary["error_whole"] * 100],
            ["error of cuts, %", "<= 5", (summary["error_cuts"] or 0.0) * 100],
            *([f"mean signed error, {kind}, %", "", one * 100] for kind, one in summary["bias"].items()),
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
            ["seconds", "<= 720", summary["seconds"]],
        ],
    )


if __name__ == "__main__":
    main()
