"""How fast the choice of a plan follows a link that changes, beside simpler rules.

    PYTHONPATH=device_runtime:toolkit:offload .venv/bin/python benchmarks/offload_adaptation.py
        [--requests 12] [--json FILE]

At most 4 minutes. It needs root for the emulated device (10 % of a processor) and link. The model is that of
the demo, two of them on one image: 320 x 320 pixels, 8 billion operations; all of it runs on the device, or
the pixels are sent (307 kB).

The link goes 20 -> 2 -> 20 Mbit/s with a round trip of 20 ms. Each rule goes through it alone, one request
after the other with pauses of 50 ms:

- edgekit: the session of `open_session` with the package as it was planned and signed;
- static: the plan that is best on the first link, for ever;
- send() timed: bandwidth is what was sent by the time that `send` took;
- plain EWMA: bandwidth is what was sent by the time of the request without the round trip, smoothed by 1/8;
- oracle: the plan with the lowest measured median on the link as it is set.

The rules but edgekit run sessions of packages with one plan. After a change counted are the requests until
the first with the oracle's plan, and the switches of plan. Right: all outputs within 10 %
of the whole model's.
"""

import telemetry_off  # noqa: F401

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_offload.demo.demo_model import make_images, make_model
from edgekit_runtime.remote.cut_table import LOCAL, OffloadPlan
from edgekit_runtime.remote.latency_model import Conditions, LinkState, predict_s
from offload_bench import print_table, write_json
from offload_product import ALL, ROWS, UINT8, ProductBench, describe_load, plan_whole, use_folder

SHARE: Final = 0.1
STEPS_MBIT_S: Final = (20.0, 2.0, 20.0)
RTT_MS: Final = 20.0
PAUSE_S: Final = 0.05
CALIBRATION: Final = 3  # requests of each plan on each link, of which the first warms up
START_LIMIT_S: Final = 20.0
EDGEKIT, STATIC, SEND, EWMA, ORACLE = "edgekit", "static", "send() timed", "plain EWMA", "oracle"


class Rule:
    """The fastest plan at an estimated bandwidth: fixed, of the last `send`, or smoothed."""

    def __init__(self, name: str, plans: Mapping[str, OffloadPlan], best: Mapping[float, str]) -> None:
        """Begin with the first link."""
        self.name, self._plans, self._best = name, plans, best
        first = STEPS_MBIT_S[0] * 1e6
        self._link = LinkState(first, first, RTT_MS / 1e3)

    def choose(self, mbit_s: float) -> str:
        """Return the session that runs the next request; only the oracle looks at the link."""
        if self.name in (EDGEKIT, ORACLE):
            return ALL if self.name == EDGEKIT else self._best[mbit_s]
        if self.name == STATIC:
            return self._best[STEPS_MBIT_S[0]]
        return min(self._plans, key=lambda one: predict_s(self._plans[one], Conditions(self._link)))

    def note(self, found: Mapping[str, Any]) -> None:
        """Take what a request took."""
        plan = self._plans[found["plan"]]
        if plan.tail is None or "error" in found:
            return
        bits = plan.costs.upload_bytes * 8
        if self.name == SEND:
            rate = bits / max(found["send_s"], 1e-6)
        else:
            moving_s = found["s"] - plan.costs.device_s - plan.costs.server_s - self._link.rtt_s
            rate = 0.875 * self._link.up_bits_per_s + 0.125 * bits / max(moving_s, 1e-3)
        self._link = replace(self._link, up_bits_per_s=rate, down_bits_per_s=rate)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=12, help="of each rule on each step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_s, load = time.monotonic(), describe_load()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        use_folder(folder)
        images = make_images(ROWS)
        planned = plan_whole("demo", make_two(images), images, folder, SHARE)
        with ProductBench(folder, SHARE) as bench:
            bench.serve([planned])
            bench.start_device()
            bench.set_link(STEPS_MBIT_S[0], RTT_MS)
            bench.open(planned, [ALL, LOCAL, UINT8])
            medians = calibrate(bench)
            best = {mbit_s: min(each, key=lambda one: each[one]) for mbit_s, each in medians.items()}
            found = {}
            for rule_name in (EDGEKIT, STATIC, SEND, EWMA, ORACLE):
                rule = Rule(rule_name, planned.plans, best)
                found[rule_name] = run_steps(bench, rule, arguments.requests)
            label = bench.testbed.label
    rows = summarise(found, best)
    seconds = time.monotonic() - began_s
    show(label, load, medians, rows, seconds)
    document = {"label": label, "load": load, "medians_s": medians, "rows": rows, "requests": found}
    write_json(arguments.json, {**document, "seconds": seconds})


def make_two(images: NDArray[np.uint8]) -> bytes:
    """Return two models of the demo on one image: twice the work for the same upload."""
    one, other = (
        onnx.compose.add_prefix(
            onnx.load_from_string(make_model(images, seed)), f"m{seed}_", rename_inputs=False
        )
        for seed in (0, 1)
    )
    for field in ("node", "initializer", "output"):
        getattr(one.graph, field).extend(getattr(other.graph, field))
    content: bytes = one.SerializeToString()
    return content


def calibrate(bench: ProductBench) -> dict[float, dict[str, float]]:
    """Return the median time of each plan on each link."""
    medians: dict[float, dict[str, float]] = {}
    for mbit_s in dict.fromkeys(STEPS_MBIT_S):
        bench.set_link(mbit_s, RTT_MS)
        medians[mbit_s] = {}
        for plan in (LOCAL, UINT8):
            records = bench.order("run", name=plan, count=CALIBRATION, pause_s=PAUSE_S)[1:]
            medians[mbit_s][plan] = float(np.median([one["s"] for one in records]))
    return medians


def run_steps(bench: ProductBench, rule: Rule, requests: int) -> list[dict[str, Any]]:
    """Return the requests of a rule over all steps."""
    bench.set_link(STEPS_MBIT_S[0], RTT_MS)
    if rule.name == EDGEKIT:
        bench.order("wait_for_server", name=ALL, seconds=START_LIMIT_S)
    found = []
    for step, mbit_s in enumerate(STEPS_MBIT_S):
        bench.set_link(mbit_s, RTT_MS)
        for _ in range(requests):
            (record,) = bench.order("run", name=rule.choose(mbit_s), count=1, pause_s=PAUSE_S)
            if rule.name != EDGEKIT:
                rule.note(record)
            found.append({**record, "step": step})
    return found


def summarise(found: Mapping[str, Sequence[Mapping[str, Any]]], best: Mapping[float, str]) -> dict[str, Any]:
    """Return the figures of each rule."""
    means = {name: float(np.mean([one["s"] for one in each])) for name, each in found.items()}
    rows = {}
    for name, each in found.items():
        until, switches = [], []
        for step in range(1, len(STEPS_MBIT_S)):
            plans = [one["plan"] for one in each if one["step"] == step]
            before = [one["plan"] for one in each if one["step"] == step - 1][-1]
            wanted = best[STEPS_MBIT_S[step]]
            until.append(plans.index(wanted) + 1 if wanted in plans else None)
            switches.append(sum(one != other for one, other in zip([before, *plans], plans, strict=False)))
        rows[name] = {
            "requests_until": until,
            "switches": switches,
            "mean_ms": means[name] * 1e3,
            "against_oracle": means[name] / means[ORACLE],
            "right": float(np.mean([one["is_right"] for one in each])),
            "hedged": sum(one.get("is_hedged", False) for one in each),
        }
    return rows


def show(
    label: str,
    load: str,
    medians: Mapping[float, Mapping[str, float]],
    rows: Mapping[str, Any],
    seconds: float,
) -> None:
    """Print the tables."""
    print(f"{label}; before: {load}; after: {describe_load()}; {seconds:.0f} s")
    for mbit_s, each in medians.items():
        print(f"{mbit_s:g} Mbit/s: " + ", ".join(f"{name} {one * 1e3:.0f} ms" for name, one in each.items()))
    keys = ("requests_until", "switches", "mean_ms", "against_oracle", "right", "hedged")
    print_table(["rule", *keys], [[name, *(row[key] for key in keys)] for name, row in rows.items()])
    print("goals for edgekit: at most 2 requests, 1 switch a step, 1.15 x the oracle, all answers right")


if __name__ == "__main__":
    main()
